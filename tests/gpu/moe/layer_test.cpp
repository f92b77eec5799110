// Expert layers on as many GPUs as there are: results against the reference in both formats and
// with every tile, odd routings, graphs replayed with the same and with new tokens, many forwards
// without the host, no memory per call, faults.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "cuda/graph.hpp"
#include "gpu/gpu_fixture.hpp"
#include "support/moe_layer_rig.hpp"
#include "support/stays_level.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::GemmTile;
using ::testing::HasSubstr;

constexpr Format kFormats[] = {Format::kE4m3, Format::kBf16};

// A tensor core drops the last bits of products of e4m3. That turns the rounding of some gates and
// ups, by 2^-8; where it is the largest of 128 values, their scale moves by as much, and with it
// most outputs of that row by a step. So few are equal to the bit, but the error is small.
MoeLayerRig::Bounds bounds_of(Format format) {
  if (format == Format::kE4m3) return {.share_equal = 0, .error = 1e-2, .magnitude = 1.0 / 256};
  return {.share_equal = 0.5, .error = 3e-3, .magnitude = 1.0 / 256};
}

class MoeLayerGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    world_ = static_cast<u32>(num_ranks());
  }
  // A shape in proportion to those of models, with few enough values for a reference on the host.
  [[nodiscard]] MoeCase moderate(u32 tokens, Format format) const {
    return {.world = world_,
            .experts = 16,
            .top_k = 4,
            .max_tokens = tokens,
            .hidden = 1024,
            .inter = 512,
            .format = format,
            .samples = 12};
  }
  static MoeLayerRig rig(const MoeCase& c) {
    auto made = MoeLayerRig::create(c, symm::Backend::kGpu);
    if (!made.ok()) ADD_FAILURE() << made.error().describe();
    return std::move(made).value();
  }
  static void round(const MoeCase& c) {
    MoeLayerRig made = rig(c);
    ASSERT_NO_FATAL_FAILURE(made.round(MoeData(c), bounds_of(c.format)));
  }
  u32 world_ = 1;
};

TEST_F(MoeLayerGpu, ManyTokens) {
  for (const Format format : kFormats) {
    SCOPED_TRACE(::testing::Message() << "format " << int(format));
    MoeCase c = moderate(700, format);
    c.residual = true;
    ASSERT_NO_FATAL_FAILURE(round(c));
  }
}
// Gathered by the product, copied apart before it, or by the dispatch itself: the same bits.
TEST_F(MoeLayerGpu, EitherOrderOfTheRows) {
  for (const Format format : kFormats) {
    MoeCase c = moderate(700, format);
    const MoeData data(c);
    std::vector<u16> gathered;
    for (const u32 way : {0u, 1u, 2u}) {
      c.row_order = way == 0 ? moe::RowOrder::kGather : moe::RowOrder::kCopy;
      c.expand_sms = way == 2 ? 16 : 0;
      MoeLayerRig made = rig(c);
      ASSERT_NO_FATAL_FAILURE(made.load(data));
      ASSERT_NO_FATAL_FAILURE(made.run());
      ASSERT_NO_FATAL_FAILURE(made.check(data, bounds_of(format)));
      if (gathered.empty()) gathered = made.outputs();
      ASSERT_EQ(made.outputs(), gathered) << "format " << int(format);
    }
  }
}
TEST_F(MoeLayerGpu, EveryTile) {
  for (const Format format : kFormats)
    for (const GemmTile tile :
         {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16, GemmTile::kFew8}) {
      SCOPED_TRACE(::testing::Message() << "format " << int(format) << " tile " << int(tile));
      MoeCase c = moderate(90, format);
      c.tile = tile;
      ASSERT_NO_FATAL_FAILURE(round(c));
    }
}
TEST_F(MoeLayerGpu, SharedExperts) {
  for (const Format format : kFormats)
    for (const u32 tokens : {3u, 300u}) {
      MoeCase c = moderate(tokens, format);
      c.shared_inter = 768;
      c.shared_weights = tokens == 3;
      c.residual = true;
      ASSERT_NO_FATAL_FAILURE(round(c));
      c.quantised_input = format == Format::kE4m3;
      c.shared_inter = 128;
      ASSERT_NO_FATAL_FAILURE(round(c));
    }
}
TEST_F(MoeLayerGpu, ExpertBias) {
  for (const Format format : kFormats)
    for (const u32 tokens : {3u, 300u}) {
      MoeCase c = moderate(tokens, format);
      c.bias = true;
      ASSERT_NO_FATAL_FAILURE(round(c));
    }
}
TEST_F(MoeLayerGpu, FewTokensAndNone) {
  for (const Format format : kFormats)
    for (const std::vector<u32>& tokens :
         {std::vector<u32>{1}, std::vector<u32>{0, 3}, std::vector<u32>{0}}) {
      MoeCase c = moderate(4, format);
      c.tokens = tokens;
      ASSERT_NO_FATAL_FAILURE(round(c));
    }
}
TEST_F(MoeLayerGpu, OddRoutings) {
  for (const EpRoutingKind kind :
       {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed}) {
    MoeCase c = moderate(200, Format::kE4m3);
    c.routing = kind;
    c.wide_ids = true;
    c.experts = 17;
    ASSERT_NO_FATAL_FAILURE(round(c));
  }
}
TEST_F(MoeLayerGpu, RowsThatAreQuantisedAlready) {
  MoeCase c = moderate(150, Format::kE4m3);
  c.quantised_input = true;
  ASSERT_NO_FATAL_FAILURE(round(c));
}

// ---- graphs ------------------------------------------------------------------------------------

std::vector<cuda::Graph> capture(MoeLayerRig& rig, moe::Layer& layer) {
  std::vector<cuda::Graph> graphs;
  for (const u32 r : layer.local_ranks()) {
    auto capture = cuda::Capture::begin(*rig.rank(r).device().stream()).value();
    const auto called = layer.forward(r, rig.input(r), rig.output(r));
    EXPECT_TRUE(called.ok()) << called.error().describe();
    graphs.push_back(capture.finish().value());
  }
  return graphs;
}
void replay(MoeLayerRig& rig, const std::vector<cuda::Graph>& graphs) {
  for (u32 i = 0; i < graphs.size(); ++i)
    ASSERT_TRUE(graphs[i].launch(*rig.rank(rig.layer.local_ranks()[i]).device().stream()).ok());
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
}

TEST_F(MoeLayerGpu, TwentyReplaysGiveTheSameBits) {
  for (const Format format : kFormats)
    for (const u32 tokens : {7u, 400u}) {
      MoeCase c = moderate(tokens, format);
      c.shared_inter = tokens == 7 ? 256 : 0;
      const MoeData data(c);
      MoeLayerRig made = rig(c);
      ASSERT_NO_FATAL_FAILURE(made.load(data));
      const auto graphs = capture(made, made.layer);
      std::vector<u16> first;
      for (u32 i = 0; i < 20; ++i) {
        ASSERT_NO_FATAL_FAILURE(made.poison());
        ASSERT_NO_FATAL_FAILURE(replay(made, graphs));
        if (first.empty()) first = made.outputs();
        ASSERT_EQ(made.outputs(), first) << "replay " << i;
      }
      ASSERT_NO_FATAL_FAILURE(made.check(data, bounds_of(format)));
      ASSERT_NO_FATAL_FAILURE(made.run());
      ASSERT_EQ(made.outputs(), first) << "launched without the graph";
    }
}
// Kernels are made ready when a layer is made, which a capture cannot hold.
TEST_F(MoeLayerGpu, NoLayerIsMadeInACapture) {
  const MoeCase c = moderate(20, Format::kE4m3);
  const moe::LayerOptions options = c.options(symm::Backend::kGpu);
  const auto group =
      ep::Group::create({.ranks = options.ranks, .ep = moe::group_options(options)}).value();
  {
    auto capture = cuda::Capture::begin(*group.core().group().rank(0).device().stream()).value();
    const auto refused = moe::Layer::create(group, options, moe_soon());
    ASSERT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr("captur"));
  }
  auto layer = moe::Layer::create(group, options, moe_soon());
  ASSERT_TRUE(layer.ok()) << layer.error().describe();
  MoeLayerRig made(c, std::move(layer).value());
  ASSERT_NO_FATAL_FAILURE(made.round(MoeData(c), bounds_of(c.format)));
}
TEST_F(MoeLayerGpu, ReplaysReadNewTokensAndRoutes) {
  MoeCase c = moderate(120, Format::kE4m3);
  MoeLayerRig made = rig(c);
  ASSERT_NO_FATAL_FAILURE(made.load(MoeData(c)));
  const auto graphs = capture(made, made.layer);
  for (u32 seed = 2; seed <= 4; ++seed) {
    c.seed = seed;
    const MoeData data(c);
    ASSERT_NO_FATAL_FAILURE(made.replace_tokens(data));
    ASSERT_NO_FATAL_FAILURE(made.poison());
    ASSERT_NO_FATAL_FAILURE(replay(made, graphs));
    ASSERT_NO_FATAL_FAILURE(made.check(data, bounds_of(c.format))) << "seed " << seed;
  }
}

// ---- in a row ----------------------------------------------------------------------------------

TEST_F(MoeLayerGpu, ManyForwardsWithoutTheHostKeepTheirRowsAndTakeNoMemory) {
  const MoeCase c = moderate(60, Format::kE4m3);
  const MoeData data(c);
  MoeLayerRig made = rig(c);
  ASSERT_NO_FATAL_FAILURE(made.load(data));
  moe::Layer second = made.layer.sibling();
  ASSERT_NO_FATAL_FAILURE(made.load_weights(data, second));
  const auto forwards = [&](u32 count) {
    for (u32 i = 0; i < count; ++i)
      ASSERT_NO_FATAL_FAILURE(made.forward(i % 2 == 0 ? made.layer : second));
    ASSERT_NO_FATAL_FAILURE(made.synchronize());
  };
  ASSERT_NO_FATAL_FAILURE(made.poison());
  ASSERT_NO_FATAL_FAILURE(forwards(100));
  EXPECT_TRUE(crossdock::testing::stays_level(
      [&] { return std::vector{crossdock::testing::used_bytes(context())}; },
      [&] { forwards(500); }));
  ASSERT_NO_FATAL_FAILURE(made.check(data, bounds_of(c.format)));
}

// ---- halves ------------------------------------------------------------------------------------

// Two micro-batches by turns, the dispatch of one beside the products of the other.
void turns(MoeLayerRig& a, MoeLayerRig& b, u32 times) {
  auto first = a.begin(a.layer);
  for (u32 i = 0; i < times; ++i) {
    auto second = b.begin(a.layer);
    ASSERT_NO_FATAL_FAILURE(a.end(a.layer, first));
    first = a.begin(a.layer);
    ASSERT_NO_FATAL_FAILURE(b.end(a.layer, second));
  }
  ASSERT_NO_FATAL_FAILURE(a.end(a.layer, first));
}

TEST_F(MoeLayerGpu, HalvesGiveTheBitsOfWholesInAGraphAndWithout) {
  for (const Format format : kFormats)
    for (const u32 tokens : {7u, 400u}) {
      MoeCase c = moderate(tokens, format);
      c.shared_inter = tokens == 7 ? 0 : 256;
      const MoeData data(c);
      c.seed = 2;
      const MoeData other(c);
      MoeLayerRig a = rig(c);
      ASSERT_NO_FATAL_FAILURE(a.load(data));
      MoeLayerRig b(c, a.layer.sibling());
      ASSERT_NO_FATAL_FAILURE(b.load_tokens(other));
      ASSERT_NO_FATAL_FAILURE(a.run());
      const auto whole_a = a.outputs();
      ASSERT_NO_FATAL_FAILURE(b.poison());
      ASSERT_NO_FATAL_FAILURE(b.forward(a.layer));
      ASSERT_NO_FATAL_FAILURE(a.synchronize());
      const auto whole_b = b.outputs();
      const auto compare = [&](const char* how) {
        ASSERT_NO_FATAL_FAILURE(a.synchronize());
        ASSERT_EQ(a.outputs(), whole_a) << how << ", format " << int(format) << ", " << tokens;
        ASSERT_EQ(b.outputs(), whole_b) << how << ", format " << int(format) << ", " << tokens;
        ASSERT_NO_FATAL_FAILURE(a.poison());
        ASSERT_NO_FATAL_FAILURE(b.poison());
      };
      ASSERT_NO_FATAL_FAILURE(turns(a, b, 20));
      ASSERT_NO_FATAL_FAILURE(compare("launched"));
      // Relaxed: the first graph is instantiated while this thread still captures the others.
      std::vector<cuda::Capture> captures;
      for (const u32 r : a.layer.local_ranks())
        captures.push_back(
            cuda::Capture::begin(*a.rank(r).device().stream(), cuda::CaptureMode::kRelaxed)
                .value());
      ASSERT_NO_FATAL_FAILURE(turns(a, b, 3));
      std::vector<cuda::Graph> graphs;
      for (cuda::Capture& capture : captures)
        graphs.push_back(capture.finish().value());
      for (u32 i = 0; i < 5; ++i) {
        ASSERT_NO_FATAL_FAILURE(replay(a, graphs));
        ASSERT_NO_FATAL_FAILURE(compare("in a graph"));
      }
    }
}

// Forwards between the halves of others, and after halves that nobody ended: dispatches on two
// streams, of which no two may run at once.
TEST_F(MoeLayerGpu, WholesAmongHalvesAndAfterDroppedOnes) {
  const MoeCase c = moderate(300, Format::kE4m3);
  const MoeData data(c);
  MoeLayerRig made = rig(c);
  ASSERT_NO_FATAL_FAILURE(made.load(data));
  ASSERT_NO_FATAL_FAILURE(made.poison());
  for (u32 i = 0; i < 40; ++i) {
    auto begun = made.begin(made.layer);
    ASSERT_NO_FATAL_FAILURE(made.forward(made.layer));
    if (i % 2 == 0) {
      ASSERT_NO_FATAL_FAILURE(made.end(made.layer, begun));
    }
    begun.clear();
    ASSERT_NO_FATAL_FAILURE(made.forward(made.layer));
  }
  ASSERT_NO_FATAL_FAILURE(made.synchronize());
  ASSERT_NO_FATAL_FAILURE(made.check(data, bounds_of(c.format)));
}

TEST_F(MoeLayerGpu, WeightsOfTheHostAreRefusedAndTheContextIsWhole) {
  const MoeCase c = moderate(20, Format::kE4m3);
  const MoeData data(c);
  MoeLayerRig made = rig(c);
  ASSERT_NO_FATAL_FAILURE(made.load(data));
  const auto weights = moe::Weights::prepare(data.plain(0), c.format, c.scales).value();
  const auto refused = made.layer.use(0, weights.view());
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("not memory that the driver knows"));
  ASSERT_NO_FATAL_FAILURE(made.poison());
  ASSERT_NO_FATAL_FAILURE(made.forward(made.layer));
  ASSERT_NO_FATAL_FAILURE(made.synchronize());
  ASSERT_NO_FATAL_FAILURE(made.check(data, bounds_of(c.format)));
}

// ---- faults ------------------------------------------------------------------------------------

// Found by the kernel that places the rows first: the product, or the one that copies them apart.
TEST_F(MoeLayerGpu, MoreChoicesThanPlacesAreAFaultAndResetHeals) {
  if (world_ < 2) GTEST_SKIP() << "needs two GPUs: on one all routings have as many choices";
  const std::pair<moe::RowOrder, const char*> orders[] = {
      {moe::RowOrder::kGather, "the rows of expert"}, {moe::RowOrder::kCopy, "choices to place"}};
  for (const auto& [order, text] : orders) {
    MoeCase c = moderate(200, Format::kE4m3);
    c.max_places = 1000;  // enough for the even routing, not for one expert
    c.routing = EpRoutingKind::kOneExpert;
    c.row_order = order;
    MoeLayerRig made = rig(c);
    ASSERT_NO_FATAL_FAILURE(made.load(MoeData(c)));
    ASSERT_NO_FATAL_FAILURE(made.forward(made.layer));
    ASSERT_FALSE(made.layer.synchronize(moe_soon()).ok());
    const auto fault = made.rank(world_ - 1).check();
    ASSERT_EQ(fault.code(), Code::kInvalidArgument) << fault.error().describe();
    EXPECT_THAT(fault.error().message, HasSubstr(text));
    ASSERT_TRUE(made.layer.reset(moe_soon()).ok());
    c.routing = EpRoutingKind::kRandom;
    const MoeData even(c);
    ASSERT_NO_FATAL_FAILURE(made.replace_tokens(even));
    ASSERT_NO_FATAL_FAILURE(made.run());
    ASSERT_NO_FATAL_FAILURE(made.check(even, bounds_of(c.format)));
  }
}

}  // namespace
}  // namespace crossdock::testing
