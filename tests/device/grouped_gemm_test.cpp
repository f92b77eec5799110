// grouped_gemm in the twin: every layout, tile and epilogue under many schedules, with loads and
// products as late as is legal, against the product in fp64.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>

#include "support/gemm_draw.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::GemmTile;
using moe::ScaleType;

twin::Schedule weak_schedule(u64 seed) {
  twin::Schedule s;
  s.seed = seed;
  s.weak = s.stale = true;
  return s;
}
void rounds(GemmCase c, u32 seeds, u32 sms = 2, std::optional<bool> hand_over = {}) {
  auto rig = GemmRig::create(symm::Backend::kCpu, sms).value();
  rig.gemm().core().hand_over(hand_over);
  for (u32 seed = 1; seed <= seeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    rig.gemm().core().launcher().set_schedule(weak_schedule(seed));
    c.seed = seed;
    ASSERT_NO_FATAL_FAILURE(rig.round(c));
  }
}

TEST(GroupedGemm, Fp8) {
  rounds({}, 16);
  rounds({.k = 256, .counts = {129}, .tile = GemmTile::k64}, 2);
}
TEST(GroupedGemm, Bf16) {
  rounds({.format = Format::kBf16}, 16);
  rounds({.k = 256, .format = Format::kBf16, .counts = {129}, .tile = GemmTile::k64}, 2);
}
// 13 stages of 4: each comes round three times. And one stage a tile.
TEST(GroupedGemm, LongAndShortK) {
  for (const Format format : {Format::kE4m3, Format::kBf16}) {
    rounds({.k = 1664, .format = format, .counts = {3}}, 2, 1);
    rounds({.k = 128, .format = format, .counts = {1, 128, 129, 0, 7, 1}}, 2, 1);
  }
}
// Scales of the weights come 32 stages at a time.
TEST(GroupedGemm, MoreStagesThanAWarpHasLanes) {
  for (const GemmTile tile : {GemmTile::k128, GemmTile::k64, GemmTile::kFew8})
    rounds({.n = 128, .k = 4352, .counts = {3}, .tile = tile}, 1, 1);
}
// With eight stages and more, outputs of e4m3 lie in the place of a tile's last stage until another
// warp has stored them: every stage in turn, whole tiles and such that end within 16 rows. With
// fewer the math warps store them.
TEST(GroupedGemm, OutputsInThePlaceOfAStage) {
  for (const u32 k : {896u, 1024u, 1152u, 1280u, 1408u}) {
    const GemmCase c{.n = 640, .k = k, .counts = {128, 0, 150, 16, 33}, .alignment = 4};
    rounds(c, 3, 2, true);
    GemmCase swiglu = c;
    swiglu.n = 512;
    swiglu.swiglu = moe::Swiglu{.clamp = 7.0f};
    swiglu.row_weights = true;
    rounds(swiglu, 2, 2, true);
    swiglu.scale_type = ScaleType::kUe8m0;
    rounds(swiglu, 1, 1, true);
  }
}
// Several tiles a block by the library's own choice; on GPUs this shape is that of
// GemmGpu.OutputsOfManyTilesInPlacesOfStages.
TEST(GroupedGemm, OutputsOfManyTilesInPlacesOfStages) {
  for (const u32 sms : {2u, 3u})
    for (const bool swiglu : {false, true})
      rounds({.n = swiglu ? 512u : 640u,
              .k = 1536,
              .counts = {300, 57},
              .alignment = 4,
              .swiglu = swiglu ? std::optional(moe::Swiglu{.clamp = 7.0f}) : std::nullopt,
              .samples = 24},
             swiglu ? 1 : 4, sms);
}
// Where rows are gathered or have a bias the math warps store outputs themselves: the same bits.
TEST(GroupedGemm, OutputsHaveTheBitsOfThoseOfGatheredRows) {
  auto rig = GemmRig::create(symm::Backend::kCpu, 2).value();
  rig.gemm().core().hand_over(true);
  for (const bool swiglu : {false, true}) {
    const GemmCase c{.n = 512,
                     .k = 1152,
                     .counts = {128, 0, 150, 33},
                     .swiglu = swiglu ? std::optional(moe::Swiglu{.clamp = 7.0f}) : std::nullopt};
    auto direct = rig.load(c);
    auto gathered = rig.load(c);
    const u32 places = gathered.call.input.count;
    std::vector<std::int32_t> own(places);
    std::iota(own.begin(), own.end(), 0);
    const auto list = rig.put(own);
    gathered.call.groups.rows = list.as<std::int32_t>();
    gathered.call.groups.places = places;
    ASSERT_NO_FATAL_FAILURE(rig.run(direct));
    ASSERT_NO_FATAL_FAILURE(rig.run(gathered));
    EXPECT_EQ(rig.bytes(direct), rig.bytes(gathered));
  }
}
// Long sums have a kernel of their own, which takes short ones as well, and the other way round.
TEST(GroupedGemm, KernelsOfOtherSumsDo) {
  auto rig = GemmRig::create(symm::Backend::kCpu, 2).value();
  auto short_sum = rig.load({.n = 256, .k = 1024, .counts = {130}});
  auto long_sum = short_sum.call;
  long_sum.weights.k = 8192;
  ASSERT_TRUE(rig.gemm().prepare(long_sum, GemmRig::soon()).ok());
  rig.poison(short_sum);
  ASSERT_TRUE(rig.gemm().run(0, short_sum.call).ok());
  ASSERT_TRUE(rig.gemm().synchronize(GemmRig::soon()).ok());
  rig.check(short_sum);
}
TEST(GroupedGemm, ColumnsThatAreNotAWholeTile) {
  rounds({.n = 384, .k = 256, .counts = {17, 3}}, 2);
  rounds({.n = 128, .k = 256, .format = Format::kBf16, .counts = {17, 3}}, 2);
  rounds({.n = 384, .k = 256, .counts = {17, 3}, .tile = GemmTile::kFew32}, 2);
}
TEST(GroupedGemm, SmallAlignmentOfSegments) {
  rounds({.counts = {3, 0, 131, 1}, .alignment = 4}, 2);
  rounds({.format = Format::kBf16, .counts = {3, 0, 131, 1}, .alignment = 1}, 2);
  rounds({.counts = {3, 0, 131, 1}, .alignment = 1, .layout = GemmLayout::kGather}, 2);
}
TEST(GroupedGemm, ScalesThatBeginBetweenSixteenBytesAreAFault) {
  auto rig = GemmRig::create(symm::Backend::kCpu, 2).value();
  auto loaded = rig.load({.counts = {3, 0, 131, 1}, .alignment = 1});
  ASSERT_TRUE(rig.gemm().prepare(loaded.call, GemmRig::soon()).ok());
  ASSERT_TRUE(rig.gemm().run(0, loaded.call).ok());
  const auto done = rig.gemm().synchronize(GemmRig::soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message,
              ::testing::HasSubstr("the rows of expert 2 begin at 3; with e4m3"));
}
TEST(GroupedGemm, Masked) {
  rounds({.counts = {3, 0, 131, 1}, .layout = GemmLayout::kMasked}, 2);
}
TEST(GroupedGemm, Gather) {
  rounds({.k = 1280, .counts = {40, 0, 131}, .layout = GemmLayout::kGather}, 16);
  rounds({.format = Format::kBf16, .counts = {70, 3}, .layout = GemmLayout::kGather}, 2);
  rounds({.counts = {9, 3}, .layout = GemmLayout::kGather, .tile = GemmTile::kFew8}, 2);
}
TEST(GroupedGemm, FewRows) {
  for (const Format format : {Format::kE4m3, Format::kBf16})
    for (const GemmTile tile : {GemmTile::kFew8, GemmTile::kFew16, GemmTile::kFew32})
      rounds({.k = 768, .format = format, .counts = {1, 0, 33, 8}, .tile = tile}, 4);
}
TEST(GroupedGemm, SwigluInEveryTile) {
  for (const Format format : {Format::kE4m3, Format::kBf16})
    for (const GemmTile tile :
         {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16, GemmTile::kFew8})
      rounds({.n = 512,
              .k = 256,
              .format = format,
              .counts = {70, 0, 3},
              .tile = tile,
              .swiglu = moe::Swiglu{.clamp = 7.0f, .fast = tile == GemmTile::kFew16},
              .row_weights = tile != GemmTile::kFew8},
             2);
}
TEST(GroupedGemm, ScalesThatArePowersOfTwo) {
  for (const GemmTile tile :
       {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16, GemmTile::kFew8})
    for (const GemmLayout layout :
         {GemmLayout::kContiguous, GemmLayout::kMasked, GemmLayout::kGather})
      rounds({.n = 384,
              .k = 640,
              .counts = {17, 0, 3},
              .alignment = 4,
              .layout = layout,
              .tile = tile,
              .scale_type = ScaleType::kUe8m0},
             1);
  // More stages than lanes.
  rounds({.k = 4352, .counts = {3}, .tile = GemmTile::kFew8, .scale_type = ScaleType::kUe8m0}, 1);
}
TEST(GroupedGemm, PowersOfTwoAfterSwiglu) {
  for (const GemmTile tile :
       {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16, GemmTile::kFew8})
    rounds({.n = 1536,
            .k = 128,
            .counts = {18, 0, 3},
            .tile = tile,
            .swiglu = moe::Swiglu{.clamp = 7.0f},
            .row_weights = true,
            .scale_type = ScaleType::kUe8m0},
           1);
}
constexpr GemmTile kTiles[] = {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16,
                               GemmTile::kFew8};

TEST(GroupedGemm, Fp4) {
  for (const GemmTile tile : kTiles)
    for (const ScaleType type : {ScaleType::kF32, ScaleType::kUe8m0})
      rounds({.n = 384,
              .k = 640,
              .format = Format::kE2m1,
              .counts = {35, 0, 3},
              .tile = tile,
              .scale_type = type},
             2);
  for (const GemmTile tile : {GemmTile::k128, GemmTile::k64})
    rounds({.n = 512,
            .k = 256,
            .format = Format::kE2m1,
            .counts = {140, 3},
            .tile = tile,
            .swiglu = moe::Swiglu{}},
           2);
  // Every stage comes round three times; and one stage a tile.
  rounds({.k = 4608, .format = Format::kE2m1, .counts = {3}, .tile = GemmTile::kFew8}, 2, 1);
  rounds({.k = 128, .format = Format::kE2m1, .counts = {1, 9, 0, 70}, .tile = GemmTile::kFew16}, 4,
         1);
}
// Tiles of 32 rows spare the integer units and ask for scales early: even and odd numbers of
// stages, fewer than the ring has and more.
TEST(GroupedGemm, Fp4OfThirtyTwoRows) {
  for (const u32 k : {128u, 640u, 768u, 1408u})
    rounds(
        {.n = 384, .k = k, .format = Format::kE2m1, .counts = {35, 0, 3}, .tile = GemmTile::kFew32},
        3);
}
// Packed weights run ahead of the input, over the ends of tiles: 3 stages of each, 1 to 13 a tile.
TEST(GroupedGemm, Fp4UnpackedForManyRows) {
  for (const GemmTile tile : {GemmTile::k128, GemmTile::k64}) {
    rounds({.k = 1664, .format = Format::kE2m1, .counts = {3}, .tile = tile}, 3, 1);
    rounds({.k = 128, .format = Format::kE2m1, .counts = {1, 129, 0, 7, 1}, .tile = tile}, 6, 1);
    rounds({.k = 768,
            .format = Format::kE2m1,
            .counts = {40, 0, 131},
            .layout = GemmLayout::kGather,
            .tile = tile},
           4);
  }
}
TEST(GroupedGemm, Fp4InEveryLayoutAndEpilogue) {
  for (const GemmLayout layout :
       {GemmLayout::kContiguous, GemmLayout::kMasked, GemmLayout::kGather})
    for (const bool swiglu : {false, true})
      rounds({.n = 512,
              .k = 256,
              .format = Format::kE2m1,
              .counts = {19, 0, 3},
              .layout = layout,
              .tile = swiglu ? GemmTile::kFew16 : GemmTile::k64,
              .swiglu = swiglu ? std::optional(moe::Swiglu{.clamp = 7.0f}) : std::nullopt,
              .row_weights = swiglu,
              .bias = moe::Number::kF32,
              .scale_type = swiglu ? ScaleType::kUe8m0 : ScaleType::kF32},
             2);
}
// The same weights as e4m3 give the same bits.
TEST(GroupedGemm, Fp4HasTheBitsOfE4m3) {
  auto rig = GemmRig::create(symm::Backend::kCpu, 2).value();
  for (const GemmTile tile : kTiles) {
    const GemmCase c{.n = 512, .k = 384, .format = Format::kE2m1, .counts = {21, 4}, .tile = tile};
    auto packed = rig.load(c);
    auto wide = rig.load(c);
    const auto codes = expanded(packed.data);
    wide.weights = rig.put(codes);
    wide.call.weights.rows = wide.weights.address();
    wide.call.weights.format = Format::kE4m3;
    ASSERT_NO_FATAL_FAILURE(rig.run(packed));
    ASSERT_NO_FATAL_FAILURE(rig.run(wide));
    EXPECT_EQ(rig.bytes(packed), rig.bytes(wide));
  }
}
TEST(GroupedGemm, BiasInEveryTile) {
  for (const Format format : {Format::kE4m3, Format::kBf16})
    for (const GemmTile tile :
         {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16, GemmTile::kFew8})
      for (const bool swiglu : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "format " << int(format) << " tile " << int(tile) << " swiglu " << swiglu);
        rounds({.n = swiglu ? 256u : 384u,
                .k = 256,
                .format = format,
                .counts = {70, 0, 3},
                .tile = tile,
                .swiglu = swiglu ? std::optional(moe::Swiglu{.clamp = 7.0f}) : std::nullopt,
                .bias = swiglu ? moe::Number::kBf16 : moe::Number::kF32},
               1);
      }
  rounds({.n = 256, .k = 256, .counts = {9}, .bias = moe::Number::kBf16}, 1);
}
// Whatever may be asked for together.
TEST(GroupedGemm, DrawnFromASeed) {
  auto rig = GemmRig::create(symm::Backend::kCpu, 2).value();
  for (u32 seed = 1; seed <= 100; ++seed) {
    const GemmDrawn drawn = draw_gemm(seed);
    SCOPED_TRACE(::testing::Message() << drawn);
    rig.gemm().core().hand_over(drawn.hand_over);
    rig.gemm().core().launcher().set_schedule(weak_schedule(seed));
    ASSERT_NO_FATAL_FAILURE(rig.round(drawn.c));
  }
}
// Of this sum an H200 made 2.015625, which is not what exact sums are rounded to, and further from
// them than their magnitudes allow: some of its products are large, and small ones are cut off.
TEST(GroupedGemm, ReferenceKnowsWhatATensorCoreCutsOff) {
  const GemmCase c = draw_gemm(5).c;
  const GemmData data(c);
  const float told = 2.015625f;
  const GemmExact exact = gemm_exact(c, data, 281, 128);
  const GemmExact aligned = gemm_exact(c, data, 281, 128, Sums::kAligned);
  EXPECT_GT(std::abs(told - exact.value), gemm_bound(c, exact));
  EXPECT_LE(std::abs(told - aligned.value), std::ldexp(1.0, -7));  // half a step of bf16
}
TEST(GroupedGemm, NoRowsAtAll) {
  rounds({.counts = {0, 0}}, 1);
}

}  // namespace
}  // namespace crossdock::testing
