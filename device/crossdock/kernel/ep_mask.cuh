// ep_mask: changes a rank's mask in the order of its stream and tells what it is. When a rank is
// let in again, its counters here are taken as they are, since nobody has waited for them, and it
// is told anew that the small slots here are free. Launch on any rank: grid = 1, block = 32
// threads, no shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/masking.cuh>
#include <crossdock/layout/ep_small.cuh>

namespace crossdock::device {

// What rank `peer` has signalled so far is what it will be counted from.
CROSSDOCK_DEVICE void ep_let_in(const EpMaskParams& p, u32 peer) {
  const auto word = [&](u64 area) {
    return ptx::ld_acquire_sys(p.view.at<u32>(area + peer * sizeof(PaddedWord)));
  };
  ptx::st_weak(p.state->arrived + peer, word(p.areas.arrivals));
  const u32 pulled = word(p.areas.pulled);
  ptx::st_weak(p.state->pulled + peer, pulled);
  for (u32 slot = 0; slot <= kEpMaxSlots; ++slot)
    ptx::st_weak(&p.state->free_at[slot][peer], pulled);
}

namespace kernel {

template <EpMaskConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    ep_mask(CROSSDOCK_PARAMS(EpMaskParams, p)) {
  ptx::grid_dependency_wait();
  const u32 lane = lane_index();
  const u32 before = ptx::ld_relaxed_gpu(&p.mask->ranks);
  const u32 after = (before & ~p.clear) | p.set;
  const u32 back = before & ~after;
  ptx::sync_warp(kFullMask);
  if (p.told != nullptr && lane < p.view.world)
    ptx::st_weak(p.told + lane, is_masked(after, lane) ? 1 : 0);
  if (lane < p.view.world && is_masked(back, lane)) ep_let_in(p, lane);
  if (lane < p.slots && back != 0) ptx::st_weak(&p.small[lane]->released.value, 0u);
  if (lane != 0 || after == before) return;
  ptx::st_relaxed_gpu(&p.mask->ranks, after);
  ptx::st_relaxed_gpu(&p.mask->late, ptx::ld_relaxed_gpu(&p.mask->late) & after);
}

}  // namespace kernel
}  // namespace crossdock::device
