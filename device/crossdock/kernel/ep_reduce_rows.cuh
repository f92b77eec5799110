// ep_reduce_rows: where the experts' outputs lie by place (ep_group_rows) or masked, the outputs of
// each received row become one row, which combine then pulls: added in the order of the choices, in
// fp32, each times its weight if asked for. So only one row a token and rank crosses the wire.
// Peers may still read there what the combine before has left, so it waits for them first. Launch
// on any rank before its combine: any grid, block = 32 * kConfig.warps threads, no shared memory.
//
//   warp   takes parts of rows in turns: whole rows would not come out even, and few rows are cut
//          until every warp has something
//   lane k has choice k of the row; those of the next part are asked for before this one is added
//   loads  eight of a lane are on their way at once: 4 choices x 2 vectors, or 2 x 4 where a row
//          has no more. What bounds this kernel is bytes; one load at a time moved a quarter of
//          them
//
// With kConfig.packs the sums, rounded to bf16, are compressed (layout/ep_payload.cuh): a warp has
// whole units of them. Without positions there is nothing to add: each received row's own is
// compressed.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/payload.cuh>
#include <crossdock/ep/wait_free.cuh>
#include <crossdock/layout/ep_grouping.cuh>
#include <crossdock/ptx/convert.cuh>

namespace crossdock::device {

// How rows are cut: the same for all warps.
struct EpRowParts {
  u32 vectors;  // of a row, 16 bytes each
  u32 step;     // vectors of a part; the last may be shorter
  u32 count;    // parts of a row

  // Eight units or more for every warp, as long as parts have two vectors for each lane.
  CROSSDOCK_DEVICE static EpRowParts make(u32 row_bytes, u32 rows, u32 warps) {
    constexpr u32 kUnits = 8;
    constexpr u32 kLeast = 2 * kWarpSize;
    const u32 vectors = row_bytes / static_cast<u32>(sizeof(U32x4));
    const u32 wanted = static_cast<u32>(ceil_div(u64{warps} * kUnits, u64{max_of(rows, 1u)}));
    const u32 parts = min_of(wanted, max_of(vectors / kLeast, 1u));
    const u32 step = round_up(ceil_div(vectors, parts), kLeast);
    return {vectors, step, ceil_div(vectors, step)};
  }
};

template <EpReduceRowsConfig kConfig>
struct EpRowSums {
  const EpReduceRowsParams& p;
  u32 lane;
  u32 rows;   // that have arrived, with the gaps between them
  u32 warps;  // in the grid
  EpRowParts parts;

  CROSSDOCK_DEVICE explicit EpRowSums(const EpReduceRowsParams& params)
      : p(params),
        lane(lane_index()),
        rows(params.arrived.bound()),
        warps(grid_size() * kConfig.warps),
        parts(EpRowParts::make(params.row_bytes, rows, warps)) {}

  CROSSDOCK_DEVICE void run() const {
    const u32 units = rows * parts.count;  // a window has no room for 2^32 parts
    u32 unit = block_index() * kConfig.warps + warp_index();
    Choice next = find(unit, units);
    for (; unit < units; unit += warps) {
      const Choice mine = next;
      next = find(unit + warps, units);
      const u32 row = unit / parts.count;
      if (p.arrived.holds(row)) add(row, unit % parts.count * parts.step, mine);
    }
  }

 private:
  // The lane's choice of a row, as loaded.
  struct Choice {
    i32 expert = -1;  // none of this rank
    u32 place = 0;
    u32 begin = 0;  // masked: of the expert's places
    float weight = 1;
  };
  CROSSDOCK_DEVICE Choice find(u32 unit, u32 units) const {
    Choice c;
    if (unit >= units || lane >= p.arrived.top_k || !p.arrived.holds(unit / parts.count)) return c;
    if (kConfig.packs && p.positions == nullptr) {
      if (lane == 0) c.expert = 0;
      c.place = unit / parts.count;
      return c;
    }
    const u64 at = u64{unit / parts.count} * p.arrived.top_k + lane;
    c.expert = ptx::ld_weak(p.arrived.ids + at);
    c.place = ptx::ld_weak(p.positions + at);  // means nothing if the expert is not here
    if (p.weighted) c.weight = ptx::ld_weak(p.arrived.weights + at);
    if (p.rows_per_expert != 0 && c.expert >= 0) c.begin = ptx::ld_weak(p.offsets + c.expert);
    return c;
  }
  CROSSDOCK_DEVICE void add(u32 row, u32 first, const Choice& c) const {
    const bool here = c.expert >= 0;
    const u32 chosen = ptx::ballot(kFullMask, here);
    const u64 place =
        here ? ep_target(c.place, static_cast<u32>(c.expert), c.begin, p.rows_per_expert) : 0;
    if (popcount(chosen) <= 2) {
      add<2, 4>(row, first, chosen, place * p.output_stride, c.weight);
    } else {
      add<4, 2>(row, first, chosen, place * p.output_stride, c.weight);
    }
  }
  // `offset`: where the output of the lane's choice is. By whole warps, since the lanes ask each
  // other.
  template <u32 kChoices, u32 kVectors>
  CROSSDOCK_DEVICE void add(u32 row, u32 first, u32 chosen, u64 offset, float weight) const {
    const u32 end = min_of(first + parts.step, parts.vectors);
    for (u32 at = first + lane; at - lane < end; at += kWarpSize * kVectors) {
      float sum[kVectors][8] = {};
      for (u32 left = chosen; left != 0;) {
        U32x4 v[kChoices][kVectors]{};
        u32 ahead = left;
        CROSSDOCK_UNROLL
        for (u32 k = 0; k < kChoices; ++k) {
          if (ahead == 0) break;
          const u64 from = ptx::shuffle(kFullMask, offset, lowest_bit(ahead));
          ahead &= ahead - 1;
          CROSSDOCK_UNROLL
          for (u32 j = 0; j < kVectors; ++j)
            if (at + j * kWarpSize < end)
              v[k][j] = ptx::ld_nc_no_allocate(reinterpret_cast<const U32x4*>(p.outputs + from) +
                                               at + j * kWarpSize);
        }
        CROSSDOCK_UNROLL
        for (u32 k = 0; k < kChoices; ++k) {
          if (left == 0) break;
          const float factor = ptx::shuffle(kFullMask, weight, lowest_bit(left));
          left &= left - 1;
          CROSSDOCK_UNROLL
          for (u32 j = 0; j < kVectors; ++j)
            add(sum[j], v[k][j], factor);
        }
      }
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kVectors; ++j)
        if (at + j * kWarpSize < end) store(row, at + j * kWarpSize, rounded(sum[j]));
    }
  }
  CROSSDOCK_DEVICE void store(u32 row, u32 vector, U32x4 sum) const {
    if constexpr (kConfig.packs) {
      const u32 stride = ep_payload_stride(p.payload, p.row_bytes / 2);
      EpPacker{p.payload, p.input + u64{row} * stride}.store(vector, sum);
    } else {
      ptx::st_weak(reinterpret_cast<U32x4*>(p.input + u64{row} * p.row_bytes) + vector, sum);
    }
  }
  CROSSDOCK_DEVICE static void add(float (&sum)[8], U32x4 v, float factor) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < 4; ++j) {
      const ptx::F32x2 two = ptx::f32_from_bf16x2(words[j]);
      sum[2 * j] = ptx::fused_multiply_add(factor, two.lo, sum[2 * j]);
      sum[2 * j + 1] = ptx::fused_multiply_add(factor, two.hi, sum[2 * j + 1]);
    }
  }
  CROSSDOCK_DEVICE static U32x4 rounded(const float (&sum)[8]) {
    return {ptx::bf16x2_from_f32(sum[0], sum[1]), ptx::bf16x2_from_f32(sum[2], sum[3]),
            ptx::bf16x2_from_f32(sum[4], sum[5]), ptx::bf16x2_from_f32(sum[6], sum[7])};
  }
};

namespace kernel {

template <EpReduceRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    ep_reduce_rows(CROSSDOCK_PARAMS(EpReduceRowsParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  if (!ep_wait_free(p.common, p.view, p.free)) return;
  EpRowSums<kConfig>(p).run();
}

}  // namespace kernel
}  // namespace crossdock::device
