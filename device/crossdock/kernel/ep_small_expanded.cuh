// ep_small_expanded: ep_small_dispatch, whose rows are copied to the places of their choices in the
// same launch, or in that of its second half: an expanded or a masked layout, in memory of the
// rank's own, as ep_group_rows and ep_expand_rows would make it.
//
// Launch as ep_small_dispatch, with `copy_blocks` more blocks, a multiple of the ranks, and shared
// memory for ep_small_copy_shared too. Each rank decides for itself; at most kEpMostExpanded
// experts of a rank. What is left for combine are the lists of ep_group_rows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/small_copy.cuh>
#include <crossdock/ep/small_run.cuh>

namespace crossdock::device {

// By all threads of the block that has received, whose histogram is complete: choices for which
// there is no room are a fault, now that no other rank waits for this one.
template <class Block>
CROSSDOCK_DEVICE void ep_small_refuse_room(const EpSmallExpandedParams& p, const Block& b) {
  if (warp_index() != 0) return;
  const u32* counts = b.template at<u32>(b.shared.histogram);
  u32 places = 0, most = 0;
  for (u32 i = lane_index(); i < p.small.experts.count(b.rank()); i += kWarpSize) {
    const u32 count = ptx::ld_shared(counts + i);
    places += round_up(count, p.grouping.alignment);
    most = max_of(most, count);
  }
  places = ptx::reduce_add(kFullMask, places);
  most = ptx::reduce_max(kFullMask, most);
  const u64 needed = p.to.rows_per_expert == 0 ? places : most;
  const u64 room = p.to.rows_per_expert == 0 ? p.to.places : p.to.rows_per_expert;
  if (needed > room && lane_index() == 0)
    raise_fault(p.small.common, {Phase::kRoom, b.rank(), room}, needed, 0);
}

namespace kernel {

template <EpSmallConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_small_expanded(CROSSDOCK_PARAMS(EpSmallExpandedParams, p)) {
  EpSmallBlock<kConfig> block(p.small);
  if (block_index() >= grid_size() - p.copy_blocks) {
    EpSmallCopies<EpSmallBlock<kConfig>>(p, block).run();
  } else if (ep_small_run(block) && p.copy_blocks != 0) {
    ep_small_refuse_room(p, block);
  }
}

}  // namespace kernel
}  // namespace crossdock::device
