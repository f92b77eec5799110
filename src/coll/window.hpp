// The window of a group of collectives: words that ranks leave for each other, the inputs of a
// session, slots for tensors on their way, the rank's part of the table. Pure functions of the
// options.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/coll/options.hpp>
#include <crossdock/layout/symmetric.cuh>

namespace crossdock::coll {

using device::u32;
using device::u64;
using device::u8;

// Offsets in every window. Words have 64 bits; those indexed by a rank are written by that rank.
struct Window {
  device::SymmetricLayout layout;
  u32 world = 0;
  u32 gathers = 0;
  u32 inflight = 0;
  u64 failed = 0;   // not 0: that rank + 1 has failed
  u64 free = 0;     // [world]: has read the inputs of this rank's last session
  u64 posted = 0;   // [gathers][world]: its input is there; a tag()
  u64 seen = 0;     // [world]: has seen this rank at the barrier
  u64 here = 0;     // [world]: is at the barrier
  u64 credit = 0;   // [world][inflight]: has taken the tensor out of this rank's slot
  u64 arrived = 0;  // [world][inflight]: its tensor is in its slot; a tag()
  u64 control_bytes = 0;
  u64 inputs = 0;      // of a session
  u64 slots = 0;       // [channels][inflight] tensors
  u64 slot_bytes = 0;  // of one
  u32 channels = 0;
  Pipeline pipeline = Pipeline::kNeighbours;
  u64 table = 0;

  [[nodiscard]] u64 posted_at(u32 gather, u32 from) const {
    return posted + (u64{gather} * world + from) * 8;
  }
  [[nodiscard]] u64 credit_at(u32 of, u32 slot) const {
    return credit + (u64{of} * inflight + slot) * 8;
  }
  [[nodiscard]] u64 arrived_at(u32 from, u32 slot) const {
    return arrived + (u64{from} * inflight + slot) * 8;
  }
  // Where rank `from` keeps a tensor for rank `to`, in the window of `from`.
  [[nodiscard]] u64 slot_at(u32 from, u32 to, u32 slot) const {
    const u32 channel = pipeline == Pipeline::kAll ? to : to == (from + 1) % world ? 0 : 1;
    return slots + (u64{channel} * inflight + slot) * slot_bytes;
  }
};

// What a rank says of an input or a tensor that is there. Never 0.
enum class Said : u32 { kGather = 1, kScatter = 2, kTensor = 3 };
constexpr u64 tag(Said said, u64 offset, u64 bytes) {
  return u64{static_cast<u32>(said)} << 62 | offset / 128 << 32 | bytes / 16;
}
constexpr u64 tag_bytes(u64 value) {
  return (value & 0xffffffffu) * 16;
}

// Checks the options; kInvalidArgument names rule, value and fix.
Result<Window> make_window(const Options& options, u32 world);

}  // namespace crossdock::coll
