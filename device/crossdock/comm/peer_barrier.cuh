// The barrier across ranks, by one group of one block of each rank. Barrier number t uses signal
// word t & 1 (its phase) and adds +1 or -1 by bit 1 of t (its sign):
//
//     t      0    1    2    3    4 ...
//     word   0    1    0    1    0
//     sign   +    +    -    -    +
//     target world world 0   0    world
//
//   rank a                               rank b
//     signals[phase] of b += sign  ---->   polls its own signals[phase] until the target
//     polls its own signals[phase] <----   signals[phase] of a += sign
//     arrived[a] of b = t + 1      ---->   (read only when b's wait expires)
//     turn = t + 1
//
// A rank may run one barrier ahead: it then works on the other word. It cannot come back to the
// first word before all have left it, since that needs their next signal. Nothing is ever reset.
// The counter cannot say who is missing; `arrived` can, and since it is stored after the signal it
// costs the barrier no time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/grid_sync.cuh>
#include <crossdock/layout/sync.cuh>

namespace crossdock::device {

struct PeerBarrier {
  const LaunchCommon& common;
  const SymmetricView& view;
  PeerBarrierLayout layout;

  // By all threads of the group. True when all ranks have come: what any thread of this group, or
  // any thread that synchronised with it, wrote before is visible to the groups of all ranks after.
  CROSSDOCK_DEVICE bool arrive_and_wait(const ThreadGroup& group CROSSDOCK_SITE) const {
    // Read before the sync, advanced by the leader after it.
    const u32 turn = ptx::ld_relaxed_gpu(&common.control->barrier_turn.value CROSSDOCK_PASS_SITE);
    group.sync(CROSSDOCK_PASS_SITE_ONLY);
    const bool down = (turn & 2u) != 0;
    u32* signal = view.at<u32>(layout.signals + (turn & 1u) * SymmetricLayout::kLine);
    for (u32 peer = group.index(); peer < view.world; peer += group.threads)
      ptx::red_add_release_sys(view.map(signal, peer), down ? ~0u : 1u CROSSDOCK_PASS_SITE);
    u32* arrived = view.at<u32>(layout.arrived);
    for (u32 peer = group.index(); peer < view.world; peer += group.threads)
      ptx::st_relaxed_sys(view.map(arrived + view.rank, peer), turn + 1 CROSSDOCK_PASS_SITE);
    bool passed = true;
    if (group.leader()) {
      ptx::st_relaxed_gpu(&common.control->barrier_turn.value, turn + 1 CROSSDOCK_PASS_SITE);
      passed = wait(signal, down ? 0u : view.world, turn CROSSDOCK_PASS_SITE);
    }
    return !group.any(!passed CROSSDOCK_PASS_SITE);
  }

 private:
  CROSSDOCK_DEVICE bool wait(const u32* signal, u32 target, u32 turn CROSSDOCK_SITE) const {
    u64 seen = 0;
    const WaitOutcome outcome = poll_until(
        common, Phase::kPeerBarrier, seen,
        [&] { return u64{ptx::ld_acquire_sys(signal CROSSDOCK_PASS_SITE)}; },
        [&](u64 value) { return value == target; } CROSSDOCK_PASS_SITE);
    if (outcome == WaitOutcome::kExpired) blame(turn CROSSDOCK_PASS_SITE);
    return outcome == WaitOutcome::kDone;
  }

  // Names the rank that has not entered barrier `turn`: the first one after this rank.
  CROSSDOCK_DEVICE void blame(u32 turn CROSSDOCK_SITE) const {
    Expected expected{Phase::kPeerBarrier, kNoPeer, u64{turn} + 1};
    u64 seen = 0;
    u32* arrived = view.at<u32>(layout.arrived);
    for (u32 i = 1; i < view.world && expected.peer == kNoPeer; ++i) {
      const u32 peer = (view.rank + i) % view.world;
      // An atomic reads the newest value; a load that nothing orders may give an older one.
      const u32 number = ptx::atom_or_relaxed_sys(arrived + peer, 0u CROSSDOCK_PASS_SITE);
      if (static_cast<i32>(number - (turn + 1)) >= 0) continue;
      expected.peer = peer;
      seen = number;
    }
    raise_fault(common, expected, seen, common.deadline_ns CROSSDOCK_PASS_SITE);
  }
};

// All blocks of all ranks meet: grid sync, block 0 meets its peers, grid sync. `group` is the same
// group of every block; the order at system scope covers the writes of all of them.
CROSSDOCK_DEVICE bool grid_and_peer_barrier(const PeerBarrier& barrier, u32 counter,
                                            const ThreadGroup& group CROSSDOCK_SITE) {
  if (!grid_sync(barrier.common, counter, group CROSSDOCK_PASS_SITE)) return false;
  if (block_index() == 0 && !barrier.arrive_and_wait(group CROSSDOCK_PASS_SITE)) return false;
  return grid_sync(barrier.common, counter, group CROSSDOCK_PASS_SITE);
}

}  // namespace crossdock::device
