// ep_small_dispatch: dispatch of few tokens, in one launch without a barrier between ranks and
// without waiting for anybody's counts: the rows of source s go to places s * stride and on.
//
// Launch on every rank, the same number of times for each slot: grid = send_blocks, and one more
// that receives; block = kConfig.threads(), shared memory `ep_small_shared`. Symmetric memory:
// `add_ep_small` and a block of `ep_output_layout` for each slot. Ranks differ in tokens and blocks
// only. Sending and receiving may be launches of their own, so that no SM waits in between.
//
//   use e of the slot, rank r                          a peer
//     free[r] = e - 1, if combine has not told  ---->  may store into the slot (acquire), and
//                                                      its words
//     headers[r] = {e, rows, blocks}            ---->  how much comes from r
//     rows, ids, weights, scales, counts        ---->  places r * stride ...
//     flags[r][block] = e (one fence a block)   ---->  its receiving block waits for all of them
//
// `e` counts the uses of the slot, on all ranks alike, and is kept by the device. Words are never
// zeroed: nobody stores for use e before every word of e - 1 has been read, since the slot is told
// to be free only by launches that come after the one that received.
//
// A source that gives up says so, and because of whom, in its header: the others leave at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/small_receive.cuh>
#include <crossdock/ep/small_send.cuh>

namespace crossdock::device {

template <EpSmallConfig kConfig>
CROSSDOCK_DEVICE void ep_small_send(EpSmallBlock<kConfig>& block) {
  using Block = EpSmallBlock<kConfig>;
  const EpSmallParams& p = block.p;
  const ThreadGroup all = ThreadGroup::block();
  constexpr u32 kEpochThread = kConfig.warps * kWarpSize;
  const u32 warp = ptx::uniform(warp_index());
  const bool moves = warp < kConfig.warps;
  EpSmallWarp<Block> mover(block, warp);
  EpSmallTeller<Block> teller(block);
  moves ? mover.prepare() : teller.prepare();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  u32* epoch = block.template at<u32>(block.shared.epoch);
  if (thread_index() == kEpochThread) *epoch = read_epoch(&p.state->dispatch);
  bool ok = !all.leader() || !aborted(p.common);
  moves ? mover.begin() : teller.begin();
  ok = block.make_routes() && ok;
  const bool failed = all.any(!ok);  // also the barrier for the epoch
  block.epoch = *epoch;

  bool done = !failed;
  if (!moves) {
    done = teller.run(failed);
  } else if (failed) {
    mover.give_up();
  } else {
    done = mover.run();
  }
  done = !all.any(!done);
  if (!done && !failed && !moves) teller.tell_headers(true);
  if (done && warp == 0) {
    // The rows of all warps, which the barrier has handed over, before the flags.
    ptx::fence_acq_rel_sys();
    if (lane_index() < p.view.world)
      ptx::st_relaxed_sys(p.view.map(block.flags(p.view.rank) + block_index(), lane_index()),
                          block.epoch);
  }
  // Late, beside the signal: it takes longer, and nobody waits for it.
  if (thread_index() == kEpochThread) pass_epoch(&p.state->dispatch, block.epoch);
}

template <EpSmallConfig kConfig>
CROSSDOCK_DEVICE void ep_small_receive(EpSmallBlock<kConfig>& block) {
  const EpSmallParams& p = block.p;
  const ThreadGroup all = ThreadGroup::block();
  const EpSmallReceiver<EpSmallBlock<kConfig>> receiver(block);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  u32* epoch = block.template at<u32>(block.shared.epoch);
  const bool sends = p.send_blocks != 0;  // else the launch before has passed the epoch
  if (all.leader()) *epoch = read_epoch(&p.state->dispatch) - (sends ? 0 : 1);
  if (!may_start(p.common)) return;  // also the barrier for the epoch
  block.epoch = *epoch;
  if (all.leader() && sends) pass_epoch(&p.state->dispatch, block.epoch);
  ptx::sync_warp(kFullMask);
  const bool came = receiver.wait(ptx::uniform(warp_index()));
  if (!all.any(!came)) receiver.finish();
}

namespace kernel {

template <EpSmallConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_small_dispatch(CROSSDOCK_PARAMS(EpSmallParams, p)) {
  EpSmallBlock<kConfig> block(p);
  if (block_index() < p.send_blocks) {
    ep_small_send(block);
  } else {
    ep_small_receive(block);
  }
}

}  // namespace kernel
}  // namespace crossdock::device
