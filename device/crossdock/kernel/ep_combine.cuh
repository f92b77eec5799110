// ep_combine: every token of this rank becomes the sum of its rows at all ranks, pulled from where
// the experts left them: no staging, one pass, the same bits in every run.
//
// Launch on every rank, the same number of times: grid = the rank's source_blocks, all resident,
// block = kConfig.threads(), shared memory `ep_combine_shared`. Symmetric memory: `add_ep`, and
// input blocks of `ep_input_layout`. The routes are those of the dispatch that the input belongs
// to.
//
//   epoch e at rank r                                  a peer
//     inputs[r] = {e, offset} (release)    ------->    may load r's rows (acquire, proxy fence)
//     loads rows of all peers, adds, stores
//     pulled[r] += 1 per block (release)   ------->    its dispatch into the same slot waits for it
//
// A launch waits for every peer to have begun its own, so no rank is more than one epoch ahead and
// two parities are enough. It does not wait until the peers have read this rank's rows: the input
// block must not be written again before `free_at`, which ep_dispatch with that slot waits for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/ep/pull_role.cuh>

namespace crossdock::device {

// By warp 0 of block 0: the input is ready, and when its slot will be free again.
CROSSDOCK_DEVICE void open_combine(const EpCombineParams& p, u32 epoch) {
  const u32 lane = lane_index();
  if (lane == 0) ptx::st_relaxed_gpu(&p.state->tickets[(epoch + 1) & 1u].value, 0u);
  if (lane >= p.view.world) return;
  const u64 index = u64{epoch & 1u} * p.view.world + p.view.rank;
  announce(p.view.at<u64>(p.areas.inputs + index * sizeof(u64), lane), epoch, p.input_offset);
  const u32 total = ptx::ld_weak(p.state->pulled + lane) + p.source_blocks[lane];
  ptx::st_weak(p.state->pulled + lane, total);
  if (p.slot != kNoSlot) ptx::st_weak(&p.state->free_at[p.slot][lane], total);
}

namespace kernel {

template <EpCombineConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_combine(CROSSDOCK_PARAMS(EpCombineParams, p)) {
  constexpr EpCombineShared kShared = ep_combine_shared(kConfig);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  u32* shared_epoch = reinterpret_cast<u32*>(dynamic_shared() + kShared.epoch);
  if (thread_index() == 0) *shared_epoch = read_epoch(&p.state->combine);
  if (!may_start(p.common)) return;  // also the barrier for the epoch
  const u32 epoch = *shared_epoch;
  const u32 warp = ptx::uniform(warp_index());
  if (block_index() == 0 && warp == 0) open_combine(p, epoch);
  EpPullWarp<kConfig> pull(p, warp);
  pull.begin(epoch);
  if (thread_index() == 0) pass_epoch(&p.state->combine, epoch);
  const bool done = pull.run();
  if (ThreadGroup::block().any(!done)) return;
  if (warp != 0 || lane_index() >= p.view.world) return;
  const u64 counter = p.areas.pulled + p.view.rank * sizeof(PaddedWord);
  signal_counter(p.view.at<u32>(counter, lane_index()), 1);
}

}  // namespace kernel
}  // namespace crossdock::device
