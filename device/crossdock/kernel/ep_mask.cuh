// ep_mask: changes a rank's mask in the order of its stream and tells what it is. Launch on any
// rank: grid = 1, block = 32 threads, no shared memory.
//
// Letting a rank in again: almost everything that ranks tell each other carries its epoch, so what
// was not told meanwhile is not missed. Two kinds of words count from launch to launch instead; the
// rank that writes them makes up for what it has left out, in memory of the other that nobody else
// writes, so it does not matter which of the two lets the other in first, nor what either still
// runs:
//
//   rank a                                              rank b
//     pulled[a] = combines so far * blocks  ------->    a has read all that b had for it (nothing)
//     released = one use less than there were:
//     the next launch of each small slot tells
//     anew what is free here                ------->    may store into the slots of a
//
// Both let the other in before the same dispatch, and have made the same calls until then.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/masking.cuh>
#include <crossdock/layout/ep_small.cuh>

namespace crossdock::device {

// By the lane of `peer`: what this rank would have told it if it had not been masked.
CROSSDOCK_DEVICE void ep_make_up(const EpMaskParams& p, u32 peer) {
  const u32 combines = ptx::ld_relaxed_gpu(&p.state->combine.finished);
  u32* pulled = p.view.at<u32>(p.areas.pulled + p.view.rank * sizeof(PaddedWord), peer);
  ptx::st_release_sys(pulled, combines * p.combine_blocks);
}

namespace kernel {

template <EpMaskConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    ep_mask(CROSSDOCK_PARAMS(EpMaskParams, p)) {
  ptx::grid_dependency_wait();
  const u32 lane = lane_index();
  const u32 seen = lane == 0 ? ptx::ld_relaxed_gpu(&p.mask->ranks) : 0;
  const u32 before = ptx::shuffle(kFullMask, seen, 0);
  const u32 after = (before & ~p.clear) | p.set;
  const u32 back = before & ~after;
  if (p.told != nullptr && lane < p.view.world)
    ptx::st_weak(p.told + lane, is_masked(after, lane) ? 1 : 0);
  if (lane < p.view.world && is_masked(back, lane)) ep_make_up(p, lane);
  // Relative to the count, since the two are compared by their distance.
  if (lane < p.slots && back != 0)
    ptx::st_weak(&p.small[lane]->released.value,
                 ptx::ld_relaxed_gpu(&p.small[lane]->dispatch.finished) - 1u);
  // Bit by bit: a launch in another stream may mask a rank at this moment. Only those are let in
  // that have been made up for.
  if (lane != 0 || after == before) return;
  ptx::red_or_relaxed_gpu(&p.mask->ranks, after & ~before);
  ptx::red_and_relaxed_gpu(&p.mask->late, ~back);
  ptx::red_and_relaxed_gpu(&p.mask->ranks, ~back);
}

}  // namespace kernel
}  // namespace crossdock::device
