// ep_dispatch_expanded: ep_dispatch, which besides raises a flag for every row that it has stored,
// and beside it blocks that copy the rows that come here to the places of their choices, while
// others are on their way. What ep_group_rows and ep_expand_rows would do afterwards is done when
// the launch ends.
//
// Launch on every rank, the same number of times: grid = the rank's source_blocks and any number of
// blocks that copy (none: a dispatch that only raises flags), all resident, block =
// kConfig.threads(), shared memory the larger of `ep_dispatch_shared` and `ep_copy_shared`.
// Symmetric memory as for ep_dispatch, and `add_ep_flags`. Each rank chooses by itself whether it
// copies.
//
//   blocks 0 .. source_blocks - 1     ep/dispatch_run.cuh; rows -> flags -> all destinations
//   the others                        ep/copy_role.cuh
//
// Choices for which there is no room are a fault, raised when the dispatch has ended well, so that
// no other rank suffers; nothing has been written to the places then. A rank that is masked while
// its rows are on their way is left out as a dispatch leaves it out: lists and copies are made
// again without it, and what lies behind the places may have copies of its rows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define CROSSDOCK_CALLS_COLD

#include <crossdock/ep/copy_role.cuh>
#include <crossdock/ep/dispatch_run.cuh>

namespace crossdock::device {

// By all threads of block 0, when all rows are here: of which sources, as the dispatch has decided.
template <class Block>
CROSSDOCK_DEVICE void ep_decide(const EpExpandedDispatchParams& p, const Block& b) {
  ThreadGroup::block().sync();  // what each warp has acquired is for all
  if (thread_index() != 0) return;
  ep_put_copy_word(p.words + EpCopyWords::of(EpCopyWord::kDecided), b.epoch,
                   (kFullMask >> (kWarpSize - b.world())) & ~b.masked);
}

namespace kernel {

template <EpDispatchConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_dispatch_expanded(CROSSDOCK_PARAMS(EpExpandedDispatchParams, p)) {
  static_assert(kConfig.flag_warps == 1 && kConfig.copy_stages >= 2);
  EpDispatchBlock<kConfig> block(p.dispatch);
  if (block_index() >= p.dispatch.tokens.blocks) {
    EpCopyBlock<EpDispatchBlock<kConfig>>(p, block).run();
    return;
  }
  const bool done = ep_run_dispatch(block);
  if (done && block_index() == 0 && grid_size() > p.dispatch.tokens.blocks) ep_decide(p, block);
}

}  // namespace kernel
}  // namespace crossdock::device
