// The control areas of symmetric memory: what ranks signal each other through. All of it is zero
// before the first launch and after a reset of the group, and never zeroed in between: signals
// alternate, counters only grow, words carry their epoch. Shared by host, kernels and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/symmetric.cuh>

namespace crossdock::device {

// Offsets of the peer barrier's words in every rank's window. `signals` are the two phases, a line
// each; `arrived[r]` is the number of barriers rank r has entered, for the fault record only.
struct PeerBarrierLayout {
  u64 signals;
  u64 arrived;
};
CROSSDOCK_HOST_DEVICE constexpr PeerBarrierLayout add_peer_barrier(SymmetricLayout& layout,
                                                                   u32 world) {
  PeerBarrierLayout out{};
  out.signals = layout.add("barrier.signals", 2 * SymmetricLayout::kLine);
  out.arrived = layout.add("barrier.arrived", u64{world} * sizeof(u32));
  return out;
}

// Which launch of a kernel this is, kept by the device so that a captured graph can be replayed. In
// local device memory; one per kernel that uses epochs, since parity must alternate for each.
struct alignas(128) EpochState {
  u32 finished;  // epochs that have begun and been read by every block
  u32 readers;   // blocks that have read `finished` in this launch
};

}  // namespace crossdock::device
