// What a Handle holds: its slot at its rank, and the routing's geometry for combine.
// Single-owner. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "ep/core.hpp"

namespace crossdock::ep {
inline namespace v1 {

struct Handle::State {
  std::shared_ptr<Core> core;
  u32 generation = 0;  // of the group: resets before it
  u32 rank = 0;
  u32 slot = 0;
  u32 ticket = 0;
  u32 experts = 0;  // of the rank
  device::EpTokens tokens{};
  const u64* host_rows = nullptr;
  const u64* host_experts = nullptr;
  Placement placement;
  bool weights = false;             // have been delivered
  bool arrived = true;              // false between the halves of a dispatch
  bool grouped = false;             // lists of its rows have been asked for
  bool announced = false;           // to peers, which read its input since; never in packets
  u32 let_in = 0;                   // RankState::let_in at its dispatch
  std::uint64_t capture = 0;        // on the small path: of its dispatch; 0: none
  Payload told = Payload::kBf16;    // how the rows of its combine_send() travel
  Payload packed = Payload::kBf16;  // what reduce_rows() has written and is still there
  // For the second half of a small dispatch, beside what the slot's parameters say.
  device::EpOutputLayout output{};
  device::EpDispatchResult result{};
  u32 input_row_bytes = 0;
  bool cast = false;
  bool packets = false;
  u32 most_tokens = 0;  // of any rank, in this call
  Received received;
  ExpertInput input;

  [[nodiscard]] bool copied() const { return placement.slot->kind == SlotKind::kCopy; }

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    if (core != nullptr) core->release(rank, slot);
  }
};

}  // namespace v1
}  // namespace crossdock::ep
