// The tile for few rows: the weights are wgmma's A operand, 128 of a tile's 256 columns for each
// warpgroup in two pieces of 64, and the rows are its n: 8, 16 or 32. What limits such a tile is
// how fast weights arrive, so each stage is multiplied, waited for and freed before the next.
//
// A thread holds columns 64 * piece + accumulator_row() of its warpgroup's 128 and rows
// accumulator_column(); columns 8 apart are gate and up of one value.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/multiply.cuh>
#include <crossdock/gemm/swiglu.cuh>

namespace crossdock::device {

template <GroupedGemmConfig kConfig>
struct GemmSwapped {
  using Block = GemmBlock<kConfig>;
  static constexpr u32 kRows = kConfig.tile_rows;
  static constexpr u32 kRegisters = kRows / 2;  // of a piece
  static constexpr u32 kPieces = 2;

  const Block& block;
  float sum[kPieces][kRegisters];
  float part[kPieces][kRegisters];
  GemmWeightScales<kConfig> weight_scales;
  typename Block::Cursor at = {};
  u32 group;
  u32 column;                   // the thread's first of the tile
  u32 row;                      // and its first row; kept, since asking for its number takes long
  float bias[kPieces][2] = {};  // of the thread's columns, 8 apart

  CROSSDOCK_DEVICE GemmSwapped(const Block& of, u32 warp)
      : block(of),
        group(warp / 4),
        column(group * 128 + warp % 4 * 16 + lane_index() / 4),
        row(ptx::forgotten(lane_index() % 4 * 2)) {
    clear();
  }
  CROSSDOCK_DEVICE void clear() {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kPieces * kRegisters; ++i)
      sum[i / kRegisters][i % kRegisters] = 0;
  }
  CROSSDOCK_DEVICE void start() { block.wait_full(at); }
  CROSSDOCK_DEVICE void begin(const GemmRecord& r) {
    if constexpr (kConfig.fp8) weight_scales.begin(block.p, r, group);
    if (block.p.bias.values == nullptr) return;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kPieces * 2; ++i)
      bias[i / 2][i % 2] = gemm_bias(block.p, r.expert, r.column + column + i / 2 * 64 + i % 2 * 8);
  }
  CROSSDOCK_DEVICE void run(bool more) {
    const u32 stages = block.p.shape.k_stages;
    CROSSDOCK_NO_UNROLL
    for (u32 k = 0; k < stages; ++k) {
      if constexpr (kConfig.fp8) {
        issue(part, false);
        if (k % kWarpSize == 0) weight_scales.turn(k);
        const Scales scales = load_scales(k);
        wait(part);
        promote(scales);
        ptx::sync_warp(kFullMask);  // all lanes have read their scales
      } else {
        issue(sum, k != 0);
        wait(sum);
      }
      gemm_release<kConfig>(at.stage);
      at.advance();
      if (k + 1 < stages || more) block.wait_full(at);
    }
    if (block.p.bias.values != nullptr) add_bias();
  }
  CROSSDOCK_DEVICE void finish() {}

 protected:
  struct Scales {
    float columns[2];            // of register pairs: 8 columns apart
    float rows[kRegisters / 2];  // [group of 8]{2}
  };
  CROSSDOCK_DEVICE Scales load_scales(u32 k) const { return load_scales(at.stage, k); }
  CROSSDOCK_DEVICE Scales load_scales(u32 stage, u32 k) const {
    Scales s;
    const float* rows = Block::input_scales(stage) + row;
    s.columns[0] = weight_scales.first_of(k);
    s.columns[1] = kConfig.swiglu ? weight_scales.second_of(k) : s.columns[0];
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRegisters / 4; ++i) {
      const U32x2 pair = ptx::ld_shared(reinterpret_cast<const U32x2*>(rows + i * 8));
      s.rows[2 * i] = gemm_scale_in<kConfig>(pair.x, k);
      s.rows[2 * i + 1] = gemm_scale_in<kConfig>(pair.y, k);
    }
    return s;
  }
  CROSSDOCK_DEVICE void issue(float (&to)[kPieces][kRegisters], bool accumulate) {
    const u8* weights = Block::weights(at.stage) + group * 128 * kGemmStageBytes;
    const u64 b = ptx::matrix_descriptor(Block::input(at.stage), ptx::k_major(ptx::Swizzle::k128));
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece)
      ptx::pin_accumulators(to[piece]);
    ptx::wgmma_fence();
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece) {
      const u64 a = ptx::matrix_descriptor(weights + piece * 64 * kGemmStageBytes,
                                           ptx::k_major(ptx::Swizzle::k128));
      CROSSDOCK_UNROLL
      for (u32 step = 0; step < 4; ++step) {
        const bool add = accumulate || step != 0;
        if constexpr (kConfig.fp8) {
          ptx::wgmma_e4m3(to[piece], ptx::advanced(a, 32 * step), ptx::advanced(b, 32 * step), add);
        } else {
          ptx::wgmma_bf16(to[piece], ptx::advanced(a, 32 * step), ptx::advanced(b, 32 * step), add);
        }
      }
    }
    ptx::wgmma_commit();
  }
  CROSSDOCK_DEVICE static void wait(float (&of)[kPieces][kRegisters]) {
    ptx::wgmma_wait<0>(of[0]);
    ptx::pin_accumulators(of[1]);
  }
  CROSSDOCK_DEVICE void add_bias() {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kPieces * kRegisters; ++i)
      sum[i / kRegisters][i % kRegisters] += bias[i / kRegisters][i % kRegisters / 2 % 2];
  }
  CROSSDOCK_DEVICE void promote(const Scales& s) {
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece)
      promote(s, piece);
  }
  CROSSDOCK_DEVICE void promote(const Scales& s, u32 piece) {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRegisters; ++i)
      sum[piece][i] = ptx::fused_multiply_add(
          part[piece][i], s.rows[i / 4 * 2 + i % 2] * s.columns[i / 2 % 2], sum[piece][i]);
  }
};

// Epilogues of swapped tiles. Each warp has, for each piece, 16 columns side by side: of 8 values
// it makes 16 bytes of bf16, and stores those for every row.
template <GroupedGemmConfig kConfig>
struct GemmSwappedStore {
  using Block = GemmBlock<kConfig>;
  using Math = GemmSwapped<kConfig>;
  static constexpr u32 kRows = Math::kRows;
  static constexpr u32 kRegisters = Math::kRegisters;

  CROSSDOCK_DEVICE static void run(const Block& block, u32 warp, const GemmRecord& r,
                                   const Math& math) {
    if constexpr (kConfig.swiglu) {
      float values[2][kRegisters / 2];  // [piece][group of 8 rows]{2 rows}
      if (block.p.swiglu.fast) {
        activate<true>(block, r, math, values);
      } else {
        activate<false>(block, r, math, values);
      }
      if constexpr (kConfig.fp8) {
        quantise(block, warp, r, values);
      } else {
        store_values(block, warp, r, values);
      }
    } else {
      store(block, warp, r, math);
    }
  }

 private:
  // First of the warp's columns of a piece.
  CROSSDOCK_DEVICE static u32 column(const GemmRecord& r, u32 warp, u32 piece) {
    return r.column + warp / 4 * 128 + piece * 64 + warp % 4 * 16;
  }
  // 8 x 8 blocks of 2-byte values, turned: [row][chunk] of 16 bytes, four chunks for each row; at
  // most 32 rows at a time.
  static constexpr u32 kPassRows = min_of(kRows, 32u);
  CROSSDOCK_DEVICE static U32x4* chunk_at(u32 warp, u32 row, u32 chunk) {
    return reinterpret_cast<U32x4*>(Block::staging(warp)) + row * 4 + chunk;
  }
  CROSSDOCK_DEVICE static void store(const Block& block, u32 warp, const GemmRecord& r,
                                     const Math& math) {
    CROSSDOCK_UNROLL
    for (u32 first = 0; first < kRows; first += kPassRows)
      store(block, warp, r, math, first);
  }
  CROSSDOCK_DEVICE static void store(const Block& block, u32 warp, const GemmRecord& r,
                                     const Math& math, u32 first) {
    const u32 lane = lane_index();
    ptx::sync_warp(kFullMask);
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < kPassRows / 8; ++j) {
      u32 words[4];  // {piece 0, piece 1} x {columns 0-7, 8-15}
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < 4; ++i) {
        const float* v = math.sum[i / 2] + 4 * (first / 8 + j) + i % 2 * 2;
        words[i] = ptx::bf16x2_from_f32(v[0], v[1]);
      }
      ptx::store_matrix_x4_transposed(chunk_at(warp, 8 * j + lane % 8, lane / 8), words);
    }
    ptx::sync_warp(kFullMask);
    const GemmOutput& out = block.p.output;
    const u32 at = column(r, warp, lane % 4 / 2) + lane % 2 * 8;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kPassRows / 8; ++i) {
      const u32 row = first + i * 8 + lane / 4;
      const U32x4 v = ptx::ld_shared(chunk_at(warp, row - first, lane % 4));
      if (row < r.rows && at < block.p.shape.columns)
        ptx::st_weak(
            reinterpret_cast<U32x4*>(out.rows + u64{r.row + row} * out.row_stride + at * 2), v);
    }
  }

  template <bool kFast>
  CROSSDOCK_DEVICE static void activate(const Block& block, const GemmRecord& r, const Math& math,
                                        float (&values)[2][kRegisters / 2]) {
    const float* weights = block.p.swiglu.row_weights;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRegisters / 2; ++i) {
      const u32 row = i / 2 * 8 + lane_index() % 4 * 2 + i % 2;
      const float weight =
          weights == nullptr || row >= r.rows ? 1.0f : ptx::ld_weak(weights + r.row + row);
      CROSSDOCK_UNROLL
      for (u32 piece = 0; piece < 2; ++piece) {
        const u32 at = i / 2 * 4 + i % 2;
        const ptx::F32x2 both = ptx::f32_from_bf16x2(
            ptx::bf16x2_from_f32(math.sum[piece][at], math.sum[piece][at + 2]));
        values[piece][i] = swiglu<kFast>(both.lo, both.hi, block.p.swiglu.clamp, weight);
      }
    }
  }
  CROSSDOCK_DEVICE static void store_values(const Block& block, u32 warp, const GemmRecord& r,
                                            const float (&values)[2][kRegisters / 2]) {
    static_assert(kRows == kPassRows, "bf16 has no larger swapped tile");
    const u32 lane = lane_index();
    ptx::sync_warp(kFullMask);
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < kRows / 8; ++j) {
      const u32 words[2] = {ptx::bf16x2_from_f32(values[0][2 * j], values[0][2 * j + 1]),
                            ptx::bf16x2_from_f32(values[1][2 * j], values[1][2 * j + 1])};
      ptx::store_matrix_x2_transposed(chunk_at(warp, 8 * j + lane % 8, lane / 8 % 2), words);
    }
    ptx::sync_warp(kFullMask);
    const GemmOutput& out = block.p.output;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < ceil_div(kRows, 16u); ++i) {
      const u32 row = i * 16 + lane / 2;
      if (row >= kRows) break;
      const U32x4 v = ptx::ld_shared(chunk_at(warp, row, lane % 2));
      if (row < r.rows)
        ptx::st_weak(reinterpret_cast<U32x4*>(out.rows + u64{r.row + row} * out.row_stride +
                                              column(r, warp, lane % 2)),
                     v);
    }
  }

  // The 128 values of a row are spread over all math warps: they tell each other their peaks.
  CROSSDOCK_DEVICE static void quantise(const Block& block, u32 warp, const GemmRecord& r,
                                        const float (&values)[2][kRegisters / 2]) {
    const u32 lane = lane_index();
    float* peaks = Block::exchange();  // [row][warp]
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRegisters / 2; ++i) {
      float peak = ptx::larger(ptx::magnitude(values[0][i]), ptx::magnitude(values[1][i]));
      CROSSDOCK_UNROLL
      for (u32 distance = 4; distance < kWarpSize; distance *= 2)
        peak = ptx::larger(peak, ptx::shuffle_xor(kFullMask, peak, distance));
      if (lane < 4) peaks[(i / 2 * 8 + lane * 2 + i % 2) * kGemmMathWarps + warp] = peak;
    }
    math_sync();
    u8* bytes = Block::staging(warp);  // [row][piece][8]
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRegisters / 2; ++i) {
      const u32 row = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float peak = 0;
      CROSSDOCK_UNROLL
      for (u32 w = 0; w < kGemmMathWarps; ++w)
        peak = ptx::larger(peak, peaks[row * kGemmMathWarps + w]);
      const E4m3Scale s = E4m3Scale::of(peak, kConfig.ue8m0);
      if (warp == 0 && lane < 4 && row < r.rows)
        gemm_store_scale<kConfig>(block.p.output, r, row, s.scale);
      const u32 codes = ptx::e4m3x2_from_f32(values[0][i] * s.inverse, values[1][i] * s.inverse);
      bytes[row * 16 + lane / 4] = static_cast<u8>(codes);
      bytes[row * 16 + 8 + lane / 4] = static_cast<u8>(codes >> 8);
    }
    math_sync();  // also: the peaks may be overwritten
    const GemmOutput& out = block.p.output;
    for (u32 i = lane; i < kRows * 2; i += kWarpSize) {
      const u64 v = reinterpret_cast<const u64*>(bytes)[i];
      if (i / 2 < r.rows)
        ptx::st_weak(reinterpret_cast<u64*>(out.rows + u64{r.row + i / 2} * out.row_stride +
                                            column(r, warp, i % 2) / 2),
                     v);
    }
    ptx::sync_warp(kFullMask);
  }
  CROSSDOCK_DEVICE static void math_sync() {
    ptx::sync_warp(kFullMask);
    ptx::barrier_sync(kGemmMathBarrier, kGemmMathWarps * kWarpSize);
  }
};

}  // namespace crossdock::device
