// SwiGLU as the epilogue of grouped_gemm. Columns are gate and up in groups of 8, so that both of
// one value are in the same thread, in either orientation of the product:
//
//   value = silu(min(gate, clamp)) * clamp(up, -clamp, clamp) * weight of the row
//
// gate and up as rounded to bf16, the rest in fp32. With e4m3 the 128 values that a row has in a
// tile share one scale: their largest magnitude (at least 1e-10) divided by 448, of ue8m0 the next
// power of two. An infinite one makes NaN of all of them. With bf16 they are rounded.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/hand_over.cuh>
#include <crossdock/gemm/scales.cuh>
#include <crossdock/gemm/store.cuh>
#include <crossdock/ptx/number.cuh>

namespace crossdock::device {

inline constexpr float kSmallestPeak = 1e-10f;
inline constexpr float kLargestE4m3 = 448.0f;

template <bool kFast>
CROSSDOCK_DEVICE float swiglu(float gate, float up, float clamp, float weight) {
  const float g = ptx::at_most(gate, clamp);
  const float u = ptx::at_least(ptx::at_most(up, clamp), -clamp);
  constexpr float kLog2E = 1.4426950408889634f;
  const float denominator =
      1.0f + (kFast ? ptx::exp2_approximate(-kLog2E * g) : ptx::exponential(-g));
  const float silu = kFast ? g * ptx::reciprocal_approximate(denominator) : g / denominator;
  return silu * u * weight;
}

// What a peak of 128 values makes of them.
struct E4m3Scale {
  float scale, inverse;
  // `ue8m0`: the next power of two. It has no infinity, and the largest power would make numbers of
  // infinite values: NaN, whose code is 255.
  CROSSDOCK_DEVICE static E4m3Scale of(float peak, bool ue8m0) {
    float scale = (peak > kSmallestPeak ? peak : kSmallestPeak) / kLargestE4m3;
    if (ue8m0) {
      const bool infinite = bit_cast<u32>(scale) >= minifloat::kF32Infinity;
      scale = ptx::f32_from_ue8m0(infinite ? 255u : ptx::ue8m0_from_f32(scale));
    }
    return {scale, 1.0f / scale};
  }
};
// The scale of a row's values in a tile; ue8m0 as a byte of a word that four tiles share.
template <GroupedGemmConfig kConfig>
CROSSDOCK_DEVICE void gemm_store_scale(const GemmOutput& out, const GemmRecord& r, u32 row,
                                       float scale) {
  const u32 group = r.column / kGemmColumns;
  if constexpr (kConfig.ue8m0) {
    const u64 word = group / kScalesOfWord * out.scale_columns + r.row + row;
    u8* bytes = reinterpret_cast<u8*>(out.scales) + word * 4;
    ptx::st_weak(bytes + group % kScalesOfWord, static_cast<u8>(ptx::ue8m0_from_f32(scale)));
  } else {
    ptx::st_weak(out.scales + group * out.scale_columns + r.row + row, scale);
  }
}

template <GroupedGemmConfig kConfig>
struct GemmSwigluStore {
  using Block = GemmBlock<kConfig>;
  using Part = GemmWarpPart<kConfig>;
  static constexpr u32 kGroups = Part::kColumns / 16;  // of 8 values of a row
  static constexpr u32 kValues = kGroups * 4;

  template <class Pairs>
  CROSSDOCK_DEVICE static void run(const Block& block, u32 warp, u32 tile, const GemmRecord& r,
                                   const Pairs& pair) {
    float values[kValues];  // [group]{upper row, lower row}{2 columns}
    const u32 upper = Part(warp).row + lane_index() / 4;
    const float weights[2] = {weight(block, r, upper), weight(block, r, upper + 8)};
    if (block.p.swiglu.fast) {
      activate<true>(values, pair, block.p.swiglu.clamp, weights);
    } else {
      activate<false>(values, pair, block.p.swiglu.clamp, weights);
    }
    if constexpr (kConfig.fp8) {
      quantise(block, warp, tile, r, values);
    } else {
      round(block, warp, r, values);
    }
  }

 private:
  CROSSDOCK_DEVICE static float weight(const Block& block, const GemmRecord& r, u32 row) {
    const float* weights = block.p.swiglu.row_weights;
    return weights == nullptr || row >= r.rows ? 1.0f : ptx::ld_weak(weights + r.row + row);
  }
  template <bool kFast, class Pairs>
  CROSSDOCK_DEVICE static void activate(float (&values)[kValues], const Pairs& pair, float clamp,
                                        const float (&weights)[2]) {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kGroups; ++i) {
      CROSSDOCK_UNROLL
      for (u32 row = 0; row < 2; ++row) {
        const ptx::F32x2 gate = ptx::f32_from_bf16x2(pair(4 * i + row));
        const ptx::F32x2 up = ptx::f32_from_bf16x2(pair(4 * i + 2 + row));
        values[4 * i + 2 * row] = swiglu<kFast>(gate.lo, up.lo, clamp, weights[row]);
        values[4 * i + 2 * row + 1] = swiglu<kFast>(gate.hi, up.hi, clamp, weights[row]);
      }
    }
  }
  // First value of the warp's part of the tile, in a row of the output.
  CROSSDOCK_DEVICE static u32 first_value(const GemmRecord& r, const Part& part) {
    return (r.column + part.column) / 2;
  }

  CROSSDOCK_DEVICE static void round(const Block& block, u32 warp, const GemmRecord& r,
                                     const float (&values)[kValues]) {
    const Part part(warp);
    if (part.row >= r.rows) return;
    const GemmOutput& out = block.p.output;
    u8* to = out.rows + u64{r.row + part.row} * out.row_stride + first_value(r, part) * 2;
    CROSSDOCK_UNROLL
    for (u32 pass = 0; pass < kGroups / 8; ++pass) {
      const u32 lane = ptx::forgotten(lane_index());
      const GemmStaging staging{Block::staging(warp)};
      ptx::sync_warp(kFullMask);
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < 8; j += 2) {
        u32 words[4];
        CROSSDOCK_UNROLL
        for (u32 i = 0; i < 4; ++i) {
          const u32 first = (pass * 8 + j) * 4 + i * 2;
          words[i] = ptx::bf16x2_from_f32(values[first], values[first + 1]);
        }
        ptx::store_matrix_x4(staging.at(lane % 16, j + lane / 16), words);
      }
      ptx::sync_warp(kFullMask);
      staging.store(to + pass * 128, out.row_stride, r.rows - part.row, lane);
    }
  }

  CROSSDOCK_DEVICE static void quantise(const Block& block, u32 warp, u32 tile, const GemmRecord& r,
                                        const float (&values)[kValues]) {
    float peaks[2] = {0, 0};
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kValues; ++i)
      peaks[i / 2 % 2] = ptx::larger(peaks[i / 2 % 2], ptx::magnitude(values[i]));
    CROSSDOCK_UNROLL
    for (u32 row = 0; row < 2; ++row) {
      peaks[row] = ptx::larger(peaks[row], ptx::shuffle_xor(kFullMask, peaks[row], 1));
      peaks[row] = ptx::larger(peaks[row], ptx::shuffle_xor(kFullMask, peaks[row], 2));
    }
    if constexpr (!Part::kWide) exchange(warp, peaks);
    const Part part(warp);
    const bool hands_over = block.hands_over();  // rows that there are not as well
    if (!hands_over && part.row >= r.rows) return;
    const E4m3Scale scales[2] = {E4m3Scale::of(peaks[0], kConfig.ue8m0),
                                 E4m3Scale::of(peaks[1], kConfig.ue8m0)};
    store_scales(block, r, part, scales);
    const u32 lane = ptx::forgotten(lane_index());
    const GemmStaging staging{Block::staging(warp)};
    if (hands_over) Block::wait_stored_before(tile);
    ptx::sync_warp(kFullMask);
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kGroups; ++i) {
      CROSSDOCK_UNROLL
      for (u32 row = 0; row < 2; ++row) {
        const float* v = values + 4 * i + 2 * row;
        u8* to = reinterpret_cast<u8*>(staging.at(lane / 4 + 8 * row, i / 2)) + i % 2 * 8;
        reinterpret_cast<u16*>(to)[lane % 4] = static_cast<u16>(
            ptx::e4m3x2_from_f32(v[0] * scales[row].inverse, v[1] * scales[row].inverse));
      }
    }
    if (hands_over) return GemmHandOver<kConfig>::tell(warp, 0);
    ptx::sync_warp(kFullMask);
    store_rows(block, r, part, staging, lane);
  }
  // 64 rows: the other warpgroup has the other half of each row's values.
  CROSSDOCK_DEVICE static void exchange(u32 warp, float (&peaks)[2]) {
    float* of = Block::exchange();
    const u32 row = warp % 4 * 16 + lane_index() / 4;
    const u32 mine = warp / 4 * 64;
    if (lane_index() % 4 == 0) {
      of[mine + row] = peaks[0];
      of[mine + row + 8] = peaks[1];
    }
    block_sync();
    peaks[0] = ptx::larger(peaks[0], of[64 - mine + row]);
    peaks[1] = ptx::larger(peaks[1], of[64 - mine + row + 8]);
    block_sync();
  }
  CROSSDOCK_DEVICE static void block_sync() {
    ptx::sync_warp(kFullMask);
    ptx::barrier_sync(kGemmMathBarrier, kGemmMathWarps * kWarpSize);
  }
  CROSSDOCK_DEVICE static void store_scales(const Block& block, const GemmRecord& r,
                                            const Part& part, const E4m3Scale (&scales)[2]) {
    if (lane_index() % 4 != 0 || part.column != 0) return;
    CROSSDOCK_UNROLL
    for (u32 row = 0; row < 2; ++row) {
      const u32 at = part.row + lane_index() / 4 + 8 * row;
      if (at < r.rows) gemm_store_scale<kConfig>(block.p.output, r, at, scales[row].scale);
    }
  }
  // 128 bytes of each row; 64 where two warps have the row.
  CROSSDOCK_DEVICE static void store_rows(const Block& block, const GemmRecord& r, const Part& part,
                                          const GemmStaging& staging, u32 lane) {
    constexpr u32 kChunks = kGroups / 2;
    const GemmOutput& out = block.p.output;
    u8* to = out.rows + u64{r.row + part.row} * out.row_stride + first_value(r, part);
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kChunks / 2; ++i) {
      const u32 row = i * (kWarpSize / kChunks) + lane / kChunks;
      const U32x4 v = *staging.at(row, lane % kChunks);
      if (part.row + row < r.rows)
        ptx::st_weak(reinterpret_cast<U32x4*>(to + u64{row} * out.row_stride) + lane % kChunks, v);
    }
  }
};

}  // namespace crossdock::device
