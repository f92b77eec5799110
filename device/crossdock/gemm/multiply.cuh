// Main loops of grouped_gemm: what the two math warpgroups do with the stages of a tile.
//
// GemmPromoted (e4m3): the tensor core adds up 128 values of K, which is one scale group, in 64
// registers; these are multiplied by the scales and added in fp32. With 128 rows, each warpgroup
// has 64 of them and takes the 256 columns as two halves that share those registers:
//
//   tensor core   half 0 of stage s   half 1 of s          half 0 of s + 1
//   fp32 units                        half 0 of s          half 1 of s
//
// The other warpgroup fills what one leaves: they drift apart by themselves. The first half of the
// next tile is issued before the epilogue of this one, always, or the compiler would add waits:
// after the last tile it multiplies what is left in a stage, and nobody looks at the result. With
// 64 rows, the warpgroups share the rows and have 128 columns each.
//
// GemmPlain (bf16): the tensor core adds up all of K in place; a stage is freed when the next one's
// products have been issued. A finished tile is rounded to bf16, which leaves the accumulators to
// the next one during the epilogue.
//
// A thread holds rows accumulator_row() and columns accumulator_column() of its warpgroup's part.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/bias.cuh>
#include <crossdock/gemm/block.cuh>
#include <crossdock/gemm/scales.cuh>
#include <crossdock/ptx/convert.cuh>
#include <crossdock/ptx/wgmma.cuh>

namespace crossdock::device {

// Descriptors of the operands in a stage. The upper half of a descriptor is the same for all.
CROSSDOCK_DEVICE u64 gemm_descriptor(u32 low) {
  constexpr u64 kHigh = ptx::matrix_descriptor(0u, ptx::k_major(ptx::Swizzle::k128)) >> 32;
  return kHigh << 32 | low;
}
CROSSDOCK_DEVICE u32 gemm_descriptor_low(const u8* shared) {
  return static_cast<u32>(ptx::matrix_descriptor(shared, ptx::k_major(ptx::Swizzle::k128)));
}

// One warp has read a stage: all its lanes have come.
template <GroupedGemmConfig kConfig>
CROSSDOCK_DEVICE void gemm_release(u32 stage, u32 lane = lane_index()) {
  ptx::mbarrier_arrive_if(GemmBlock<kConfig>::empty(stage), lane == 0);
}

template <GroupedGemmConfig kConfig>
struct GemmPromoted {
  using Block = GemmBlock<kConfig>;
  static constexpr bool kWide = kConfig.tile_rows == 128;
  static constexpr u32 kHalves = kWide ? 2 : 1;
  static constexpr u32 kRegisters = 64 * kHalves;

  const Block& block;
  float sum[kRegisters];
  float part[64];
  float rows[2] = {};     // scales of the stage that is multiplied: of the thread's rows,
  float columns[2] = {};  // and of 128 columns each
  GemmWeightScales<kConfig> weight_scales;
  typename Block::Cursor at = {};
  u32 input_low, weight_low;
  u32 group;
  u32 row;  // the thread's first row of the tile

  CROSSDOCK_DEVICE GemmPromoted(const Block& of, u32 warp) : block(of), group(warp / 4) {
    input_low = gemm_descriptor_low(Block::input(0)) + (kWide ? group * (64 * 128 / 16) : 0);
    weight_low = gemm_descriptor_low(Block::weights(0)) + (kWide ? 0 : group * (128 * 128 / 16));
    // Made once: the compiler would rather ask for the thread's number again in every stage, which
    // takes long.
    row = ptx::forgotten((kWide ? group * 64 : 0) + warp % 4 * 16 + lane_index() / 4);
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 64; ++i)
      part[i] = 0;
    clear();
  }
  CROSSDOCK_DEVICE void clear() {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRegisters; ++i)
      sum[i] = 0;
  }
  CROSSDOCK_DEVICE void start() {
    wait_stage(0);
    issue(at.stage, 0);
  }
  // Before run(), when the first stage of the tile has been waited for.
  CROSSDOCK_DEVICE void begin(const GemmRecord& r) { weight_scales.begin(block.p, r); }
  // Adds up one tile; `more`: another follows.
  CROSSDOCK_DEVICE void run(bool more) {
    const u32 stages = block.p.shape.k_stages;
    multiply(stages, more);
    GemmBiasRow<kConfig>::add(block, sum);
  }
  // Two values of a row, rounded: registers 2 * i and 2 * i + 1.
  CROSSDOCK_DEVICE u32 pair(u32 i) const {
    return ptx::bf16x2_from_f32(sum[2 * i], sum[2 * i + 1]);
  }
  CROSSDOCK_DEVICE void finish() { ptx::wgmma_wait<0>(part); }
  // Of the tile: outputs may take its place.
  CROSSDOCK_DEVICE typename Block::Cursor last_stage() const { return at.last(); }

 private:
  struct Scales {
    float upper, lower;   // of the thread's rows
    float first, second;  // of columns
  };
  CROSSDOCK_DEVICE void multiply(u32 stages, bool more) {
    CROSSDOCK_NO_UNROLL
    for (u32 first = 0; first < stages; first += kWarpSize) {
      weight_scales.turn(first);
      take_columns(first);
      const u32 end = min_of(first + kWarpSize, stages);
      CROSSDOCK_NO_UNROLL
      for (u32 k = first; k < end; ++k)
        run_stage(k, k + 1 < stages ? k + 1 : 0, k + 1 < stages || more);
    }
  }
  // The first half of stage `k` is being multiplied. All that the next promotion needs is got ready
  // while the tensor core works: between the end of a half and the beginning of the next this
  // warpgroup has no work for it. `next` is the next stage's number, if there is one.
  CROSSDOCK_DEVICE void run_stage(u32 k, u32 next, bool more) {
    const u32 stage = at.stage;
    const Scales scales{rows[0], rows[1], columns[0], columns[1]};
    if constexpr (kWide) {
      ptx::wgmma_wait<0>(part);
      promote<0>(scales);
      issue(stage, 1);
    }
    take_columns(k + 1);
    at.advance();
    if constexpr (Block::kLends)
      if (k + 1 == block.p.skipped) at.skip();
    if (more) wait_stage(next);
    ptx::wgmma_wait<0>(part);
    if (weight_scales.turns == 0) ptx::mbarrier_arrive(Block::empty(stage));  // in lane 0
    promote<kHalves - 1>(scales);
    issue(at.stage, 0);
  }
  // The next stage is there; its scales are loaded well before they are used. All lanes have read
  // them when its products begin, so the stage may be freed when those have ended.
  CROSSDOCK_DEVICE void wait_stage(u32 k) {
    block.wait_full(at);
    const float* of = Block::input_scales(at.stage) + row;
    rows[0] = gemm_input_scale<kConfig>(of, k);
    rows[1] = gemm_input_scale<kConfig>(of + 8, k);
  }
  CROSSDOCK_DEVICE void take_columns(u32 k) {
    columns[0] = weight_scales.first_of(k);
    columns[1] = weight_scales.second_of(k);
  }
  CROSSDOCK_DEVICE void issue(u32 stage, u32 half) {
    const u64 a = gemm_descriptor(input_low + stage * (Block::kShared.input_bytes / 16));
    const u64 b =
        gemm_descriptor(weight_low + stage * (Block::kWeightBytes / 16) + half * (128 * 128 / 16));
    ptx::pin_accumulators(part);
    ptx::wgmma_fence();
    CROSSDOCK_UNROLL
    for (u32 step = 0; step < 4; ++step)
      ptx::wgmma_e4m3(part, ptx::advanced(a, 32 * step), ptx::advanced(b, 32 * step), step != 0);
    ptx::wgmma_commit();
  }
  template <u32 kHalf>
  CROSSDOCK_DEVICE void promote(const Scales& s) {
    // Columns in groups of 8: gate and up in turns, or 128 with one scale.
    const float even =
        kConfig.swiglu ? s.first : ((kWide ? kHalf : group) == 0 ? s.first : s.second);
    const float odd = kConfig.swiglu ? s.second : even;
    // One factor after the other: the operand cache then keeps it, whatever bank it is in.
    CROSSDOCK_UNROLL
    for (u32 which = 0; which < 4; ++which) {
      const float factor = (which % 2 == 0 ? s.upper : s.lower) * (which / 2 == 0 ? even : odd);
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < 64; ++i)
        if (i / 2 % 4 == which)
          sum[kHalf * 64 + i] = ptx::fused_multiply_add(part[i], factor, sum[kHalf * 64 + i]);
    }
  }
};

template <GroupedGemmConfig kConfig>
struct GemmPlain {
  using Block = GemmBlock<kConfig>;
  static constexpr bool kWide = kConfig.tile_rows == 128;
  static constexpr u32 kRegisters = kWide ? 128 : 64;

  const Block& block;
  float sum[kRegisters];
  u32 rounded[kRegisters / 2];  // of the tile before
  typename Block::Cursor at = {};
  u32 before = 0;  // the stage that is being multiplied
  u32 input_low, weight_low;

  CROSSDOCK_DEVICE GemmPlain(const Block& of, u32 warp) : block(of) {
    const u32 group = warp / 4;
    input_low = gemm_descriptor_low(Block::input(0)) + (kWide ? group * (64 * 128 / 16) : 0);
    weight_low = gemm_descriptor_low(Block::weights(0)) + (kWide ? 0 : group * (128 * 128 / 16));
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRegisters; ++i)
      sum[i] = 0;
  }
  CROSSDOCK_DEVICE void clear() {}
  CROSSDOCK_DEVICE void start() {
    block.wait_full(at);
    issue(false);
  }
  CROSSDOCK_DEVICE void begin(const GemmRecord&) {}
  // Adds up one tile, rounds it, and begins the next one; `more`: there is one.
  CROSSDOCK_DEVICE void run(bool more) {
    const u32 stages = block.p.shape.k_stages;
    CROSSDOCK_NO_UNROLL
    for (u32 k = 1; k < stages; ++k) {
      block.wait_full(at);
      const u32 done = before;
      issue(true);
      ptx::wgmma_wait<1>();
      gemm_release<kConfig>(done);
    }
    ptx::wgmma_wait<0>(sum);
    gemm_release<kConfig>(before);
    GemmBiasRow<kConfig>::add(block, sum);
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRegisters / 2; ++i)
      rounded[i] = ptx::bf16x2_from_f32(sum[2 * i], sum[2 * i + 1]);
    ptx::pin_registers(rounded);
    if (more) block.wait_full(at);
    issue(false);
  }
  // Two values of a row, rounded: registers 2 * i and 2 * i + 1.
  CROSSDOCK_DEVICE u32 pair(u32 i) const { return rounded[i]; }
  CROSSDOCK_DEVICE void finish() { ptx::wgmma_wait<0>(sum); }

 private:
  CROSSDOCK_DEVICE void issue(bool accumulate) {
    const u64 a = gemm_descriptor(input_low + at.stage * (Block::kShared.input_bytes / 16));
    const u64 b = gemm_descriptor(weight_low + at.stage * (Block::kWeightBytes / 16));
    ptx::pin_accumulators(sum);
    ptx::wgmma_fence();
    CROSSDOCK_UNROLL
    for (u32 step = 0; step < 4; ++step)
      ptx::wgmma_bf16(sum, ptx::advanced(a, 32 * step), ptx::advanced(b, 32 * step),
                      accumulate || step != 0);
    ptx::wgmma_commit();
    before = at.stage;
    at.advance();
  }
};

}  // namespace crossdock::device
