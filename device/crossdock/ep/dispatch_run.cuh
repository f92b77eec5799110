// What a block of a dispatch does from its first to its last instruction, for the kernels that
// dispatch: ep_dispatch.cuh has the protocol. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/dispatch_role.cuh>
#include <crossdock/ep/notify_role.cuh>

namespace crossdock::device {

// By all threads of one of the first `tokens.blocks` blocks. False when the rank aborts. `block`
// knows its epoch and who is masked afterwards.
template <EpDispatchConfig kConfig>
CROSSDOCK_DEVICE bool ep_run_dispatch(EpDispatchBlock<kConfig>& block) {
  using Block = EpDispatchBlock<kConfig>;
  const EpDispatchParams& p = block.p;
  const ThreadGroup all = ThreadGroup::block();
  constexpr u32 kEpochThread = (kConfig.dispatch_warps - 1) * kWarpSize;
  const u32 warp = ptx::uniform(warp_index());
  const bool dispatches = warp < kConfig.dispatch_warps;
  const bool flags =
      kConfig.flag_warps != 0 && warp >= kConfig.dispatch_warps + kConfig.notify_warps;
  EpDispatchWarp<Block> dispatch(block, warp);
  const EpNotifyWarp<Block> notify(block, warp - kConfig.dispatch_warps);
  const EpPlan<Block> plan{block};
  EpDispatchFinish<Block> finish{block};
  if (!flags) dispatches ? dispatch.prepare() : notify.prepare();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  block.masked = masked_ranks(p.masking);
  // What needs no epoch, side by side: the first rows, the slot, the destinations.
  u32* epoch = block.template at<u32>(block.shared.epoch);
  if (thread_index() == kEpochThread) *epoch = read_epoch(&p.state->dispatch);
  bool ok = !all.leader() || !aborted(p.common);
  if (dispatches) {
    dispatch.begin();
    finish.begin();
  } else if (!flags) {
    ok = notify.begin();
  }
  ok = plan.route() && ok;
  bool failed = all.any(!ok);  // also the barrier for the epoch
  block.epoch = *epoch;

  if (warp == 0) plan.publish(failed);
  if (!dispatches) notify.announce_output(failed);
  if (!failed && !block.idle() && !flags) failed = dispatches ? !plan.gather() : !notify.open();
  failed = all.any(failed);
  if (warp == kConfig.warps() - 1) plan.publish_ends(failed);

  bool done = !failed && block.idle();
  if (failed) {
    if (dispatches) dispatch.give_up();
  } else if (!done) {
    if constexpr (kConfig.flag_warps != 0) done = flags && EpRowFlagWarp<Block>(block).run();
    if (!flags) done = dispatches ? dispatch.run(plan) : notify.run(plan);
  } else if (kConfig.flag_warps != 0 && warp == kConfig.dispatch_warps) {
    notify.tell_nothing();
  }
  done = !all.any(!done);
  if (done && warp == 0 && lane_index() < p.view.world) {
    const u32 after = p.view.rank + lane_index();
    const u32 peer = after < p.view.world ? after : after - p.view.world;
    if (block.talks_to(peer)) block.signal_rows(peer);
  }
  // Late, beside the signal: it takes longer, and nobody waits for it.
  if (thread_index() == kEpochThread) pass_epoch(&p.state->dispatch, block.epoch);
  ptx::sync_warp(kFullMask);
  if (done && dispatches && block_index() == 0) finish.run();
  if (!p.masking.late || !done || block_index() != 0) return done;
  // All waits have ended. Who has come is asked once, since the mask may change at any moment.
  const bool gone = all.any(aborted(p.common));
  u32* decided = epoch;  // all have read that
  if (all.leader()) *decided = masked_ranks(p.masking);
  all.sync();
  block.masked |= *decided;
  if (!gone && dispatches) finish.run_late();
  return done;
}

}  // namespace crossdock::device
