// Preparation of weights: where the values of a plain matrix go, and what they become. Plain data
// and constexpr functions, so that the CPU and GPUs give the same bits. The work is done by tiles
// of 128 x 128 values, which share a scale.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fault.cuh>
#include <crossdock/layout/fp4_weights.cuh>

namespace crossdock::device {

inline constexpr u32 kWeightTile = 128;  // rows and columns
inline constexpr float kSmallestWeightPeak = 1e-10f;

// In the order of moe::Number and moe::Format.
enum class WeightNumber : u32 { kF32, kBf16, kE4m3, kE2m1 };
enum class WeightFormat : u32 { kBf16, kE4m3, kE2m1 };

// What may be wrong with a value or scale.
enum class WeightFlaw : u32 {
  kNotFinite,  // a value
  kBadScale,   // NaN, infinite or negative
  kTooLarge,   // infinite as bf16
  kNotAPower,  // a scale that shall be ue8m0
};

// One matrix of all experts, plain and prepared.
struct WeightMatrix {
  const u8* from;         // [experts][rows][columns], e2m1 two in a byte, the first below
  const u8* from_scales;  // e4m3: f32 of 128 x 128; e2m1: ue8m0 of 1 x 32
  u8* to;
  u8* to_scales;  // [experts][rows / 128][columns / 128], f32 or ue8m0
  u32 experts, rows, columns;
  WeightNumber number;
  WeightFormat format;
  bool ue8m0;
  // Rows go to: groups of 8 in turns with those of the other half, or where they are.
  bool interleaved;
  bool up_first;

  [[nodiscard]] CROSSDOCK_HOST_DEVICE constexpr u32 blocks() const { return rows / kWeightTile; }
  [[nodiscard]] CROSSDOCK_HOST_DEVICE constexpr u32 groups() const { return columns / kWeightTile; }
  // Where the scales of 128 rows go, and row `i` of them.
  [[nodiscard]] CROSSDOCK_HOST_DEVICE constexpr u32 block_to(u32 block) const {
    if (!interleaved) return block;
    const u32 half = blocks() / 2;
    const u32 second = block / half;
    return block % half * 2 + (up_first ? 1 - second : second);
  }
  [[nodiscard]] CROSSDOCK_HOST_DEVICE constexpr u32 row_to(u32 block, u32 i) const {
    const u32 at = block_to(block);
    if (!interleaved) return at * kWeightTile + i;
    return at / 2 * 2 * kWeightTile + i / 8 * 16 + at % 2 * 8 + i % 8;
  }
  // Of a tile's scale, in numbers.
  [[nodiscard]] CROSSDOCK_HOST_DEVICE constexpr u64 scale_from(u32 expert, u32 block,
                                                               u32 group) const {
    return (u64{expert} * blocks() + block) * groups() + group;
  }
  [[nodiscard]] CROSSDOCK_HOST_DEVICE constexpr u64 scale_to(u32 expert, u32 block,
                                                             u32 group) const {
    return scale_from(expert, block_to(block), group);
  }
  // e2m1: the block that has a prepared row, in bytes.
  [[nodiscard]] CROSSDOCK_HOST_DEVICE constexpr u64 packed_to(u32 expert, u32 row,
                                                              u32 group) const {
    return scale_from(expert, row / kWeightTile, group) * kFp4BlockBytes;
  }
};

struct PrepareWeightsParams {
  LaunchCommon common;
  WeightMatrix matrix;
  u64* flaw;     // the smallest 4 * index of a value + WeightFlaw; all ones: none
  u64* inexact;  // e2m1: groups of 32 that are not exact
};

CROSSDOCK_HOST_DEVICE constexpr u64 weight_flaw(u64 index, WeightFlaw flaw) {
  return index * 4 + static_cast<u64>(flaw);
}
CROSSDOCK_HOST_DEVICE constexpr bool is_finite(float value) {
  return (bit_cast<u32>(value) & minifloat::kF32Magnitude) < minifloat::kF32Infinity;
}
// A code of a plain matrix as a number, without its scale.
CROSSDOCK_HOST_DEVICE constexpr float weight_number(WeightNumber number, u32 code) {
  switch (number) {
    case WeightNumber::kBf16:
      return bit_cast<float>(code << 16);
    case WeightNumber::kE4m3:
      return bit_cast<float>(minifloat::decode(minifloat::kE4m3, code));
    case WeightNumber::kE2m1:
      return bit_cast<float>(minifloat::decode(minifloat::kE2m1, code));
    default:
      return bit_cast<float>(code);
  }
}
CROSSDOCK_HOST_DEVICE constexpr float weight_magnitude(float value) {
  return bit_cast<float>(bit_cast<u32>(value) & minifloat::kF32Magnitude);
}

// ---- e4m3 -------------------------------------------------------------------------------------

CROSSDOCK_HOST_DEVICE constexpr float ue8m0_number(u32 code) {
  return bit_cast<float>(minifloat::decode_ue8m0(code));
}
CROSSDOCK_HOST_DEVICE constexpr float e4m3_weight_scale(float peak, bool ue8m0) {
  const float scale = (peak > kSmallestWeightPeak ? peak : kSmallestWeightPeak) / 448.0f;
  return ue8m0 ? ue8m0_number(minifloat::encode_ue8m0(bit_cast<u32>(scale))) : scale;
}
CROSSDOCK_HOST_DEVICE constexpr u32 e4m3_weight(float value, float inverse) {
  return minifloat::encode(minifloat::kE4m3, bit_cast<u32>(value * inverse));
}
CROSSDOCK_HOST_DEVICE constexpr bool is_power(float scale) {
  return bit_cast<u32>(ue8m0_number(minifloat::encode_ue8m0(bit_cast<u32>(scale)))) ==
         bit_cast<u32>(scale);
}

// ---- e2m1 -------------------------------------------------------------------------------------

// Of 32 values: the smallest power of two with which the largest does not saturate.
CROSSDOCK_HOST_DEVICE constexpr u32 fp4_exponent(float peak) {
  return minifloat::encode_ue8m0(bit_cast<u32>(peak / 6.0f));
}
CROSSDOCK_HOST_DEVICE constexpr u32 fp4_code(float value, u32 exponent) {
  const float inverse = ue8m0_number(254 - exponent);  // of 2^(exponent - 127)
  return minifloat::encode(minifloat::kE2m1, bit_cast<u32>(value * inverse));
}
// The scale of 128 x 128 values, from the largest exponent of groups that are not all 0; none: -1.
CROSSDOCK_HOST_DEVICE constexpr u32 fp4_base(i32 largest) {
  if (largest < 0) return 127;
  return largest > kFp4LargestShift ? static_cast<u32>(largest - kFp4LargestShift) : 0;
}
// Of a group that has such an exponent; one of zeros may have any.
CROSSDOCK_HOST_DEVICE constexpr i32 fp4_shift(u32 exponent, u32 base) {
  const i32 shift = static_cast<i32>(exponent) - static_cast<i32>(base);
  return shift > kFp4LargestShift ? kFp4LargestShift : shift;
}
CROSSDOCK_HOST_DEVICE constexpr i32 fp4_kept_shift(i32 shift) {
  return shift < kFp4SmallestShift ? kFp4SmallestShift : shift;
}
struct Fp4Folded {
  u32 code;
  bool exact;
};
// A code at a shift below the smallest one, as the nearest at that.
CROSSDOCK_HOST_DEVICE constexpr Fp4Folded fp4_fold(u32 code, i32 shift) {
  const u32 magnitude = code & 7u;
  if (shift >= kFp4SmallestShift || magnitude == 0) return {code, true};
  const i32 below = shift - kFp4SmallestShift;
  if (below < -4) return {code & 8u, false};  // less than half of the smallest
  const u32 bits = minifloat::decode(minifloat::kE2m1, magnitude) + (static_cast<u32>(below) << 23);
  const u32 folded = minifloat::encode(minifloat::kE2m1, bits);
  return {folded | (code & 8u), minifloat::decode(minifloat::kE2m1, folded) == bits};
}

}  // namespace crossdock::device
