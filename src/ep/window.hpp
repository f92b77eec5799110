// The window of an expert-parallel group: control areas, then slots, each with room for the rows of
// one dispatch and for the expert outputs that combine reads, and the caller's memory. Pure
// functions of the options.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <crossdock/ep/options.hpp>
#include <crossdock/layout/ep_combine.cuh>
#include <crossdock/layout/ep_dispatch.cuh>
#include <crossdock/layout/ep_packets.cuh>
#include <crossdock/layout/ep_small.cuh>

namespace crossdock::ep {

using device::u32;
using device::u64;
using device::u8;

struct Window {
  device::SymmetricLayout layout;
  device::EpAreas areas;
  u32 copy_blocks = 0;          // beside a dispatch: expand_sms, or by its rule
  device::EpFlagAreas flags{};  // with copy_blocks
  u32 world = 0;
  u32 capacity = 0;      // rows of a slot
  u32 row_bytes = 0;     // the largest delivered row
  u32 scale_bytes = 0;   // the largest scales of a row
  u64 outputs = 0;       // offset of the first slot's rows
  u64 output_bytes = 0;  // of a slot
  u64 inputs = 0;        // offset of the first slot's expert outputs
  u64 input_bytes = 0;   // of a slot
  u64 control_bytes = 0;
  u32 slots = 0;        // in the window, without the transit, which comes after them
  u64 user = 0;         // offset of the caller's memory
  bool pushes = false;  // combine
  device::EpStaging staging{};
  u64 staging_bytes = 0;
  // Few tokens: slots of their own. Empty: there is no such path.
  std::vector<device::EpSmallAreas> small;     // of each slot
  std::vector<device::EpPacketAreas> packets;  // of each slot
  u32 packet_tokens = 0;                       // a rank's tokens that travel in packets
  u32 small_capacity = 0;                      // rows of a slot
  u64 small_outputs = 0;
  u64 small_output_bytes = 0;
  u64 small_inputs = 0;
  u64 small_input_bytes = 0;

  [[nodiscard]] u64 output(u32 slot) const { return outputs + slot * output_bytes; }
  [[nodiscard]] u64 input(u32 slot) const { return inputs + slot * input_bytes; }
  [[nodiscard]] u64 small_output(u32 slot) const {
    return small_outputs + slot * small_output_bytes;
  }
  [[nodiscard]] u64 small_input(u32 slot) const { return small_inputs + slot * small_input_bytes; }
};

// Blocks of each rank.
std::vector<u32> dispatch_blocks(const Options& options, u32 world);
std::vector<u32> combine_blocks(const Options& options, u32 world);
// Whether rows of combine are pushed, and by how many of a rank's `blocks`.
bool combine_pushes(const Options& options, u32 world);
u32 send_blocks(const Options& options, u32 world, u32 blocks);

// Expert outputs of a slot of the path for few tokens.
device::EpInputLayout small_input_layout(const Options& options, u32 capacity);
// Blocks of a small dispatch that send.
u32 small_blocks(const Options& options, u32 tokens);

// Checks the options; kInvalidArgument names rule, value and fix.
Result<Window> make_window(const Options& options, u32 world);
// Words that blocks tell each other which copy rows as they come.
u64 copy_words(const Window& window);
// Routing table of one slot.
u64 routes_bytes(const Options& options, const Window& window, u32 rank);

}  // namespace crossdock::ep
