// Grouped products on a GPU: every layout, tile and epilogue within the bound of fp64, the same
// bits in every run, layout and grid, graphs with new counts, counts that are wrong.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "cuda/graph.hpp"
#include "gpu/gpu_fixture.hpp"
#include "support/gemm_draw.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::GemmTile;
using ::testing::HasSubstr;

constexpr GemmTile kTiles[] = {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16,
                               GemmTile::kFew8};
constexpr Format kFormats[] = {Format::kE4m3, Format::kBf16};

// Blocks of a launch: few, so that each has several tiles, of several experts.
constexpr u32 kBlocks = 20;

class GemmGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    auto made = GemmRig::create(symm::Backend::kGpu, kBlocks);
    ASSERT_TRUE(made.ok()) << made.error().describe();
    rig_.emplace(std::move(made).value());
  }
  std::optional<GemmRig> rig_;
};

// Experts with uneven rows.
GemmCase mixed(Format format, GemmTile tile) {
  GemmCase c{.n = 512, .k = 640, .format = format, .counts = {}, .tile = tile, .samples = 24};
  const u32 most = tile == GemmTile::k128 ? 400 : tile == GemmTile::k64 ? 150 : 40;
  for (u32 e = 0; e < 11; ++e)
    c.counts.push_back(e % 5 == 2 ? 0 : device::mix(e) % most);
  return c;
}

TEST_F(GemmGpu, EveryTileAndLayout) {
  for (const Format format : kFormats)
    for (const GemmTile tile : kTiles)
      for (const GemmLayout layout :
           {GemmLayout::kContiguous, GemmLayout::kMasked, GemmLayout::kGather}) {
        SCOPED_TRACE(::testing::Message() << "format " << int(format) << " tile " << int(tile)
                                          << " layout " << int(layout));
        GemmCase c = mixed(format, tile);
        c.layout = layout;
        ASSERT_NO_FATAL_FAILURE(rig_->round(c));
      }
}
TEST_F(GemmGpu, DrawnFromASeed) {
  for (u32 seed = 1; seed <= 60; ++seed) {
    const GemmDrawn drawn = draw_gemm(seed);
    SCOPED_TRACE(::testing::Message() << drawn);
    rig_->gemm().core().hand_over(drawn.hand_over);
    ASSERT_NO_FATAL_FAILURE(rig_->round(drawn.c));
  }
}
TEST_F(GemmGpu, SwigluInEveryTile) {
  for (const Format format : kFormats)
    for (const GemmTile tile : kTiles)
      for (const bool fast : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "format " << int(format) << " tile " << int(tile) << " fast " << fast);
        GemmCase c = mixed(format, tile);
        c.swiglu = moe::Swiglu{.clamp = 7.0f, .fast = fast};
        c.row_weights = true;
        ASSERT_NO_FATAL_FAILURE(rig_->round(c));
      }
}
TEST_F(GemmGpu, BiasInEveryTile) {
  for (const Format format : kFormats)
    for (const GemmTile tile : kTiles)
      for (const bool swiglu : {false, true})
        for (const moe::Number number : {moe::Number::kF32, moe::Number::kBf16}) {
          SCOPED_TRACE(::testing::Message() << "format " << int(format) << " tile " << int(tile)
                                            << " swiglu " << swiglu << " number " << int(number));
          GemmCase c = mixed(format, tile);
          c.bias = number;
          if (swiglu) c.swiglu = moe::Swiglu{.clamp = 7.0f};
          ASSERT_NO_FATAL_FAILURE(rig_->round(c));
        }
}
TEST_F(GemmGpu, ScalesThatArePowersOfTwo) {
  for (const GemmTile tile : kTiles)
    for (const GemmLayout layout :
         {GemmLayout::kContiguous, GemmLayout::kMasked, GemmLayout::kGather})
      for (const bool swiglu : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << "tile " << int(tile) << " layout " << int(layout) << " swiglu " << swiglu);
        GemmCase c = mixed(Format::kE4m3, tile);
        c.n = 1536;  // the scales of a row's values take two words
        c.layout = layout;
        c.scale_type = moe::ScaleType::kUe8m0;
        if (swiglu) c.swiglu = moe::Swiglu{.clamp = 7.0f};
        ASSERT_NO_FATAL_FAILURE(rig_->round(c));
      }
}

constexpr GemmTile kFp4Tiles[] = {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16,
                                  GemmTile::kFew8};

TEST_F(GemmGpu, Fp4InEveryTileAndLayout) {
  for (const GemmTile tile : kFp4Tiles)
    for (const GemmLayout layout :
         {GemmLayout::kContiguous, GemmLayout::kMasked, GemmLayout::kGather})
      for (const moe::ScaleType type : {moe::ScaleType::kF32, moe::ScaleType::kUe8m0})
        for (const bool swiglu : {false, true}) {
          SCOPED_TRACE(::testing::Message() << "tile " << int(tile) << " layout " << int(layout)
                                            << " scales " << int(type) << " swiglu " << swiglu);
          GemmCase c = mixed(Format::kE2m1, tile);
          c.layout = layout;
          c.scale_type = type;
          if (swiglu) c.swiglu = moe::Swiglu{.clamp = 7.0f};
          c.row_weights = swiglu;
          ASSERT_NO_FATAL_FAILURE(rig_->round(c));
        }
}
// Long K, so that the ring turns many times; odd numbers of columns; and the bits that the same
// weights have as e4m3.
TEST_F(GemmGpu, Fp4HasTheBitsOfE4m3) {
  for (const GemmTile tile : kFp4Tiles)
    for (const bool swiglu : {false, true}) {
      GemmCase c{.n = swiglu ? 512u : 640u,
                 .k = 7168,
                 .format = Format::kE2m1,
                 .counts = {21, 0, 40, 8, 1},
                 .tile = tile,
                 .samples = 24};
      if (swiglu) c.swiglu = moe::Swiglu{};
      auto packed = rig_->load(c);
      auto wide = rig_->load(c);
      wide.weights = rig_->put(expanded(packed.data));
      wide.call.weights.rows = wide.weights.address();
      wide.call.weights.format = Format::kE4m3;
      for (u32 i = 0; i < 5; ++i) {
        ASSERT_NO_FATAL_FAILURE(rig_->run(packed));
        ASSERT_NO_FATAL_FAILURE(rig_->run(wide));
        ASSERT_EQ(rig_->bytes(packed), rig_->bytes(wide)) << "run " << i;
      }
      ASSERT_NO_FATAL_FAILURE(rig_->check(packed));
    }
}
TEST_F(GemmGpu, OddShapes) {
  for (const Format format : kFormats) {
    for (const GemmTile tile : {GemmTile::k128, GemmTile::k64, GemmTile::kFew32}) {
      ASSERT_NO_FATAL_FAILURE(
          rig_->round({.n = 128, .k = 128, .format = format, .counts = {1}, .tile = tile}));
      ASSERT_NO_FATAL_FAILURE(rig_->round({.n = 384,
                                           .k = 256,
                                           .format = format,
                                           .counts = {3, 0, 131, 1},
                                           .alignment = format == Format::kE4m3 ? 4u : 1u,
                                           .tile = tile}));
      ASSERT_NO_FATAL_FAILURE(rig_->round({.format = format, .counts = {0, 0, 0}, .tile = tile}));
    }
  }
}
TEST_F(GemmGpu, OneExpertHasAllRowsOfMany) {
  GemmCase c{.n = 512, .k = 512, .counts = std::vector<u32>(512, 0), .samples = 8};
  c.counts[377] = 3000;
  ASSERT_NO_FATAL_FAILURE(rig_->round(c));
}
TEST_F(GemmGpu, LongK) {
  for (const Format format : kFormats)
    ASSERT_NO_FATAL_FAILURE(
        rig_->round({.n = 512, .k = 7168, .format = format, .counts = {200, 57}, .samples = 32}));
}
// More tiles than blocks, so that outputs lie in places of stages while the next tile is
// multiplied, in another place each time: sums this long hand them over. The twin's test of this
// name has the same shape.
TEST_F(GemmGpu, OutputsOfManyTilesInPlacesOfStages) {
  for (const u32 blocks : {2u, 3u}) {
    auto rig = GemmRig::create(symm::Backend::kGpu, blocks).value();
    for (const bool swiglu : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "blocks " << blocks << " swiglu " << swiglu);
      ASSERT_NO_FATAL_FAILURE(
          rig.round({.n = swiglu ? 512u : 640u,
                     .k = 1536,
                     .counts = {300, 57},
                     .alignment = 4,
                     .swiglu = swiglu ? std::optional(moe::Swiglu{.clamp = 7.0f}) : std::nullopt,
                     .samples = 24}));
    }
  }
}

// The same bits in every run, in every layout, on every grid.
TEST_F(GemmGpu, TheSameBitsEveryTime) {
  for (const Format format : kFormats)
    for (const GemmTile tile : kTiles)
      for (const bool swiglu : {false, true}) {
        GemmCase c = mixed(format, tile);
        if (swiglu) c.swiglu = moe::Swiglu{.clamp = 7.0f};
        auto loaded = rig_->load(c);
        ASSERT_NO_FATAL_FAILURE(rig_->run(loaded));
        const auto first = rig_->bytes(loaded);
        for (u32 i = 0; i < 5; ++i) {
          ASSERT_NO_FATAL_FAILURE(rig_->run(loaded));
          ASSERT_EQ(rig_->bytes(loaded), first) << "run " << i;
        }
        auto all = GemmRig::create(symm::Backend::kGpu).value();
        auto again = all.load(c);
        ASSERT_NO_FATAL_FAILURE(all.run(again));
        ASSERT_EQ(all.bytes(again), first) << "a block on every multiprocessor";
      }
}

TEST_F(GemmGpu, GraphsReadNewCounts) {
  GemmCase c = mixed(Format::kE4m3, GemmTile::k128);
  auto loaded = rig_->load(c);
  ASSERT_TRUE(rig_->gemm().prepare(loaded.call, GemmRig::soon()).ok());
  const cuda::Stream& stream = *rig_->rank().device().stream();
  auto capture = cuda::Capture::begin(stream).value();
  ASSERT_TRUE(rig_->gemm().run(0, loaded.call).ok());
  const auto graph = capture.finish().value();
  for (u32 round = 0; round < 3; ++round) {
    for (u32& count : loaded.c.counts)
      count = count / 2;
    for (u32 e = 0, p = 0; e < loaded.c.experts(); ++e)
      for (p = loaded.data.offsets[e]; p < loaded.data.offsets[e + 1]; ++p)
        if (p >= loaded.data.offsets[e] + loaded.c.counts[e]) loaded.data.source[p] = -1;
    ASSERT_TRUE(
        symm::upload(rig_->rank(), loaded.counts.as<u32>(), loaded.c.counts, GemmRig::soon()).ok());
    rig_->poison(loaded);
    ASSERT_TRUE(graph.launch(stream).ok());
    ASSERT_TRUE(rig_->gemm().synchronize(GemmRig::soon()).ok());
    ASSERT_NO_FATAL_FAILURE(rig_->check(loaded));
  }
}

TEST_F(GemmGpu, CountsBeyondTheBufferAreAFault) {
  GemmCase c{.counts = {5, 130}};
  auto loaded = rig_->load(c);
  ASSERT_NO_FATAL_FAILURE(rig_->run(loaded));
  ASSERT_TRUE(symm::upload(rig_->rank(), loaded.counts.as<u32>(), std::vector<u32>{5, 100000},
                           GemmRig::soon())
                  .ok());
  rig_->poison(loaded);
  ASSERT_TRUE(rig_->gemm().run(0, loaded.call).ok());
  const auto done = rig_->gemm().synchronize(GemmRig::soon());
  ASSERT_EQ(done.code(), Code::kInvalidArgument);
  EXPECT_THAT(done.error().message, HasSubstr("the rows of expert 1 end at 100128"));
  const auto out = rig_->bytes(loaded);
  EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](u8 b) { return b == 0xff; }));
  ASSERT_TRUE(rig_->gemm().reset(GemmRig::soon()).ok());
  ASSERT_TRUE(symm::upload(rig_->rank(), loaded.counts.as<u32>(), c.counts, GemmRig::soon()).ok());
  ASSERT_NO_FATAL_FAILURE(rig_->run(loaded));
  ASSERT_NO_FATAL_FAILURE(rig_->check(loaded));
}

// Weights, input and output of more than 2^31 values, all that counts at their ends: of the last of
// many experts, in the last rows.
TEST_F(GemmGpu, OffsetsBeyondTwoToThe31) {
  constexpr u32 kExperts = 130, kFirst = 540000, kRows = 40;
  for (const Format format : kFormats) {
    const GemmCase c{.n = 4096, .k = 4096, .format = format, .counts = {kRows}, .samples = 16};
    auto l = rig_->load(c);
    const u64 weight_bytes = l.data.weights.codes.size(), row_bytes = u64{c.k} * c.width();
    ASSERT_GT(kExperts * weight_bytes / c.width(), u64{1} << 31);
    ASSERT_GT(u64{kFirst} * std::min(c.k, c.n), u64{1} << 31);
    const auto big = [&](u64 bytes) { return rig_->rank().allocate(bytes).value(); };
    const auto copy = [&](auto* to, const auto& values) {
      ASSERT_TRUE(symm::upload(rig_->rank(), to, values, GemmRig::soon()).ok());
    };
    const auto weights = big(kExperts * weight_bytes);
    copy(weights.as<u8>() + (kExperts - 1) * weight_bytes, l.data.weights.codes);
    const auto weight_scales = big(kExperts * l.data.weight_scales.size() * 4);
    copy(weight_scales.as<float>() + (kExperts - 1) * l.data.weight_scales.size(),
         l.data.weight_scales);
    const auto input = big((kFirst + kRows) * row_bytes);
    copy(input.as<u8>() + kFirst * row_bytes,
         std::vector<u8>(
             l.data.input.codes.begin(),
             l.data.input.codes.begin() + static_cast<std::ptrdiff_t>(kRows * row_bytes)));
    constexpr u64 kColumns = kFirst + kRows;
    const auto scales = big(kColumns * (c.k / 128) * 4);
    for (u64 g = 0; g < c.k / 128; ++g) {
      const auto of = l.data.input_scales.begin() + static_cast<std::ptrdiff_t>(g * l.data.columns);
      copy(scales.as<float>() + g * kColumns + kFirst, std::vector<float>(of, of + kRows));
    }
    std::vector<u32> offsets(kExperts, kFirst);
    offsets.push_back(kFirst + kRows);
    const auto places = rig_->put(offsets);
    const u64 out_bytes = u64{c.n} * 2;
    const auto output = big((kFirst + kRows) * out_bytes);
    moe::GemmCall call = l.call;
    call.weights.rows = weights.address();
    call.weights.experts = kExperts;
    call.input.rows = input.address();
    call.input.count = kFirst + kRows;
    if (c.fp8()) {
      call.weights.scales = weight_scales.as<float>();
      call.input.scales = scales.as<float>();
      call.input.scale_columns = kColumns;
    }
    call.groups = {.offsets = places.as<u32>()};
    call.output.rows = output.address();
    ASSERT_TRUE(rig_->gemm().prepare(call, GemmRig::soon()).ok() && rig_->gemm().run(0, call).ok());
    const auto done = rig_->gemm().synchronize(GemmRig::soon());
    ASSERT_TRUE(done.ok()) << done.error().describe();
    // Where a small product would have put them, which the comparison looks at.
    rig_->poison(l);
    copy(l.output.as<u8>(), symm::download(rig_->rank(), output.as<u8>() + kFirst * out_bytes,
                                           kRows * out_bytes, GemmRig::soon())
                                .value());
    ASSERT_NO_FATAL_FAILURE(rig_->check(l));
    const auto before = symm::download(rig_->rank(), output.as<u8>() + (kFirst - 1) * out_bytes,
                                       out_bytes, GemmRig::soon())
                            .value();
    EXPECT_TRUE(std::all_of(before.begin(), before.end(), [](u8 b) { return b == 0; }));
  }
}

// What a capture cannot hold is refused; the capture and the context are whole afterwards.
TEST_F(GemmGpu, CapturesWantPrepare) {
  auto loaded = rig_->load({.counts = {5}});
  const cuda::Stream& stream = *rig_->rank().device().stream();
  {
    auto capture = cuda::Capture::begin(stream).value();
    const auto run = rig_->gemm().run(0, loaded.call);
    ASSERT_EQ(run.code(), Code::kInvalidArgument);
    EXPECT_THAT(run.error().message, HasSubstr("has not been prepared"));
    const auto prepared = rig_->gemm().prepare(loaded.call, GemmRig::soon());
    ASSERT_EQ(prepared.code(), Code::kInvalidArgument);
    EXPECT_THAT(prepared.error().message,
                HasSubstr("is not possible while its stream is being captured into a CUDA graph"));
    const auto graph = capture.finish();
    ASSERT_TRUE(graph.ok()) << graph.error().describe();
  }
  EXPECT_EQ(rig_->gemm().run(0, loaded.call).code(), Code::kInvalidArgument) << "still unprepared";
  ASSERT_NO_FATAL_FAILURE(rig_->run(loaded));
  ASSERT_NO_FATAL_FAILURE(rig_->check(loaded));

  auto capture = cuda::Capture::begin(stream).value();
  ASSERT_TRUE(rig_->gemm().run(0, loaded.call).ok());
  const auto graph = capture.finish();
  ASSERT_TRUE(graph.ok()) << graph.error().describe();
  for (u32 replay = 0; replay < 2; ++replay) {
    rig_->poison(loaded);
    ASSERT_TRUE(graph->launch(stream).ok());
    const auto done = rig_->gemm().synchronize(GemmRig::soon());
    ASSERT_TRUE(done.ok()) << done.error().describe();
    ASSERT_NO_FATAL_FAILURE(rig_->check(loaded)) << "replay " << replay;
  }
}

}  // namespace
}  // namespace crossdock::testing
