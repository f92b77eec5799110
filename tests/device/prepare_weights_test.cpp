// prepare_weights in the twin: bit by bit what the CPU makes, for every kind of number and format,
// and the same words about what is wrong.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "support/weights_case.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::Number;
using ::testing::HasSubstr;

GemmRig twin_rig() {
  auto rig = GemmRig::create(symm::Backend::kCpu, 2).value();
  twin::Schedule schedule;
  schedule.seed = 3;
  schedule.weak = schedule.stale = true;
  rig.gemm().core().launcher().set_schedule(schedule);
  return rig;
}

TEST(PrepareWeights, HasTheBitsOfTheCpu) {
  auto rig = twin_rig();
  for (WeightCase c : weight_cases()) {
    c.experts = 1;
    c.hidden = 128;
    c.inter = 256;
    ASSERT_NO_FATAL_FAILURE(compare_preparation(rig, c));
  }
}
TEST(PrepareWeights, OneTileOfEach) {
  auto rig = twin_rig();
  for (const Format format : {Format::kBf16, Format::kE4m3, Format::kE2m1})
    ASSERT_NO_FATAL_FAILURE(
        compare_preparation(rig, {.experts = 1, .hidden = 128, .inter = 128, .format = format}));
}

TEST(PrepareWeights, NamesTheFirstFlaw) {
  auto rig = twin_rig();
  PlainPair f32({.number = Number::kF32, .format = Format::kE2m1});
  const u32 nan = 0x7fc00000u, infinity = 0x7f800000u;
  std::memcpy(&f32.gate_up.codes[((256 + 200) * 256 + 77) * 4], &nan, 4);
  std::memcpy(&f32.gate_up.codes[((256 + 201) * 256 + 1) * 4], &infinity, 4);
  std::memcpy(&f32.down.codes[0], &nan, 4);
  EXPECT_THAT(compare_refusal(rig, f32),
              HasSubstr("the value nan of gate_up at expert 1, row 200, column 77 must be finite"));

  PlainPair bf16({.number = Number::kF32, .format = Format::kBf16});
  const u32 large = 0x7f7fffffu;
  std::memcpy(&bf16.down.codes[4 * 9], &large, 4);
  EXPECT_THAT(compare_refusal(rig, bf16), HasSubstr("as bf16 the value 3.4028235e+38 of down"));

  PlainPair scales({.number = Number::kE4m3, .format = Format::kBf16});
  const float negative = -2.0f;
  std::memcpy(&scales.down.scales[4], &negative, 4);
  EXPECT_THAT(compare_refusal(rig, scales),
              HasSubstr("scale -2 of down at expert 0, row 128, column 0"));

  PlainPair powers({.number = Number::kE4m3});
  powers.c.scales = moe::ScaleType::kUe8m0;
  EXPECT_THAT(compare_refusal(rig, powers), HasSubstr("must be a power of two to be ue8m0"));

  PlainPair fp4({.number = Number::kE2m1, .format = Format::kE2m1});
  fp4.gate_up.scales[3 * 8 + 5] = 255;
  EXPECT_THAT(compare_refusal(rig, fp4),
              HasSubstr("scale nan of gate_up at expert 0, row 3, column 160"));
}

TEST(PrepareWeights, RefusesWhatARankCannotTake) {
  auto rig = twin_rig();
  const PlainPair from({});
  PlainOnRank there(rig, from);
  const auto prepare = [&](u32 rank) {
    return moe::Weights::prepare(rig.gemm(), rank, there.plain, {}, GemmRig::soon());
  };
  EXPECT_THAT(prepare(5).error().message, HasSubstr("rank 5 is not one of the 1 ranks"));
  there.plain.down = static_cast<const u8*>(there.plain.down) + 4;
  EXPECT_THAT(prepare(0).error().message, HasSubstr("must lie on multiples of 16 bytes"));
}

}  // namespace
}  // namespace crossdock::testing
