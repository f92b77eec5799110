// push_rows and pull_rows: the wire's bandwidth. Every warp moves rows with bulk copies through
// shared memory, `stages` in flight: push from this rank to a peer, pull from a peer to this rank;
// a random other rank for every row, or one fixed peer. Launch on the ranks that move: any grid,
// block = 32 * kConfig.warps threads, shared memory `move_rows_shared_bytes`. Symmetric memory: the
// two areas of MoveRowsParams. Nothing is announced; the host or a barrier kernel decides when all
// ranks are done. SPDX-License-Identifier: Apache-2.0
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

// Where a row lies: `source` and `destination` by row number.
struct PushPlaces {
  const MoveRowsParams& p;
  CROSSDOCK_DEVICE const u8* source(u32 row) const {
    return p.view.at<u8>(p.source + u64{row % p.slots} * p.row_bytes);
  }
  CROSSDOCK_DEVICE u8* destination(u32 row) const {
    const u64 slot = u64{p.view.rank} * p.slots + row % p.slots;
    return p.view.at<u8>(p.destination + slot * p.row_bytes, row_peer(p, row));
  }
};
struct PullPlaces {
  const MoveRowsParams& p;
  CROSSDOCK_DEVICE const u8* source(u32 row) const {
    return p.view.at<u8>(p.source + u64{row % p.slots} * p.row_bytes, row_peer(p, row));
  }
  CROSSDOCK_DEVICE u8* destination(u32 row) const {
    return p.view.at<u8>(p.destination + u64{row % p.slots} * p.row_bytes);
  }
};

// By all threads of the block.
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

template <MoveRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    push_rows(CROSSDOCK_PARAMS(MoveRowsParams, p)) {
  ptx::grid_dependency_wait();
  move_rows<kConfig>(p, PushPlaces{p});
}

template <MoveRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    pull_rows(CROSSDOCK_PARAMS(MoveRowsParams, p)) {
  ptx::grid_dependency_wait();
  move_rows<kConfig>(p, PullPlaces{p});
}

}  // namespace crossdock::device::kernel
