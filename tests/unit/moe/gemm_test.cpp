// Grouped products through their API: arguments that are wrong, kernels that were not prepared,
// counts that do not fit as faults, the choice of tiles, the list of kernel variants.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "jit/kernel_list.hpp"
#include "moe/variants.hpp"
#include "support/gemm_case.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::GemmTile;
using ::testing::HasSubstr;

GemmRig twin_rig() {
  return GemmRig::create(symm::Backend::kCpu).value();
}

TEST(MoeGemm, TilesByRowsOfAnExpert) {
  EXPECT_EQ(moe::choose_tile(0), GemmTile::k128);
  EXPECT_EQ(moe::choose_tile(1000), GemmTile::k128);
  EXPECT_EQ(moe::choose_tile(64), GemmTile::k64);
  EXPECT_EQ(moe::choose_tile(32), GemmTile::kFew32);
  EXPECT_EQ(moe::choose_tile(16), GemmTile::kFew16);
  EXPECT_EQ(moe::choose_tile(1), GemmTile::kFew8);
}

TEST(MoeGemm, WrongArgumentsSayTheRuleTheValueAndTheFix) {
  GemmRig rig = twin_rig();
  auto loaded = rig.load({.n = 256, .k = 256, .counts = {3, 4}});
  ASSERT_TRUE(rig.gemm().prepare(loaded.call, GemmRig::soon()).ok());
  const auto refuse = [&](const auto& change, const char* text) {
    moe::GemmCall call = loaded.call;
    change(call);
    const auto got = rig.gemm().run(0, call);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse([](auto& c) { c.weights.n = 200; },
         "n = 200 must be a positive multiple of 128: pad to 256");
  refuse([](auto& c) { c.weights.k = 2880; },
         "k = 2880 must be a positive multiple of 128: pad to 2944");
  refuse([](auto& c) { c.weights.k = 0; }, "k = 0 must be a positive multiple of 128");
  refuse([](auto& c) { c.weights.n = 384, c.swiglu = moe::Swiglu{}; },
         "multiple of 256: pad to 512");
  refuse([](auto& c) { c.weights.experts = 0; }, "experts = 0 must be 1 to 512");
  refuse([](auto& c) { c.weights.experts = 512, c.weights.n = 8388608; }, "at most 2147483647");
  refuse([](auto& c) { c.weights.rows = nullptr; }, "weights at 0x0 must lie");
  refuse([](auto& c) { c.weights.scales = nullptr; }, "e4m3 weights need scales");
  refuse([](auto& c) { c.weights.format = Format::kBf16; }, "bf16 weights have no scales");
  refuse([](auto& c) { c.input.rows = static_cast<const u8*>(c.input.rows) + 8; },
         "must lie on multiples of 16");
  refuse([](auto& c) { c.input.row_stride = 128; }, "one row of 256 bytes apart or more");
  refuse([](auto& c) { c.input.row_stride = 264; }, "multiples of 16");
  refuse([](auto& c) { c.input.scales = nullptr; }, "input scales at 0x0 must be [k / 128 = 2]");
  refuse([](auto& c) { c.input.scale_columns = c.input.count - 4; }, "with at least 256 columns");
  refuse([](auto& c) { c.input.scale_columns = c.input.count + 1; }, "a multiple of 4");
  refuse([](auto& c) { c.input.count = 0x80000000u; }, "at most 2147483647 in one call");
  refuse([](auto& c) { c.groups.places = 7; }, "places = 7 belong to a list");
  refuse([](auto& c) { c.groups.offsets = nullptr, c.groups.counts = nullptr; },
         "need offsets [experts + 1] (contiguous) or counts");
  refuse([](auto& c) { c.groups.offsets = nullptr, c.groups.expert_rows = 200; },
         "are 400 places, more than the 256 there are");
  refuse([](auto& c) { c.groups.offsets = nullptr, c.groups.expert_rows = 6; },
         "expert_rows = 6 must be a multiple of 4 with e4m3");
  refuse([](auto& c) { c.output.rows = nullptr; }, "output rows at 0x0");
  refuse([](auto& c) { c.output.row_stride = 496; }, "one row of 512 bytes apart or more");
  refuse([](auto& c) { c.output.format = Format::kE4m3; }, "without SwiGLU give bf16");
  refuse([](auto& c) { c.swiglu = moe::Swiglu{}; }, "with SwiGLU give e4m3");
  refuse([](auto& c) { c.swiglu = moe::Swiglu{.clamp = -1.0f}; }, "clamp = -1 must be 0 or more");
  refuse([](auto& c) { c.bias = moe::Bias{}; }, "the bias at 0x0 must be [experts][n]");
  refuse([](auto& c) { c.bias = moe::Bias{.values = static_cast<const u8*>(c.weights.rows) + 8}; },
         "must be [experts][n] on a multiple of 16");
  refuse(
      [](auto& c) { c.bias = moe::Bias{.values = c.weights.rows, .number = moe::Number::kE4m3}; },
      "a bias of the number type 2 must be f32 (0) or bf16 (1)");
  refuse(
      [](auto& c) {
        c.swiglu = moe::Swiglu{};
        c.output.format = Format::kE4m3;
      },
      "output scales at 0x0 must be [1]");
  const auto elsewhere = rig.gemm().run(3, loaded.call);
  ASSERT_EQ(elsewhere.code(), Code::kInvalidArgument);
  EXPECT_THAT(elsewhere.error().message, HasSubstr("rank 3 is not one of the 1 ranks"));
}

TEST(MoeGemm, WrongScalesAndFormatsSayTheRule) {
  GemmRig rig = twin_rig();
  const auto refuse = [&](const GemmCase& c, const auto& change, const char* text) {
    auto loaded = rig.load(c);
    ASSERT_TRUE(rig.gemm().prepare(loaded.call, GemmRig::soon()).ok());
    change(loaded.call);
    const auto got = rig.gemm().run(0, loaded.call);
    ASSERT_FALSE(got.ok()) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  const GemmCase powers{.k = 640, .counts = {3, 4}, .scale_type = moe::ScaleType::kUe8m0};
  refuse(
      powers, [](auto& c) { c.input.scales = nullptr; },
      "input scales at 0x0 must be [k / 512 = 2][scale_columns = 260] of 4 ue8m0 bytes");
  refuse(
      powers, [](auto& c) { c.input.scales = static_cast<const u8*>(c.input.scales) + 4; },
      "of 4 ue8m0 bytes on a multiple of 16 bytes");
  refuse(powers, [](auto& c) { c.input.scale_columns = 130; }, "a multiple of 4");
  refuse(
      powers, [](auto& c) { c.weights.scales = nullptr; },
      "e4m3 weights need scales, [experts][n / 128][k / 128] of ue8m0 bytes");
  refuse(
      powers, [](auto& c) { c.scale_type = static_cast<moe::ScaleType>(7); },
      "scales of the unknown type 7");
  refuse(
      {.format = Format::kBf16, .counts = {3}},
      [](auto& c) { c.scale_type = moe::ScaleType::kUe8m0; },
      "scale_type = ue8m0 with bf16 weights, which have no scales");
  refuse(
      {.counts = {3}},
      [](auto& c) { c.weights.scales = static_cast<const u8*>(c.weights.scales) + 1; },
      "of fp32, but they are at");
  const GemmCase fp4{.format = Format::kE2m1, .counts = {3}, .tile = GemmTile::kFew16};
  refuse(fp4, [](auto& c) { c.weights.scales = nullptr; }, "e2m1 weights need scales");
  refuse(fp4, [](auto& c) { c.weights.k = 200; }, "k = 200 must be a positive multiple of 128");
  refuse(
      fp4, [](auto& c) { c.weights.rows = static_cast<const u8*>(c.weights.rows) + 8; },
      "must lie on a multiple of 16");
  refuse(fp4, [](auto& c) { c.output.format = Format::kE2m1; }, "the output is e2m1");
}

TEST(MoeGemm, KernelsAreNotCompiledByACall) {
  GemmRig rig = twin_rig();
  auto loaded = rig.load({.counts = {3}, .tile = GemmTile::kFew16});
  const auto refused = rig.gemm().run(0, loaded.call);
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message,
              HasSubstr("tiles of 16 rows of e4m3 has not been prepared: call prepare()"));
}

TEST(MoeGemm, CountsBeyondTheBufferAreAFault) {
  GemmRig rig = twin_rig();
  const GemmCase c{.k = 128, .counts = {5, 130}};
  auto loaded = rig.load(c);
  ASSERT_TRUE(rig.gemm().prepare(loaded.call, GemmRig::soon()).ok());
  loaded.counts.as<u32>()[1] = 0xfffffff0u;  // no overflow either
  ASSERT_TRUE(rig.gemm().run(0, loaded.call).ok());
  const auto done = rig.gemm().synchronize(GemmRig::soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message,
              HasSubstr("the rows of expert 1 end at 4294967408, but there is room up to 384"));
  ASSERT_TRUE(rig.gemm().reset(GemmRig::soon()).ok());
  loaded.counts.as<u32>()[1] = 130;
  ASSERT_NO_FATAL_FAILURE(rig.run(loaded));
  ASSERT_NO_FATAL_FAILURE(rig.check(loaded));
}

// No row can be read, but counts are looked at, and a list may name none.
TEST(MoeGemm, AnEmptyInputIsLookedAt) {
  GemmRig rig = twin_rig();
  for (const Format format : {Format::kE4m3, Format::kBf16, Format::kE2m1})
    for (const GemmTile tile : {GemmTile::k128, GemmTile::k64, GemmTile::kFew8})
      for (const bool bias : {false, true}) {
        SCOPED_TRACE(::testing::Message() << "format " << int(format) << " tile " << int(tile));
        GemmCase c{.k = 1536, .format = format, .counts = {5, 3}, .alignment = 8, .tile = tile};
        c.layout = GemmLayout::kGather;
        if (bias) c.bias = moe::Number::kF32;
        auto listed = rig.load(c);
        listed.call.input = {};
        for (u32 place = 0; place < listed.data.places; ++place) {
          listed.list.as<int>()[place] = -1;
          if (listed.data.source[place] >= 0) listed.data.source[place] = kNamesNone;
        }
        ASSERT_NO_FATAL_FAILURE(rig.run(listed));
        ASSERT_NO_FATAL_FAILURE(rig.check(listed));

        c.layout = GemmLayout::kContiguous;
        auto packed = rig.load(c);
        packed.call.input = {};
        packed.call.output.rows = nullptr;
        std::fill_n(packed.counts.as<u32>(), 2, 0u);
        ASSERT_NO_FATAL_FAILURE(rig.run(packed));
        packed.counts.as<u32>()[1] = 100;
        ASSERT_TRUE(rig.gemm().run(0, packed.call).ok());
        const auto done = rig.gemm().synchronize(GemmRig::soon());
        ASSERT_EQ(done.code(), Code::kInvalidArgument);
        EXPECT_THAT(done.error().message, HasSubstr("the rows of expert 1 end at 108"));
        ASSERT_TRUE(rig.gemm().reset(GemmRig::soon()).ok());
      }
}

TEST(MoeGemm, ListsThatNameNoRowAreAFault) {
  GemmRig rig = twin_rig();
  const GemmCase c{.k = 128, .counts = {5, 3}, .alignment = 8, .layout = GemmLayout::kGather};
  auto loaded = rig.load(c);
  ASSERT_TRUE(rig.gemm().prepare(loaded.call, GemmRig::soon()).ok());
  loaded.list.as<int>()[9] = 1000;
  ASSERT_TRUE(rig.gemm().run(0, loaded.call).ok());
  const auto done = rig.gemm().synchronize(GemmRig::soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message, HasSubstr("place 9 of the list names row 1000"));
}

TEST(MoeGemm, InfiniteAndZeroScalesStayInTheirRow) {
  GemmRig rig = twin_rig();
  const GemmCase c{.k = 256, .counts = {6}};
  auto loaded = rig.load(c);
  const u32 columns = loaded.data.columns;
  loaded.input_scales.as<float>()[2] = std::numeric_limits<float>::infinity();
  loaded.input_scales.as<float>()[3] = std::nanf("");
  for (u32 g = 0; g < 2; ++g)
    loaded.input_scales.as<float>()[g * columns + 4] = 0;
  ASSERT_NO_FATAL_FAILURE(rig.run(loaded));
  const auto* out = loaded.output.as<u16>();
  for (u32 column = 0; column < c.n; ++column) {
    EXPECT_FALSE(std::isfinite(device::bit_cast<float>(u32{out[2 * c.n + column]} << 16)));
    EXPECT_TRUE(std::isnan(device::bit_cast<float>(u32{out[3 * c.n + column]} << 16)));
    EXPECT_EQ(out[4 * c.n + column] & 0x7fff, 0);
  }
  loaded.data.source[2] = loaded.data.source[3] = loaded.data.source[4] = -1;
  for (u32 row : {2u, 3u, 4u})  // checked above
    std::memset(loaded.output.as<u8>() + u64{row} * c.n * 2, 0xff, c.n * 2);
  ASSERT_NO_FATAL_FAILURE(rig.check(loaded));
}

TEST(MoeGemm, NanAndTheSmallestPowerStayInTheirRow) {
  GemmRig rig = twin_rig();
  for (const Format format : {Format::kE4m3, Format::kE2m1})
    for (const GemmTile tile : {GemmTile::k128, GemmTile::kFew8}) {
      const GemmCase c{.k = 256,
                       .format = format,
                       .counts = {6},
                       .tile = tile,
                       .scale_type = moe::ScaleType::kUe8m0};
      auto loaded = rig.load(c);
      auto* scales = loaded.input_scales.as<u8>();
      scales[2 * 4] = 255;
      scales[3 * 4] = scales[3 * 4 + 1] = 0;
      ASSERT_NO_FATAL_FAILURE(rig.run(loaded));
      const auto* out = loaded.output.as<u16>();
      for (u32 column = 0; column < c.n; ++column) {
        EXPECT_FALSE(std::isfinite(device::bit_cast<float>(u32{out[2 * c.n + column]} << 16)));
        EXPECT_LT(std::abs(device::bit_cast<float>(u32{out[3 * c.n + column]} << 16)), 1e-30f);
      }
      loaded.data.source[2] = loaded.data.source[3] = -1;
      std::memset(loaded.output.as<u8>() + u64{2} * c.n * 2, 0xff, u64{2} * c.n * 2);
      ASSERT_NO_FATAL_FAILURE(rig.check(loaded));
    }
}

// Where rows are gathered, or have a bias, no other warp stores outputs: the kernel without one.
TEST(MoeGemm, LongSumsHandOverWhereTheyCan) {
  const i32 list = 0;
  const float bias = 0;
  moe::GemmCall call{.weights = {.format = Format::kE4m3, .experts = 1, .n = 512, .k = 1536}};
  const auto hands_over = [](const moe::GemmCall& c) {
    return moe::choose_gemm(c).value().hand_over;
  };
  for (const bool swiglu : {false, true}) {
    if (swiglu) call.swiglu = moe::Swiglu{};
    EXPECT_TRUE(hands_over(call));
    moe::GemmCall other = call;
    other.groups.rows = &list;
    EXPECT_FALSE(hands_over(other)) << "gathered";
    other = call;
    other.bias = moe::Bias{&bias};
    EXPECT_FALSE(hands_over(other)) << "a bias";
    other = call;
    other.weights.k = 1408;
    EXPECT_FALSE(hands_over(other)) << "a short sum";
    other = call;
    other.tile = GemmTile::k64;
    EXPECT_FALSE(hands_over(other)) << "tiles of 64 rows";
  }
}

// One call of prepare() for all, as those make it that do not know the weights yet.
TEST(MoeGemm, SumsOfAnyLengthArePreparedAtOnce) {
  GemmRig rig = twin_rig();
  for (const bool swiglu : {false, true}) {
    moe::GemmCall call{.weights = {.format = Format::kE4m3, .experts = 1, .n = 512}};
    if (swiglu) call.swiglu = moe::Swiglu{};
    ASSERT_TRUE(rig.gemm().prepare(call, GemmRig::soon()).ok());
    for (const u32 k : {128u, 1536u, 7168u}) {
      call.weights.k = k;
      EXPECT_TRUE(rig.gemm().core().prepared_best(call)) << k;
    }
    call.tile = GemmTile::k64;
    EXPECT_FALSE(rig.gemm().core().prepared_best(call));
  }
}

TEST(MoeGemm, EveryVariantIsInTheKernelList) {
  const auto known = jit::known_kernels().value();
  for (const auto& config : moe::gemm_variants()) {
    auto spec = moe::gemm_kernel(config).value().spec;
    spec.sm = 90;
    EXPECT_NE(std::find(known.begin(), known.end(), spec), known.end()) << spec.title();
  }
}

}  // namespace
}  // namespace crossdock::testing
