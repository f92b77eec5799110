// ep_dispatch_expanded: ep_dispatch, which besides raises a flag for every row that it has stored,
// and beside it blocks that copy the rows that come here to the places of their choices, while
// others are on their way. What ep_group_rows and ep_expand_rows would do afterwards is done when
// the launch ends.
//
// Launch on every rank, the same number of times: grid = the rank's source_blocks and any number of
// blocks that copy (none: a dispatch that only raises flags), all resident, block =
// kConfig.threads(), shared memory the larger of `ep_dispatch_shared` and `ep_copy_shared`.
// Symmetric memory as for ep_dispatch, and `add_ep_flags`. No masks; a routing that is used again
// is not copied. Each rank chooses by itself whether it copies.
//
//   blocks 0 .. source_blocks - 1     ep/dispatch_run.cuh; rows -> flags -> all destinations
//   the others                        ep/copy_role.cuh
//
// Choices for which there is no room are a fault, raised when the dispatch has ended well, so that
// no other rank suffers; nothing has been written to the places then.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/copy_role.cuh>
#include <crossdock/ep/dispatch_run.cuh>

namespace crossdock::device {

// By all threads of block 0, after its dispatch. Choices of all experts are fewer than 2^32.
CROSSDOCK_DEVICE void ep_refuse_room(const EpExpandedDispatchParams& p) {
  ThreadGroup::block().sync();  // the counts are known to all
  if (warp_index() != 0) return;
  const EpDispatchParams& d = p.dispatch;
  const u32 experts = d.experts.count(d.view.rank);
  u32 places = 0, most = 0;
  for (u32 expert = lane_index(); expert < experts; expert += kWarpSize) {
    const u32 count = ptx::ld_weak(d.result.expert_counts + expert);
    places += round_up(count, p.grouping.alignment);
    most = max_of(most, count);
  }
  places = ptx::reduce_add(kFullMask, places);
  most = ptx::reduce_max(kFullMask, most);
  const u64 needed = p.to.rows_per_expert == 0 ? places : most;
  const u64 room = p.to.rows_per_expert == 0 ? p.to.places : p.to.rows_per_expert;
  if (needed > room && lane_index() == 0)
    raise_fault(d.common, {Phase::kRoom, d.view.rank, room}, needed, 0);
}

namespace kernel {

template <EpDispatchConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_dispatch_expanded(CROSSDOCK_PARAMS(EpExpandedDispatchParams, p)) {
  static_assert(kConfig.flag_warps == 1 && kConfig.copy_stages >= 2);
  if (block_index() >= p.dispatch.tokens.blocks) {
    EpDispatchBlock<kConfig> block(p.dispatch);
    EpCopyBlock<EpDispatchBlock<kConfig>>(p, block).run();
    return;
  }
  const bool done = ep_run_dispatch<kConfig>(p.dispatch);
  if (done && block_index() == 0 && grid_size() > p.dispatch.tokens.blocks) ep_refuse_room(p);
}

}  // namespace kernel
}  // namespace crossdock::device
