// ep_combine: every token of this rank becomes the sum of its rows at all ranks, the same bits in
// every run and in both variants:
//
//   pull   every rank loads the rows from where the experts have left them; nothing is staged
//   push   some blocks send the rows of other ranks' tokens to those ranks, the others add up what
//          comes; over NVLink stores are faster than loads, at the price of a staging area
//
// Launch on every rank, the same number of times: grid = the rank's source_blocks, all resident,
// block = kConfig.threads(), shared memory `ep_combine_shared`. Symmetric memory: `add_ep`, and
// input blocks of `ep_input_layout`. The routes are those of the dispatch that the input belongs
// to.
//
//   epoch e at rank r                                  a peer
//     inputs[r] = {e, offset, payload}     ------->    may load r's rows (acquire, proxy fence),
//     and
//                                                      by push store into r's staging
//     loads rows of all peers, adds, stores
//     or by push: rows (bulk stores)
//     flags[r][n] = e (one fence a batch)  ------->    may load row n of its staging
//     pulled[r] += 1 per block (release)   ------->    its dispatch into the same slot waits for it
//
// The two halves may be launches of their own (`tells`, `adds`), so that no SM waits in between.
// Masked ranks are told nothing, and their rows are left out of the sums; a sum has all of a row or
// nothing of it, since the first warp that waits for a late rank decides for all (ep_agree).
//
// A launch waits for every peer to have begun its own, so no rank is more than one epoch ahead and
// two parities are enough. It does not wait until the peers have read this rank's rows: the input
// block must not be written again before `free_at`, which ep_dispatch with that slot waits for.
// After ep_small_dispatch (`small`) its next use of the slot says so: every source sends it after
// the combine, and this rank's launch waits for all sources.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/ep/push_role.cuh>

namespace crossdock::device {

// By one warp, which has fenced (system scope) before: the input is ready, and when its slot will
// be free again.
template <EpCombineConfig kConfig>
CROSSDOCK_DEVICE void open_combine(const EpCombineParams& p, u32 masked, u32 epoch) {
  const u32 lane = lane_index();
  const u64 index = u64{epoch & 1u} * p.view.world + p.view.rank;
  const bool talks = lane < p.view.world && !is_masked(masked, lane);
  if (talks)
    put_tagged_word(p.view.at<u64>(p.areas.inputs + index * sizeof(u64), lane), epoch,
                    EpInputWord::make(p.input_offset, p.payload).value);
  if (lane == 0) {
    ptx::st_relaxed_gpu(&p.state->tickets[(epoch + 1) & 1u].value, 0u);
    ptx::st_relaxed_gpu(&p.state->send_tickets[(epoch + 1) & 1u].value, 0u);
  }
  if (lane >= p.view.world) return;
  if constexpr (kConfig.small) {
    // The experts have read the rows of the slot.
    const u32 uses = ptx::ld_relaxed_gpu(&p.small->dispatch.finished);
    if (talks)
      ptx::st_relaxed_sys(p.view.map(p.view.at<u32>(p.free_words) + p.view.rank, lane), uses);
    if (lane == 0) ptx::st_weak(&p.small->released.value, uses);
    // ep_await_reads compares by distance as well, and may never have been called. What the combine
    // before had to read came before in the stream.
    if (talks && epoch % kEpFollowEvery == 0)
      ptx::st_release_sys(p.view.map(p.view.at<u32>(p.read_words) + p.view.rank, lane), epoch - 1);
    return;
  }
  // Of all combines so far, also those that the lane's rank has been left out of: it makes up for
  // them when it comes back (ep_mask).
  const u32 total = epoch * p.source_blocks[lane];
  if (epoch % kEpFollowEvery == 0) {
    CROSSDOCK_NO_UNROLL
    for (auto& of_slot : p.state->free_at)
      ptx::st_weak(of_slot + lane, ep_followed(ptx::ld_weak(of_slot + lane), total));
  }
  ptx::st_weak(p.state->pulled + lane, total);
  if (p.slot != kNoSlot) ptx::st_weak(&p.state->free_at[p.slot][lane], total);
}

// What a block does: `begin` before the epoch is known, `run` after; false when the rank aborts.
template <EpCombineConfig kConfig>
struct EpAddingBlock {
  EpPullWarp<kConfig> pull;
  bool works;

  CROSSDOCK_DEVICE EpAddingBlock(const EpCombineParams& p, u32 warp)
      : pull(p, warp, block_index() - blocks(p).senders_before(block_index()), blocks(p).adders()),
        works(warp < kConfig.warps) {}
  CROSSDOCK_DEVICE static EpCombineBlocks blocks(const EpCombineParams& p) {
    return {kConfig.pushes() ? p.send_blocks : 0, grid_size()};
  }
  CROSSDOCK_DEVICE void prepare() const {
    if (works) pull.prepare();
  }
  CROSSDOCK_DEVICE void begin(u32 masked) {
    if (works) pull.begin(masked);
  }
  CROSSDOCK_DEVICE bool run(u32 epoch) { return !works || pull.run(epoch); }
};
template <EpCombineConfig kConfig>
struct EpSendingBlock {
  EpPushWarp<kConfig> push;
  EpFlagWarp<kConfig> flag;
  u32 warp;

  CROSSDOCK_DEVICE EpSendingBlock(const EpCombineParams& p, u32 index)
      : push(p, index), flag(p), warp(index) {}
  CROSSDOCK_DEVICE void prepare() const {
    if (warp < kConfig.send_warps) push.prepare();
  }
  CROSSDOCK_DEVICE void begin(u32) {
    if (warp < kConfig.send_warps) push.begin();
  }
  CROSSDOCK_DEVICE bool run(u32 epoch) {
    if (warp < kConfig.send_warps) return push.run(epoch);
    return warp != kConfig.send_warps || flag.run(epoch);
  }
};

// By all threads of a block.
template <EpCombineConfig kConfig, class Block>
CROSSDOCK_DEVICE void run_combine(const EpCombineParams& p, Block&& block) {
  constexpr EpCombineShared kShared = ep_combine_shared(kConfig);
  // What every launch owes falls to the last warps, which get their tokens last.
  constexpr u32 kEpochThread = (kConfig.all_warps() - 1) * kWarpSize;
  const bool last = block_index() == grid_size() - 1 && warp_index() == kConfig.all_warps() - 1;
  const bool opens = last && p.tells;
  block.prepare();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const u32 masked = masked_ranks(p.masking);
  u32* shared_epoch = reinterpret_cast<u32*>(dynamic_shared() + kShared.epoch);
  // Of the launch that has told, if that was another one.
  if (thread_index() == kEpochThread)
    *shared_epoch = read_epoch(&p.state->combine) - (p.tells ? 0 : 1);
  if (p.adds) block.begin(masked);
  // For the announcement; it takes a microsecond, which nobody waits for here.
  if (opens) ptx::fence_acq_rel_sys();
  if (!may_start(p.common)) return;  // also the barrier for the epoch
  const u32 epoch = *shared_epoch;
  if (opens) open_combine<kConfig>(p, masked, epoch);
  bool done = !p.adds || block.run(epoch);
  // Also without tokens: no rank is to be more than one epoch ahead.
  const u8* unused = nullptr;
  u64* const waits = kConfig.pushes() || p.tokens.tokens != 0 ? nullptr : p.rank_wait_ns;
  if (done && last && p.adds) done = ep_wait_inputs(p, masked, epoch, unused, waits);
  done = !ThreadGroup::block().any(!done);
  if (!kConfig.small && done && p.adds && warp_index() == 0 && lane_index() < p.view.world &&
      !is_masked(masked, lane_index())) {
    const u64 counter = p.areas.pulled + p.view.rank * sizeof(PaddedWord);
    signal_counter(p.view.at<u32>(counter, lane_index()), 1);
  }
  // Late, beside the signal: nobody waits for it.
  if (thread_index() == kEpochThread && p.tells) pass_epoch(&p.state->combine, epoch);
}

namespace kernel {

template <EpCombineConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_combine(CROSSDOCK_PARAMS(EpCombineParams, p)) {
  const u32 warp = ptx::uniform(warp_index());
  if constexpr (kConfig.pushes()) {
    const EpCombineBlocks blocks{p.send_blocks, grid_size()};
    if (blocks.sends(block_index()))
      return run_combine<kConfig>(p, EpSendingBlock<kConfig>(p, warp));
  }
  run_combine<kConfig>(p, EpAddingBlock<kConfig>(p, warp));
}

}  // namespace kernel
}  // namespace crossdock::device
