// ep_group_rows: the choices of this rank's experts as a list of rows for each expert, in the order
// of the rows, each list beginning at a multiple of the alignment; for a grouped GEMM that gathers
// its rows, or for copying them apart. Nothing is copied here. A row that chose an expert twice is
// in its list twice. Launch on any rank after its dispatch: block = kConfig.threads (whole warps),
// shared memory ep_list_shared_bytes. One block does it all; more of them, where there are many
// choices, in two launches with the same grid:
//
//   kCount   block b: choices of each expert in piece b   -> pieces[b][expert]
//   kWrite   block b: pieces of all blocks -> places; the piece's choices to their places
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/expert_lists.cuh>

namespace crossdock::device::kernel {

template <EpGroupRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    ep_group_rows(CROSSDOCK_PARAMS(EpGroupRowsParams, p)) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (!may_start(p.common)) return;
  const u32 experts = p.arrived.experts;
  const u32 block = block_index(), blocks = grid_size();
  const u32 choices = p.arrived.bound() * p.arrived.top_k;
  const u32 share = round_up(ceil_div(choices, blocks), kWarpSize);
  const u32 begin = min_of(block * share, choices);
  EpExpertLists<kConfig.threads / kWarpSize> lists(p.arrived, p.grouping,
                                                   reinterpret_cast<u32*>(dynamic_shared()), begin,
                                                   min_of(begin + share, choices));
  if (experts == 0 && block == 0 && thread_index() == 0) lists.write_none();
  for (u32 expert = 0; expert < experts; expert += lists.width) {
    lists.take(expert);
    lists.count();
    if (p.step == EpGroupStep::kCount) {
      for (u32 i = thread_index(); i < lists.turn; i += kConfig.threads)
        ptx::st_weak(p.pieces + u64{block} * experts + expert + i, lists.in_piece(i));
      ThreadGroup::block().sync();  // the counts may be overwritten
      continue;
    }
    if (p.step == EpGroupStep::kAll) {
      for (u32 i = thread_index(); i < lists.turn; i += kConfig.threads)
        lists.tell(i, lists.in_piece(i), false);
    } else {
      for (u32 i = thread_index(); i < blocks * lists.turn; i += kConfig.threads) {
        const u32 piece = i / lists.turn, of_turn = i % lists.turn;
        const u32* n = p.pieces + u64{piece} * experts + expert + of_turn;
        lists.tell(of_turn, ptx::ld_weak(n), piece < block);
      }
    }
    lists.begin();
    lists.write_ends(block, blocks);
    lists.write();
    ThreadGroup::block().sync();
  }
}

}  // namespace crossdock::device::kernel
