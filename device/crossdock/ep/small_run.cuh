// The blocks of ep_small_dispatch by their number: those that send, one that tells, one that
// receives.
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

// True when all has come.
template <EpSmallConfig kConfig>
CROSSDOCK_DEVICE bool ep_small_receive(EpSmallBlock<kConfig>& block) {
  const EpSmallParams& p = block.p;
  const ThreadGroup all = ThreadGroup::block();
  EpSmallReceiver<EpSmallBlock<kConfig>> receiver(block);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (!block.join()) return false;
  const u32 warp = ptx::uniform(warp_index());
  if (all.any(!receiver.wait_headers(warp))) return false;
  // The lanes of a warp leave together: what follows are votes of theirs.
  const bool came = !ptx::any(kFullMask, !receiver.add_experts());
  ptx::sync_warp(kFullMask);
  if (all.any(!came || !receiver.wait_flags(warp))) return false;
  // The selections of a source that has been masked meanwhile do not count.
  if (p.masking.late && all.any(receiver.late) && all.any(!receiver.add_experts())) return false;
  receiver.finish();
  return true;
}

// By all threads of a block. True in the block that receives, when all has come.
template <EpSmallConfig kConfig>
CROSSDOCK_DEVICE bool ep_small_run(EpSmallBlock<kConfig>& block) {
  const EpSmallParams& p = block.p;
  if (block_index() < p.send_blocks) {
    ep_small_send(block);
  } else if (p.sends && block_index() == p.send_blocks) {
    ep_small_tell(block);
  } else {
    return ep_small_receive(block);
  }
  return false;
}

}  // namespace crossdock::device
