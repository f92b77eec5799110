// ep_small_dispatch: dispatch of few tokens, in one launch without a barrier between ranks and
// without waiting for anybody's counts: the rows of source s go to places s * stride and on.
//
// Launch on every rank, the same number of times for each slot: grid = send_blocks, one more that
// tells what comes, and one that receives; block = kConfig.threads(), shared memory
// `ep_small_shared`. Symmetric memory: `add_ep_small` and a block of `ep_output_layout` for each
// slot. Ranks differ in tokens and blocks only. Sending and receiving may be launches of their own,
// so that no SM waits in between.
//
//   use e of the slot, rank r                          a peer
//     free[r] = e - 1, if combine has not told  ---->  may store into the slot (acquire), and
//                                                      its words
//     headers[r] = {e, rows, blocks}            ---->  how much comes from r
//     counts of experts (epoch words)           ---->  summed up
//     rows, ids, weights, scales                ---->  places r * stride ...
//     flags[r][block] = e (one fence a block)   ---->  its receiving block waits for all of them
//
// `e` counts the uses of the slot, on all ranks alike, and is kept by the device. Words are never
// zeroed: nobody stores for use e before every word of e - 1 has been read, since the slot is told
// to be free only by launches that come after the one that received.
//
// A rank that is masked is sent nothing and not waited for; its places stay empty. With
// `masking.late` a rank whose wait expires is masked instead of being a fault. Ranks need not agree
// who is masked: nobody's places depend on it.
//
// A source that gives up says so, and because of whom, in its header: the others leave at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/small_receive.cuh>
#include <crossdock/ep/small_send.cuh>
#include <crossdock/ep/small_tell.cuh>

namespace crossdock::device {

template <EpSmallConfig kConfig>
CROSSDOCK_DEVICE void ep_small_send(EpSmallBlock<kConfig>& block) {
  const EpSmallParams& p = block.p;
  const ThreadGroup all = ThreadGroup::block();
  constexpr u32 kEpochThread = (kConfig.warps - 1) * kWarpSize;
  const u32 warp = ptx::uniform(warp_index());
  EpSmallWarp<EpSmallBlock<kConfig>> mover(block, warp);
  mover.prepare();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  block.masked = masked_ranks(p.masking);
  u32* epoch = block.template at<u32>(block.shared.epoch);
  if (thread_index() == kEpochThread) *epoch = read_epoch(&p.state->dispatch);
  bool ok = !all.leader() || !aborted(p.common);
  mover.begin();
  ok = block.template make_routes<false>() && ok;
  const bool failed = all.any(!ok);  // also the barrier for the epoch
  block.epoch = *epoch;

  bool done = false;
  if (failed) {
    mover.give_up();
  } else {
    done = mover.run();
  }
  done = !all.any(!done);
  if (!done && !failed && warp == 0) ep_small_give_up(block);
  if (done && warp == 0) {
    // The rows of all warps, which the barrier has handed over, before the flags.
    ptx::fence_acq_rel_sys();
    // A rank that has been masked meanwhile, perhaps by a warp of this block, may lack rows.
    if (p.masking.late) block.masked |= masked_ranks(p.masking);
    if (block.talks_to(lane_index()))
      ptx::st_relaxed_sys(p.view.map(block.flags(p.view.rank) + block_index(), lane_index()),
                          block.epoch);
  }
  // Late, beside the signal: it takes longer, and nobody waits for it.
  if (thread_index() == kEpochThread) pass_epoch(&p.state->dispatch, block.epoch);
}

template <EpSmallConfig kConfig>
CROSSDOCK_DEVICE void ep_small_tell(EpSmallBlock<kConfig>& block) {
  const EpSmallParams& p = block.p;
  const ThreadGroup all = ThreadGroup::block();
  const u32 warp = ptx::uniform(warp_index());
  EpSmallTeller<EpSmallBlock<kConfig>> teller(block, warp);
  teller.prepare();
  all.sync();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();

  block.masked = masked_ranks(p.masking);
  u32* epoch = block.template at<u32>(block.shared.epoch);
  if (all.leader()) *epoch = read_epoch(&p.state->dispatch);
  bool ok = !all.leader() || !aborted(p.common);
  teller.begin();
  ok = block.template make_routes<true>() && ok;
  const bool failed = all.any(!ok);  // also the barrier for the epoch
  block.epoch = *epoch;
  if (all.leader()) pass_epoch(&p.state->dispatch, block.epoch);
  ptx::sync_warp(kFullMask);
  if (failed ? warp == 0 : !teller.run() && warp == 0) ep_small_give_up(block);
}

template <EpSmallConfig kConfig>
CROSSDOCK_DEVICE void ep_small_receive(EpSmallBlock<kConfig>& block) {
  const EpSmallParams& p = block.p;
  const ThreadGroup all = ThreadGroup::block();
  EpSmallReceiver<EpSmallBlock<kConfig>> receiver(block);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  block.masked = masked_ranks(p.masking);
  u32* epoch = block.template at<u32>(block.shared.epoch);
  // Of the launch that has sent, if that was another one.
  if (all.leader()) *epoch = read_epoch(&p.state->dispatch) - (p.sends ? 0 : 1);
  if (!may_start(p.common)) return;  // also the barrier for the epoch
  block.epoch = *epoch;
  if (all.leader() && p.sends) pass_epoch(&p.state->dispatch, block.epoch);
  ptx::sync_warp(kFullMask);
  const u32 warp = ptx::uniform(warp_index());
  if (all.any(!receiver.wait_headers(warp))) return;
  // The lanes of a warp leave together: what follows are votes of theirs.
  const bool came = !ptx::any(kFullMask, !receiver.add_experts());
  ptx::sync_warp(kFullMask);
  if (all.any(!came || !receiver.wait_flags(warp))) return;
  // The selections of a source that has been masked meanwhile do not count.
  if (p.masking.late && all.any(receiver.late) && all.any(!receiver.add_experts())) return;
  receiver.finish();
}

namespace kernel {

template <EpSmallConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_small_dispatch(CROSSDOCK_PARAMS(EpSmallParams, p)) {
  EpSmallBlock<kConfig> block(p);
  if (block_index() < p.send_blocks) {
    ep_small_send(block);
  } else if (p.sends && block_index() == p.send_blocks) {
    ep_small_tell(block);
  } else {
    ep_small_receive(block);
  }
}

}  // namespace kernel
}  // namespace crossdock::device
