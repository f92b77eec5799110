// Grid sync: all blocks of one rank meet. The blocks must all be resident at once, or the wait ends
// at its deadline. Four counters let different roles (thread groups) sync independently of each
// other; a counter belongs to the same group of every block.
//
//   counter c, n blocks. Block 0 adds 0x80000000 - (n - 1), each other block adds 1: together
//   exactly 0x80000000, so bit 31 flips once all have come and the low bits are as before. A block
//   waits until bit 31 differs from what its own add returned. Nothing is reset, nothing overflows.
//
//   block b                                    counter
//     group.sync()      the group's writes
//     leader: old = atom_add acq_rel gpu  --->  + tag(b)
//     leader: poll acquire gpu            <---  until (value ^ old) has bit 31
//     group.any(failed)  all go on or all leave
//
// Writes of every thread before the sync are visible to every thread after it, at gpu scope.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>

namespace crossdock::device {

inline constexpr u32 kGridSyncBit = 0x80000000u;

CROSSDOCK_HOST_DEVICE constexpr u32 grid_sync_tag(u32 block, u32 blocks) {
  return block == 0 ? kGridSyncBit - (blocks - 1) : 1u;
}

// False when the rank aborts; every thread of every group gets the same answer or leaves later.
CROSSDOCK_DEVICE bool grid_sync(const LaunchCommon& c, u32 counter,
                                const ThreadGroup& group CROSSDOCK_SITE) {
  group.sync(CROSSDOCK_PASS_SITE_ONLY);
  bool passed = true;
  if (group.leader()) {
    u32* word = &c.control->grid_sync[counter].value;
    const u32 old = ptx::atom_add_acq_rel_gpu(
        word, grid_sync_tag(block_index(), grid_size()) CROSSDOCK_PASS_SITE);
    passed = wait_until(
        c, Expected{Phase::kGridSync, kNoPeer, (old & kGridSyncBit) ^ kGridSyncBit},
        [&] { return u64{ptx::ld_acquire_gpu(word CROSSDOCK_PASS_SITE)}; },
        [&](u64 seen) {
          return ((static_cast<u32>(seen) ^ old) & kGridSyncBit) != 0;
        } CROSSDOCK_PASS_SITE);
  }
  return !group.any(!passed CROSSDOCK_PASS_SITE);
}

}  // namespace crossdock::device
