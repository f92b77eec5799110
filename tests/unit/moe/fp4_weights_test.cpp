// Weights in e2m1: what is packed where, which groups are exact and which are counted, and the same
// weights as e4m3. And scales that are powers of two.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <gmock/gmock.h>

#include "support/weights_case.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::Number;
using moe::ScaleType;

float e2m1(u32 code) {
  return device::bit_cast<float>(device::minifloat::decode(device::minifloat::kE2m1, code));
}
float e4m3(u32 code) {
  return device::bit_cast<float>(device::minifloat::decode(device::minifloat::kE4m3, code));
}

// Prepared weights value by value.
struct Prepared {
  const WeightCase& c;
  moe::WeightsView view;

  struct Value {
    u32 code;
    int shift;
    float scale;
    [[nodiscard]] double number() const { return std::ldexp(double{e2m1(code)}, shift) * scale; }
  };
  // Of the down matrix, whose rows stay in order.
  [[nodiscard]] Value down(u32 expert, u32 row, u32 k) const {
    const u64 tile = (u64{expert} * (c.hidden / 128) + row / 128) * (c.inter / 128) + k / 128;
    const u8* block = static_cast<const u8*>(view.down) + tile * device::kFp4BlockBytes;
    const u32 step = k % 128 / 32, in_step = k % 32;
    u32 word;
    std::memcpy(&word, block + device::fp4_word_offset(row % 128, step, in_step % 16 / 4), 4);
    return {device::fp4_from_word(in_step / 16 * 4 + in_step % 4, word),
            block[device::fp4_shift_offset(row % 128, step)] / 8 + device::kFp4SmallestShift,
            static_cast<const float*>(view.down_scales)[tile]};
  }
};

TEST(Fp4Weights, EveryShiftIsExactInE4m3) {
  for (i32 shift = device::kFp4SmallestShift; shift <= device::kFp4LargestShift; ++shift)
    for (u32 code = 0; code < 16; ++code) {
      const double want = std::ldexp(double{e2m1(code)}, shift);
      EXPECT_EQ(double{e4m3(device::e4m3_from_fp4(code, shift))}, want) << code << " 2^" << shift;
      EXPECT_EQ(device::fp4_codes(shift) >> (8 * (code & 7)) & 0x7f,
                device::e4m3_from_fp4(code & 7, shift));
    }
  EXPECT_NE(e4m3(device::e4m3_from_fp4(7, device::kFp4LargestShift + 1)), 6.0f * 128);
}
TEST(Fp4Weights, EveryPlaceOfABlockIsUsedOnce) {
  std::vector<u32> used(device::kFp4BlockBytes, 0);
  for (u32 row = 0; row < 128; ++row)
    for (u32 step = 0; step < 4; ++step) {
      for (u32 quad = 0; quad < 4; ++quad)
        for (u32 i = 0; i < 4; ++i)
          ++used[device::fp4_word_offset(row, step, quad) + i];
      ++used[device::fp4_shift_offset(row, step)];
    }
  EXPECT_THAT(used, ::testing::Each(1u));
}
TEST(Fp4Weights, WordsHoldEightCodes) {
  for (u32 i = 0; i < 8; ++i)
    for (u32 code = 0; code < 16; ++code) {
      const u32 word = device::fp4_in_word(i, code);
      for (u32 j = 0; j < 8; ++j)
        EXPECT_EQ(device::fp4_from_word(j, word), i == j ? code : 0) << i << " " << j;
    }
}

TEST(Fp4Weights, WhatIsE2m1KeepsItsValueWhereExponentsAreNear) {
  const WeightCase c{.inter = 256, .number = Number::kE2m1, .format = Format::kE2m1, .spread = 14};
  const PlainPair from(c);
  const auto weights = moe::Weights::prepare(from.plain(), c.format).value();
  EXPECT_EQ(weights.report().groups, u64{3} * c.experts * c.hidden * c.inter / 32);
  EXPECT_EQ(weights.report().inexact_groups, 0u);
  const Prepared prepared{c, weights.view()};
  for (u32 e = 0; e < c.experts; ++e)
    for (u32 row = 0; row < c.hidden; ++row)
      for (u32 k = 0; k < c.inter; ++k) {
        const u64 at = (u64{e} * c.hidden + row) * c.inter + k;
        const u32 code = from.down.codes[at / 2] >> (at % 2 * 4) & 0xfu;
        const double want = std::ldexp(double{e2m1(code)}, from.down.scales[at / 32] - 127);
        ASSERT_EQ(prepared.down(e, row, k).number(), want) << e << " " << row << " " << k;
      }
}
TEST(Fp4Weights, GroupsFarBelowTheLargestAreRoundedAndCounted) {
  const WeightCase c{
      .experts = 1, .hidden = 128, .number = Number::kE2m1, .format = Format::kE2m1, .spread = 0};
  PlainPair from(c);
  // Group 0: 2^-15 of the others: 1 and 3 are kept, 0.5 and 1.5 are not. Group 1: nothing is left.
  const u8 codes[] = {0x21, 0x53};  // 0.5, 1, 1.5, 3
  for (u32 i = 0; i < 16; ++i) {
    from.down.codes[i] = codes[i % 2];
    from.down.codes[16 + i] = 0x77;
  }
  from.down.scales[0] = 110 - 15;
  from.down.scales[1] = 110 - 40;
  const auto weights = moe::Weights::prepare(from.plain(), c.format).value();
  EXPECT_EQ(weights.report().inexact_groups, 2u);
  const Prepared prepared{c, weights.view()};
  const double unit = std::ldexp(1.0, 110 - 15 - 127);
  const double want[] = {0, 1 * unit, 2 * unit, 3 * unit};  // halves of a step go to even
  for (u32 i = 0; i < 4; ++i)
    EXPECT_EQ(prepared.down(0, 0, i).number(), want[i]) << i;
  EXPECT_EQ(prepared.down(0, 0, 32).number(), 0);
}
// Some groups of the case are 2^-16 of the largest of their tile, beyond what fits beside it.
TEST(Fp4Weights, QuantisedWithinHalfAStepOfTheirGroup) {
  const WeightCase c{.experts = 1, .format = Format::kE2m1};
  const PlainPair from(c);
  const auto weights = moe::Weights::prepare(from.plain(), c.format).value();
  const Prepared prepared{c, weights.view()};
  u64 near = 0, far = 0, coarse = 0;
  for (u32 row = 0; row < c.hidden; ++row)
    for (u32 k = 0; k < c.inter; ++k) {
      const auto plain = [&](u32 at) {
        float value;
        std::memcpy(&value, &from.down.codes[(u64{row} * c.inter + at) * 4], 4);
        return double{value};
      };
      double peak = 0;
      for (u32 i = k / 32 * 32; i < k / 32 * 32 + 32; ++i)
        peak = std::max(peak, std::abs(plain(i)));
      const auto got = prepared.down(0, row, k);
      // The smallest power of two that is not below peak / 6; the group may not saturate.
      const double power = peak == 0 ? 0 : std::exp2(std::ceil(std::log2(peak / 6)));
      const double magnitude = power == 0 ? 0 : std::abs(plain(k)) / power;
      ASSERT_LE(magnitude, 6.0001) << row << " " << k;
      const double half = (magnitude < 2 ? 0.25 : magnitude < 4 ? 0.5 : 1) * power;
      // Below the smallest shift the code is rounded once more, to a multiple of 2^-9 of the scale.
      const bool folded = power != 0 && power < std::ldexp(got.scale, device::kFp4SmallestShift);
      const double again = folded ? std::ldexp(got.scale, -10) : 0;
      const double away = std::abs(got.number() - plain(k));
      ASSERT_LE(away, (half + again) * 1.0001) << row << " " << k;
      near += folded ? 0 : 1;
      far += folded ? 1 : 0;
      coarse += away > half * 1.0001 ? 1 : 0;
    }
  EXPECT_GT(near, far);
  EXPECT_GT(far, 0u);
  EXPECT_GT(coarse, 0u) << "the second rounding makes no difference here: nothing was seen of it";
  EXPECT_GT(weights.report().inexact_groups, 0u);
  EXPECT_LT(weights.report().inexact_groups, weights.report().groups / 4);
}
TEST(Fp4Weights, AsE4m3TheyAreWhatKernelsMakeOfThem) {
  WeightCase c{.number = Number::kE2m1, .format = Format::kE2m1};
  const PlainPair from(c);
  const auto packed = moe::Weights::prepare(from.plain(), Format::kE2m1).value();
  const auto wide = moe::Weights::prepare(from.plain(), Format::kE4m3).value();
  EXPECT_GT(packed.report().inexact_groups, 0u);
  EXPECT_EQ(packed.report().inexact_groups, wide.report().inexact_groups);
  const Prepared prepared{c, packed.view()};
  const auto* codes = static_cast<const u8*>(wide.view().down);
  for (u32 row = 0; row < c.hidden; ++row)
    for (u32 k = 0; k < c.inter; ++k) {
      const auto value = prepared.down(1, row, k);
      ASSERT_EQ(codes[(u64{c.hidden} + row) * c.inter + k],
                device::e4m3_from_fp4(value.code, value.shift));
    }
  const u64 scales = moe::weight_sizes(wide.layout()).value().down_scales;
  EXPECT_EQ(std::memcmp(packed.view().down_scales, wide.view().down_scales, scales * 4), 0);
}
TEST(Fp4Weights, ScalesThatArePowersOfTwo) {
  const WeightCase c{.format = Format::kE4m3, .scales = ScaleType::kUe8m0};
  const PlainPair from(c);
  const auto weights = moe::Weights::prepare(from.plain(), c.format, c.scales).value();
  const auto exact = moe::Weights::prepare(from.plain(), c.format).value();
  EXPECT_EQ(moe::describe(weights.layout()),
            "version 1, e4m3, 2 experts, hidden 256, inter 128, ue8m0 scales");
  const auto sizes = moe::weight_sizes(weights.layout()).value();
  EXPECT_EQ(sizes.scale_bytes, 1u);
  for (u64 i = 0; i < sizes.down_scales; ++i) {
    const float least = static_cast<const float*>(exact.view().down_scales)[i];
    const float scale = device::ue8m0_number(static_cast<const u8*>(weights.view().down_scales)[i]);
    EXPECT_GE(scale, least);
    EXPECT_LT(scale, 2 * least);
  }
}

}  // namespace
}  // namespace crossdock::testing
