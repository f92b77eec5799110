// The bias of an expert's columns in grouped_gemm, added in fp32 to finished sums before they are
// rounded. A warp of a tile of many rows keeps that of the tile's columns in its staging memory,
// which nobody needs during the main loop:
//
//   epilogue of the tile before; fetch ... main loop ... add; epilogue
//
// With few rows a thread has four columns, and their bias in registers (swapped.cuh).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/block.cuh>
#include <crossdock/ptx/async_copy.cuh>
#include <crossdock/ptx/convert.cuh>

namespace crossdock::device {

// Of one column; 0 beyond the last.
CROSSDOCK_DEVICE float gemm_bias(const GroupedGemmParams& p, u32 expert, u32 column) {
  if (column >= p.shape.columns) return 0;
  const u64 at = u64{expert} * p.shape.columns + column;
  if (!p.bias.bf16) return ptx::ld_weak(reinterpret_cast<const float*>(p.bias.values) + at);
  const u32 code = ptx::ld_weak(reinterpret_cast<const u16*>(p.bias.values) + at);
  return bit_cast<float>(code << 16);
}

template <GroupedGemmConfig kConfig>
struct GemmBiasRow {
  using Block = GemmBlock<kConfig>;
  static constexpr bool kWide = kConfig.tile_rows == 128;

  // By a warp whose staging memory is free: 256 columns, zeros beyond the last.
  CROSSDOCK_DEVICE static void fetch(const Block& block, u32 warp, const GemmRecord& r) {
    if (kConfig.swapped || block.p.bias.values == nullptr) return;
    const u32 width = block.p.bias.bf16 ? 2 : 4;
    const u32 columns = block.p.shape.columns;
    const u8* from = block.p.bias.values + (u64{r.expert} * columns + r.column) * width;
    ptx::sync_warp(kFullMask);
    for (u32 i = lane_index(); i < kGemmColumns * width / 16; i += kWarpSize)
      ptx::copy_async_16(Block::staging(warp) + i * 16, from + i * 16,
                         r.column + i * 16 / width < columns ? 16 : 0);
    ptx::copy_async_commit();
  }
  // To the sums of a thread as the main loop leaves them: see accumulator_column().
  template <class Sums>
  CROSSDOCK_DEVICE static void add(const Block& block, Sums& sum) {
    if (block.p.bias.values == nullptr) return;
    const u32 warp = ptx::warp_constant(thread_index() / kWarpSize) - kGemmLoadWarps;
    ptx::copy_async_wait<0>();
    ptx::sync_warp(kFullMask);
    const u32 column = (kWide ? 0 : warp / 4 * 128) + lane_index() % 4 * 2;
    const u8* row = Block::staging(warp);
    if (block.p.bias.bf16) {
      add_pairs(sum, [&](u32 i) {
        return ptx::f32_from_bf16x2(
            ptx::ld_shared(reinterpret_cast<const u32*>(row + (column + i * 8) * 2)));
      });
    } else {
      add_pairs(sum, [&](u32 i) {
        const float* at = reinterpret_cast<const float*>(row) + column + i * 8;
        return ptx::F32x2{ptx::ld_shared(at), ptx::ld_shared(at + 1)};
      });
    }
    ptx::sync_warp(kFullMask);  // the staging memory may be written
  }

 private:
  // `pair(i)`: of the thread's two columns in group i of 8.
  template <class Sums, class Pair>
  CROSSDOCK_DEVICE static void add_pairs(Sums& sum, const Pair& pair) {
    constexpr u32 kGroups = (kWide ? 128 : 64) / 4;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kGroups; ++i) {
      const ptx::F32x2 of = pair(i);
      sum[4 * i] += of.lo;
      sum[4 * i + 1] += of.hi;
      sum[4 * i + 2] += of.lo;
      sum[4 * i + 3] += of.hi;
    }
  }
};

}  // namespace crossdock::device
