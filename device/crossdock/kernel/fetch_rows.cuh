// fetch_rows: rows of a table that is dealt to the ranks, fetched by a list of their numbers: bulk
// loads from the windows of their owners, bulk stores to where the caller wants them. Owners do
// nothing. -1 gives a row of zeros; a number that the table does not have is a fault, and the
// output is of no use then. Launch on any rank: any grid, block = 32 * kConfig.warps threads,
// shared memory `fetch_rows_shared_bytes`. Whoever writes the table sees to it that it has been
// written.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/row_pipe.cuh>
#include <crossdock/layout/coll.cuh>

namespace crossdock::device {

CROSSDOCK_HOST_DEVICE constexpr u32 fetch_rows_barriers_bytes(FetchRowsConfig c) {
  return round_up(c.warps * c.stages * 8u, 128u);
}
CROSSDOCK_HOST_DEVICE constexpr u32 fetch_rows_shared_bytes(FetchRowsConfig c, u32 row_bytes) {
  return fetch_rows_barriers_bytes(c) + c.warps * row_pipe_rows_bytes(c.stages, row_bytes);
}

// The rows of one warp, every `step`-th from `first`, by one of its lanes.
template <bool kWide>
struct FetchedRows {
  const FetchRowsParams& p;
  u32 first;
  u32 step;
  i64 next = -1;  // the number after the one in hand: its load overlaps that row's

  CROSSDOCK_DEVICE FetchedRows(const FetchRowsParams& params, u32 begin, u32 every)
      : p(params), first(begin), step(every) {
    if (first < p.rows) next = number(first);
  }
  CROSSDOCK_DEVICE u32 count() const {
    return first < p.rows ? (p.rows - first - 1) / step + 1 : 0;
  }
  CROSSDOCK_DEVICE const u8* source(u32 i) {
    const i64 row = next;
    const u32 place = first + i * step;
    if (u64{place} + step < p.rows) next = number(place + step);
    if (row == -1) return p.zeros;
    if (row < -1 || static_cast<u64>(row) >= p.shard_rows * p.view.world) {
      raise_fault(p.common, Expected{Phase::kListedRow, kNoPeer, place}, static_cast<u64>(row), 0);
      return p.zeros;
    }
    const u64 owner = static_cast<u64>(row) / p.shard_rows;
    const u64 within = static_cast<u64>(row) - owner * p.shard_rows;
    return p.view.at<u8>(p.table + within * p.row_bytes, static_cast<u32>(owner));
  }
  CROSSDOCK_DEVICE u8* destination(u32 i) const {
    return p.output + u64{first + i * step} * p.output_stride;
  }

 private:
  CROSSDOCK_DEVICE i64 number(u32 place) const {
    if constexpr (kWide)
      return static_cast<i64>(ptx::ld_weak(static_cast<const u64*>(p.indices) + place));
    return static_cast<i32>(ptx::ld_weak(static_cast<const u32*>(p.indices) + place));
  }
};

namespace kernel {

template <FetchRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    fetch_rows(CROSSDOCK_PARAMS(FetchRowsParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  if (lane_index() != 0) return;
  u8* shared = dynamic_shared();
  const u32 warp = warp_index();
  auto* barriers = reinterpret_cast<ptx::MBarrier*>(shared) + warp * kConfig.stages;
  u8* rows = shared + fetch_rows_barriers_bytes(kConfig) +
             warp * row_pipe_rows_bytes(kConfig.stages, p.row_bytes);
  RowPipe<kConfig.stages> pipe(p.common, rows, barriers, p.row_bytes);
  pipe.init();
  FetchedRows<kConfig.wide> fetched(p, block_index() * kConfig.warps + warp,
                                    grid_size() * kConfig.warps);
  (void)pipe.move(
      fetched.count(), [&](u32 i) { return fetched.source(i); },
      [&](u32 i) { return fetched.destination(i); });
  pipe.finish();
}

}  // namespace kernel
}  // namespace crossdock::device
