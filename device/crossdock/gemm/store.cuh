// What becomes of a finished tile: epilogues of grouped_gemm. Each gets the tile's values as the
// main loop leaves them, pairs of bf16, and stores what belongs to valid rows and columns. They go
// through 2 KiB of shared memory of each warp, so that whole 128-byte rows are stored.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/block.cuh>
#include <crossdock/ptx/convert.cuh>
#include <crossdock/ptx/wgmma.cuh>

namespace crossdock::device {

// 16 rows of 128 bytes of one warp, swizzled like wgmma's tiles.
struct GemmStaging {
  u8* memory;
  CROSSDOCK_DEVICE U32x4* at(u32 row, u32 chunk) const {
    return reinterpret_cast<U32x4*>(memory +
                                    ptx::swizzled(ptx::Swizzle::k128, row * 128 + chunk * 16));
  }
  // The first `rows` of the 16 to global memory, `stride` bytes apart.
  CROSSDOCK_DEVICE void store(u8* to, u32 stride, u32 rows, u32 lane) const {
    to += u64{lane / 8} * stride + lane % 8 * 16;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = i * 4 + lane / 8;
      const U32x4 v = ptx::ld_shared(at(row, lane % 8));
      if (row < rows) ptx::st_weak(reinterpret_cast<U32x4*>(to), v);
      to += 4 * stride;
    }
  }
};

// Rows and columns of a tile that a warp holds.
template <GroupedGemmConfig kConfig>
struct GemmWarpPart {
  static constexpr bool kWide = kConfig.tile_rows == 128;
  static constexpr u32 kColumns = kWide ? 256 : 128;
  u32 row;     // first of 16
  u32 column;  // first

  CROSSDOCK_DEVICE explicit GemmWarpPart(u32 warp)
      : row((kWide ? warp / 4 * 64 : 0) + warp % 4 * 16), column(kWide ? 0 : warp / 4 * 128) {}
};

// As bf16, 64 columns at a time.
template <GroupedGemmConfig kConfig>
struct GemmBf16Store {
  using Part = GemmWarpPart<kConfig>;

  template <class Pairs>
  CROSSDOCK_DEVICE static void run(const GemmBlock<kConfig>& block, u32 warp, const GemmRecord& r,
                                   const Pairs& pair) {
    const Part part(warp);
    if (part.row >= r.rows) return;
    const GemmOutput& out = block.p.output;
    u8* to = out.rows + u64{r.row + part.row} * out.row_stride + (r.column + part.column) * 2;
    const u32 rows = r.rows - part.row;
    const u32 columns = block.p.shape.columns - r.column - part.column;
    CROSSDOCK_UNROLL
    for (u32 pass = 0; pass < Part::kColumns / 64; ++pass) {
      // Addresses are made anew in each pass: all of them at once do not fit the registers.
      const u32 lane = ptx::forgotten(lane_index());
      const GemmStaging staging{GemmBlock<kConfig>::staging(warp)};
      ptx::sync_warp(kFullMask);
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < 8; j += 2) {
        const u32 first = (pass * 8 + j) * 2;
        ptx::store_matrix_x4(staging.at(lane % 16, j + lane / 16),
                             {pair(first), pair(first + 1), pair(first + 2), pair(first + 3)});
      }
      ptx::sync_warp(kFullMask);
      if (pass * 64 < columns) staging.store(to + pass * 128, out.row_stride, rows, lane);
    }
  }
};

}  // namespace crossdock::device
