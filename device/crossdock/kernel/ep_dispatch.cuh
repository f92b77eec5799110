// ep_dispatch: every token of every rank once to each rank that owns an expert it chose, straight
// into its final row; with ids, weights, token numbers, scales and counts. Counts first: no ring,
// no copy afterwards, and no barrier between ranks.
//
// Launch on every rank, the same number of times: grid = the rank's source_blocks, all resident,
// block = kConfig.threads(), shared memory `ep_dispatch_shared`. Symmetric memory: `add_ep`, and
// output blocks of `ep_output_layout`. Ranks may differ in tokens and blocks, and in nothing else.
//
//   epoch e at rank r                                  a peer
//     outputs[r] = {e, offset} (release)   ------->    may store into r's block (acquire)
//     counts of each block                 ------->    bases of its rows (ep/plan.cuh)
//     rows, metadata                       ------->    the peer's output block
//     arrivals[r] += 1 per block (release) ------->    its block 0 waits for all blocks of all
//     with masks: flags[r][block] = e                  ranks
//
// A rank is at most one epoch ahead of any other, since its launch ends after it has got something
// from everyone; two parities of every word are therefore enough. The launch of e ends when all
// rows of e are here: what follows in the stream may read them.
//
// With masks (`stride`) places are fixed by source, as in ep_small_dispatch, so that ranks need not
// agree who is masked; a block then waits for counts of this rank only, and each has a flag and
// selections of its own, which carry the epoch instead of growing: so what was not sent to a masked
// rank is not missed when it is let in again. With `masking.late` a rank that does not come is
// masked; its rows and selections are left out, and it is not told that rows are there.
//
// A fault (an id out of range, a peer that does not come) ends the launch at every rank, with the
// record at the rank that found it; rows may have been stored by then, but none has been delivered.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/dispatch_role.cuh>
#include <crossdock/ep/notify_role.cuh>

namespace crossdock::device::kernel {

template <EpDispatchConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_dispatch(CROSSDOCK_PARAMS(EpDispatchParams, p)) {
  using Block = EpDispatchBlock<kConfig>;
  const ThreadGroup all = ThreadGroup::block();
  constexpr u32 kEpochThread = (kConfig.dispatch_warps - 1) * kWarpSize;
  Block block(p);
  const u32 warp = ptx::uniform(warp_index());
  const bool dispatches = warp < kConfig.dispatch_warps;
  EpDispatchWarp<Block> dispatch(block, warp);
  const EpNotifyWarp<Block> notify(block, warp - kConfig.dispatch_warps);
  const EpPlan<Block> plan{block};
  EpDispatchFinish<Block> finish{block};
  dispatches ? dispatch.prepare() : notify.prepare();
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
  } else {
    ok = notify.begin();
  }
  ok = plan.route() && ok;
  bool failed = all.any(!ok);  // also the barrier for the epoch
  block.epoch = *epoch;

  if (warp == 0) plan.publish(failed);
  if (!dispatches) notify.announce_output(failed);
  if (!failed && !block.idle()) failed = dispatches ? !plan.gather() : !notify.open();
  failed = all.any(failed);
  if (warp == kConfig.warps() - 1) plan.publish_ends(failed);

  bool done = !failed && block.idle();
  if (failed) {
    if (dispatches) dispatch.give_up();
  } else if (!done) {
    done = dispatches ? dispatch.run(plan) : notify.run(plan);
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
  if (!p.masking.late || !done || block_index() != 0) return;
  if (!all.any(aborted(p.common)) && dispatches) finish.run_late();
}

}  // namespace crossdock::device::kernel
