// ep_reduce_rows: where the experts' outputs lie by place (ep_group_rows) or masked, the outputs of
// each received row become one row, which combine then pulls: added in the order of the choices, in
// fp32, each times its weight if asked for. So only one row a token and rank crosses the wire.
// Peers may still read there what the combine before has left, so it waits for them first. Launch
// on any rank before its combine: any grid, block = 32 * kConfig.warps threads, no shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/wait_free.cuh>
#include <crossdock/layout/ep_grouping.cuh>
#include <crossdock/ptx/convert.cuh>

namespace crossdock::device {

// One row, by a warp; lane k has choice k.
struct EpRowReduction {
  const EpReduceRowsParams& p;
  u32 row;
  u32 lane;
  u32 chosen = 0;  // a bit for every choice that is one of this rank
  u64 place = 0;
  float weight = 1;

  CROSSDOCK_DEVICE EpRowReduction(const EpReduceRowsParams& params, u32 of_row)
      : p(params), row(of_row), lane(lane_index()) {
    const u32 top_k = p.arrived.top_k;
    const u64 at = u64{row} * top_k + lane;
    const i32 expert = lane < top_k ? ptx::ld_weak(p.arrived.ids + at) : -1;
    const bool here = expert >= 0;
    if (here)
      place = ep_target(ptx::ld_weak(p.positions + at), static_cast<u32>(expert),
                        ptx::ld_weak(p.offsets + expert), p.rows_per_expert);
    if (here && p.weighted) weight = ptx::ld_weak(p.arrived.weights + at);
    chosen = ptx::ballot(kFullMask, here);
  }
  CROSSDOCK_DEVICE void run() const {
    const u32 vectors = p.row_bytes / sizeof(U32x4);
    auto* to = reinterpret_cast<U32x4*>(p.input + u64{row} * p.row_bytes);
    // Whole warps, since the lanes ask each other for places.
    for (u32 first = 0; first < vectors; first += kWarpSize) {
      const u32 i = first + lane;
      float sum[8] = {};
      for (u32 left = chosen; left != 0; left &= left - 1) {
        const u32 k = lowest_bit(left);
        const u64 from = ptx::shuffle(kFullMask, place, k);
        const float factor = ptx::shuffle(kFullMask, weight, k);
        if (i >= vectors) continue;
        add(sum,
            ptx::ld_weak(reinterpret_cast<const U32x4*>(p.outputs + from * p.output_stride) + i),
            factor);
      }
      if (i >= vectors) continue;
      ptx::st_weak(
          to + i,
          U32x4{ptx::bf16x2_from_f32(sum[0], sum[1]), ptx::bf16x2_from_f32(sum[2], sum[3]),
                ptx::bf16x2_from_f32(sum[4], sum[5]), ptx::bf16x2_from_f32(sum[6], sum[7])});
    }
  }

 private:
  CROSSDOCK_DEVICE static void add(float (&sum)[8], U32x4 v, float factor) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < 4; ++j) {
      const ptx::F32x2 two = ptx::f32_from_bf16x2(words[j]);
      sum[2 * j] = ptx::fused_multiply_add(factor, two.lo, sum[2 * j]);
      sum[2 * j + 1] = ptx::fused_multiply_add(factor, two.hi, sum[2 * j + 1]);
    }
  }
};

namespace kernel {

template <EpReduceRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    ep_reduce_rows(CROSSDOCK_PARAMS(EpReduceRowsParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  if (!ep_wait_free(p.common, p.view, p.free)) return;
  const u32 rows = p.arrived.bound();
  for (u32 row = block_index() * kConfig.warps + warp_index(); row < rows;
       row += grid_size() * kConfig.warps)
    if (p.arrived.holds(row)) EpRowReduction(p, row).run();
}

}  // namespace kernel
}  // namespace crossdock::device
