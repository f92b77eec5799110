// What push_rows and pull_rows share: every warp moves rows with bulk copies through shared memory,
// several in flight, from a random other rank or to it, or one fixed peer. Not a kernel itself.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/row_pipe.cuh>
#include <crossdock/layout/probe.cuh>

namespace crossdock::device::kernel {

CROSSDOCK_HOST_DEVICE constexpr u32 move_rows_barriers_bytes(MoveRowsConfig c) {
  return round_up(c.warps * c.stages * 8u, 128u);
}
CROSSDOCK_HOST_DEVICE constexpr u32 move_rows_shared_bytes(MoveRowsConfig c, u32 row_bytes) {
  return move_rows_barriers_bytes(c) + c.warps * row_pipe_rows_bytes(c.stages, row_bytes);
}

// By all threads of the block. `Places` has source(row) and destination(row).
template <MoveRowsConfig kConfig, class Places>
CROSSDOCK_DEVICE void move_rows(const MoveRowsParams& p, const Places& places) {
  if (!may_start(p.common)) return;
  const ThreadGroup group = ThreadGroup::block();
  const u64 start = ptx::global_timer();
  bool moved = true;
  if (lane_index() == 0) {
    u8* shared = dynamic_shared();
    const u32 warp = warp_index();
    auto* barriers = reinterpret_cast<ptx::MBarrier*>(shared) + warp * kConfig.stages;
    u8* rows = shared + move_rows_barriers_bytes(kConfig) +
               warp * row_pipe_rows_bytes(kConfig.stages, p.row_bytes);
    RowPipe<kConfig.stages> pipe(p.common, rows, barriers, p.row_bytes);
    pipe.init();
    const u32 first = (block_index() * kConfig.warps + warp) * p.rows_per_warp;
    moved = pipe.move(
        p.rows_per_warp, [&](u32 i) { return places.source(first + i); },
        [&](u32 i) { return places.destination(first + i); });
    pipe.finish();
  }
  if (group.any(!moved)) return;
  if (group.leader()) ptx::st_weak(p.elapsed_ns + block_index(), ptx::global_timer() - start);
}

}  // namespace crossdock::device::kernel
