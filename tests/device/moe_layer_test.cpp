// Expert layers in the twin: the whole chain of dispatch, products and combine against the
// reference, for worlds of 1 to 4 ranks, both formats, odd routings, many schedules; and the same
// bits whatever the schedule.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <gtest/gtest.h>

#include "support/moe_layer_rig.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;

// The twin adds up in fp32 as the reference does in fp64: hardly a rounding turns.
constexpr MoeLayerRig::Bounds kBounds{.share_equal = 0.995, .error = 1e-3, .magnitude = 1.0 / 256};

twin::Schedule weak_schedule(u64 seed) {
  twin::Schedule s;
  s.seed = seed;
  s.weak = s.stale = s.fire_deadlines = true;
  return s;
}
MoeLayerRig twin_rig(const MoeCase& c, u64 seed) {
  auto made = MoeLayerRig::create(c, symm::Backend::kCpu);
  if (!made.ok()) ADD_FAILURE() << made.error().describe();
  made->layer.core().group().launcher().set_schedule(weak_schedule(seed));
  return std::move(made).value();
}
void round(MoeCase c) {
  for (const Format format : {Format::kE4m3, Format::kBf16}) {
    SCOPED_TRACE(::testing::Message() << "format " << int(format) << " world " << c.world);
    c.format = format;
    MoeLayerRig rig = twin_rig(c, c.seed);
    ASSERT_NO_FATAL_FAILURE(rig.round(MoeData(c), kBounds));
  }
}

TEST(MoeLayer, OneRank) {
  round({.world = 1, .experts = 4, .top_k = 2});
}
TEST(MoeLayer, TwoRanksWithExpertsThatDoNotDivide) {
  round({.world = 2, .experts = 7, .residual = true});
}
TEST(MoeLayer, FourRanksAndWideIds) {
  round({.world = 4, .experts = 8, .max_tokens = 6, .wide_ids = true});
}
TEST(MoeLayer, SeveralGroupsOfTheInnerSize) {
  round({.max_tokens = 5, .inter = 256, .clamp = std::numeric_limits<float>::infinity()});
}
TEST(MoeLayer, RowsThatAreQuantisedAlready) {
  const MoeCase c{.quantised_input = true};
  MoeLayerRig rig = twin_rig(c, 1);
  ASSERT_NO_FATAL_FAILURE(rig.round(MoeData(c), kBounds));
}
TEST(MoeLayer, WithoutWeightsOfChoices) {
  round({.world = 1, .experts = 4, .max_tokens = 5, .weights = false});
}
TEST(MoeLayer, AllToOneExpert) {
  round({.top_k = 2, .max_tokens = 9, .routing = EpRoutingKind::kOneExpert});
}
TEST(MoeLayer, MaskedTokensGetTheirResidual) {
  round({.max_tokens = 5, .residual = true, .routing = EpRoutingKind::kAllMasked});
  round({.max_tokens = 5, .routing = EpRoutingKind::kAllMasked});
}
TEST(MoeLayer, RanksWithoutTokens) {
  round({.max_tokens = 5, .tokens = {0, 5}});
  round({.max_tokens = 5, .tokens = {0}});
}

// Not what is multiplied beside it, nor the order of things, changes a bit.
TEST(MoeLayer, TheSameBitsUnderEverySchedule) {
  for (const Format format : {Format::kE4m3, Format::kBf16}) {
    const MoeCase c{.format = format};
    const MoeData data(c);
    std::vector<u16> first;
    for (u64 seed = 1; seed <= 3; ++seed) {
      MoeLayerRig rig = twin_rig(c, seed);
      ASSERT_NO_FATAL_FAILURE(rig.load(data));
      for (u32 again = 0; again < 2; ++again) {
        ASSERT_NO_FATAL_FAILURE(rig.run());
        if (first.empty()) first = rig.outputs();
        ASSERT_EQ(rig.outputs(), first) << "seed " << seed << " run " << again;
      }
    }
  }
}

// As a captured graph would: forwards of several layers and micro-batches, launched in a row before
// anything runs, with the buffers and slots of the first.
TEST(MoeLayer, ForwardsInARowKeepTheirRows) {
  MoeCase c{.max_tokens = 5};
  const MoeData data(c);
  c.seed = 2;
  const MoeData other(c);
  MoeLayerRig rig = twin_rig(c, 5);
  ASSERT_NO_FATAL_FAILURE(rig.load(data));
  moe::Layer second = rig.layer.sibling();
  ASSERT_NO_FATAL_FAILURE(rig.load_weights(data, second));
  MoeLayerRig tokens(c, rig.layer.sibling());  // its own tokens and output
  ASSERT_NO_FATAL_FAILURE(tokens.load_tokens(other));
  ASSERT_NO_FATAL_FAILURE(rig.poison());
  ASSERT_NO_FATAL_FAILURE(tokens.poison());
  for (u32 i = 0; i < 2; ++i) {
    ASSERT_NO_FATAL_FAILURE(rig.forward(rig.layer));
    ASSERT_NO_FATAL_FAILURE(tokens.forward(second));
  }
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  ASSERT_NO_FATAL_FAILURE(rig.check(data, kBounds));
  ASSERT_NO_FATAL_FAILURE(tokens.check(other, kBounds));
}

}  // namespace
}  // namespace crossdock::testing
