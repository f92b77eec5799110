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
//     ranks
//
// A rank is at most one epoch ahead of any other, since its launch ends after it has got something
// from everyone; two parities of every word are therefore enough. The launch of e ends when all
// rows of e are here: what follows in the stream may read them.
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
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  Block block(p);
  const u32 warp = ptx::uniform(warp_index());
  const bool dispatches = warp < kConfig.dispatch_warps;
  EpDispatchWarp<Block> dispatch(block, warp);
  const EpNotifyWarp<Block> notify(block, warp - kConfig.dispatch_warps);
  const EpPlan<Block> plan{block};
  u32* epoch = block.template at<u32>(block.shared.epoch);
  if (thread_index() == 0) *epoch = read_epoch(&p.state->dispatch);
  if (dispatches) dispatch.begin();
  bool ok = may_start(p.common);  // also the barrier for the epoch
  block.epoch = *epoch;
  if (ok) {
    ok = plan.run(dispatches || notify.begin());
  } else {
    plan.give_up();
  }
  if (thread_index() == 0) pass_epoch(&p.state->dispatch, block.epoch);
  if (!ok) {
    if (dispatches) dispatch.give_up();
    return;
  }
  const bool done = dispatches ? dispatch.run(plan) : notify.run(plan);
  if (ThreadGroup::block().any(!done)) return;
  if (warp != 0) return;
  if (lane_index() < p.view.world) {
    const u32 peer = (p.view.rank + lane_index()) % p.view.world;
    signal_counter(p.view.map(block.arrivals(p.view.rank), peer), 1);
  }
  if (block_index() == 0) EpDispatchFinish<Block>{block}.run();
}

}  // namespace crossdock::device::kernel
