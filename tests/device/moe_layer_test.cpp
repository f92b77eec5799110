// Expert layers in the twin: the whole chain of dispatch, products and combine against the
// reference, for worlds of 1 to 4 ranks, both formats, odd routings, many schedules; and the same
// bits whatever the schedule.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <gtest/gtest.h>
#include <limits>

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
TEST(MoeLayer, SharedExperts) {
  round({.world = 2, .max_tokens = 5, .shared_inter = 256, .residual = true});
  round({.world = 1, .experts = 4, .max_tokens = 5, .shared_inter = 128, .shared_weights = true});
  round({.max_tokens = 5, .shared_inter = 128, .tokens = {0, 5}});
  const MoeCase c{.max_tokens = 5, .shared_inter = 128, .quantised_input = true};
  MoeLayerRig rig = twin_rig(c, 1);
  ASSERT_NO_FATAL_FAILURE(rig.round(MoeData(c), kBounds));
}
TEST(MoeLayer, ExpertBias) {
  round({.world = 2, .max_tokens = 5, .bias = true, .residual = true});
  round({.world = 1, .experts = 4, .max_tokens = 3, .bias = true, .weights = false});
}
TEST(MoeLayer, OneGroupOfK) {
  round({.world = 1, .experts = 2, .top_k = 2, .max_tokens = 5, .hidden = 128, .inter = 128});
}
// NaN, infinite and zero scales of a caller's rows stay with their tokens.
TEST(MoeLayer, OddScalesStayWithTheirTokens) {
  const MoeCase c{.max_tokens = 6, .quantised_input = true, .clamp = 1e30f};
  const MoeData data(c);
  MoeLayerRig rig = twin_rig(c, 1);
  ASSERT_NO_FATAL_FAILURE(rig.load(data));
  ASSERT_NO_FATAL_FAILURE(rig.run());
  const auto before = rig.outputs();
  auto* scales = static_cast<float*>(const_cast<void*>(rig.input(0).scales));
  const float odd[] = {std::numeric_limits<float>::infinity(), std::nanf(""), 0.0f};
  for (u32 token = 0; token < 3; ++token)
    std::fill_n(scales + token * (c.hidden / 128), c.hidden / 128, odd[token]);
  ASSERT_NO_FATAL_FAILURE(rig.run());
  const auto after = rig.outputs();
  for (u32 token = 0; token < 3; ++token) {
    const bool chosen =
        std::any_of(&data.routes(0).ids[token * c.top_k],
                    &data.routes(0).ids[token * c.top_k] + c.top_k, [](i64 id) { return id >= 0; });
    ASSERT_TRUE(chosen) << "token " << token << " goes nowhere: take another seed";
    for (u32 i = token * c.hidden; i < (token + 1) * c.hidden; ++i)
      if (token == 2) {
        ASSERT_EQ(from_bf16(after[i]), 0) << i;
      } else {
        ASSERT_FALSE(std::isfinite(from_bf16(after[i]))) << "token " << token << " value " << i;
      }
  }
  for (u64 i = u64{3} * c.hidden; i < after.size(); ++i)
    ASSERT_EQ(after[i], before[i]) << i;
}
TEST(MoeLayer, WithoutWeightsOfChoices) {
  round({.world = 1, .experts = 4, .max_tokens = 5, .weights = false});
}
// Whether a rank gives weights is its own affair: those that it does not give are 1.
TEST(MoeLayer, WeightsOfSomeRanksOnly) {
  for (const bool bias : {false, true}) {
    round({.world = 2, .max_tokens = 5, .bias = bias, .without_weights = 2, .tokens = {3, 5}});
    round({.world = 2, .max_tokens = 5, .bias = bias, .without_weights = 1, .tokens = {5, 3}});
    round({.world = 3, .max_tokens = 4, .bias = bias, .without_weights = 3});
  }
  round({.world = 2, .max_tokens = 5, .shared_inter = 128, .without_weights = 1});
}
// It does not know what the others give, and names no memory at all.
TEST(MoeLayer, ARankThatGivesNothing) {
  for (const bool bias : {false, true}) {
    const MoeCase c{.max_tokens = 5, .bias = bias, .tokens = {0, 5}};
    const MoeData data(c);
    MoeLayerRig rig = twin_rig(c, 1);
    ASSERT_NO_FATAL_FAILURE(rig.load(data));
    rig.input(0) = {};
    ASSERT_NO_FATAL_FAILURE(rig.run());
    ASSERT_NO_FATAL_FAILURE(rig.check(data, kBounds));
  }
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

// Gathered by the product, copied apart before it, or by the dispatch while others are on their
// way.
TEST(MoeLayer, TheSameBitsInEitherOrderOfTheRows) {
  for (const Format format : {Format::kE4m3, Format::kBf16})
    for (const moe::GemmTile tile : {moe::GemmTile::kAuto, moe::GemmTile::k128}) {
      MoeCase c{.max_tokens = 9, .format = format, .tile = tile};
      const MoeData data(c);
      std::vector<u16> gathered;
      for (const u32 way : {0u, 1u, 2u}) {
        c.row_order = way == 0 ? moe::RowOrder::kGather : moe::RowOrder::kCopy;
        c.expand_sms = way == 2 ? 2 : 0;
        MoeLayerRig rig = twin_rig(c, 3);
        ASSERT_NO_FATAL_FAILURE(rig.load(data));
        ASSERT_NO_FATAL_FAILURE(rig.run());
        ASSERT_NO_FATAL_FAILURE(rig.check(data, kBounds));
        if (gathered.empty()) gathered = rig.outputs();
        ASSERT_EQ(rig.outputs(), gathered) << "format " << int(format) << " tile " << int(tile);
      }
    }
}
TEST(MoeLayer, CopiedRowsOfOddRoutings) {
  round({.top_k = 2,
         .max_tokens = 5,
         .row_order = moe::RowOrder::kCopy,
         .routing = EpRoutingKind::kOneExpert});
  round({.max_tokens = 5, .row_order = moe::RowOrder::kCopy, .routing = EpRoutingKind::kAllMasked});
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

// Two micro-batches by turns through two layers, the dispatch of one begun before the other ends:
// the bits of plain forwards.
TEST(MoeLayer, HalvesGiveTheBitsOfWholes) {
  constexpr Format format = Format::kE4m3;  // the halves know of none
  MoeCase c{.experts = 4, .max_tokens = 3, .hidden = 128, .format = format, .residual = true};
  c.shared_inter = 128;
  const MoeData data(c);
  c.seed = 2;
  const MoeData other(c);
  MoeLayerRig a = twin_rig(c, 5);
  ASSERT_NO_FATAL_FAILURE(a.load(data));
  moe::Layer second = a.layer.sibling();
  ASSERT_NO_FATAL_FAILURE(a.load_weights(data, second));
  for (const u32 r : a.layer.local_ranks()) {
    moe::PlainWeights turned = data.plain(r);
    turned.up_first = true;  // other weights: ups are gates
    ASSERT_TRUE(second.load(r, moe::Weights::prepare(turned, format)->view(), moe_soon()).ok());
  }
  MoeLayerRig b(c, a.layer.sibling());
  ASSERT_NO_FATAL_FAILURE(b.load_tokens(other));
  std::vector<std::vector<u16>> whole;
  for (moe::Layer* layer : {&a.layer, &second})
    for (MoeLayerRig* rig : {&a, &b}) {
      ASSERT_NO_FATAL_FAILURE(rig->poison());
      ASSERT_NO_FATAL_FAILURE(rig->forward(*layer));
      ASSERT_NO_FATAL_FAILURE(a.synchronize());
      whole.push_back(rig->outputs());
    }
  ASSERT_NE(whole[0], whole[2]) << "the layers have the same weights";
  for (u32 at = 0; moe::Layer * layer : {&a.layer, &second}) {
    ASSERT_NO_FATAL_FAILURE(a.poison());
    ASSERT_NO_FATAL_FAILURE(b.poison());
    auto first = a.begin(a.layer);
    auto next = b.begin(*layer);
    ASSERT_NO_FATAL_FAILURE(a.end(*layer, first));  // a sibling may end it
    first = a.begin(*layer);
    ASSERT_NO_FATAL_FAILURE(b.end(*layer, next));
    ASSERT_NO_FATAL_FAILURE(a.end(*layer, first));
    ASSERT_NO_FATAL_FAILURE(a.synchronize());
    ASSERT_EQ(a.outputs(), whole[at++]);
    ASSERT_EQ(b.outputs(), whole[at++]);
  }
  ASSERT_NO_FATAL_FAILURE(a.run());
  ASSERT_EQ(a.outputs(), whole[0]) << "a plain forward afterwards";
}

}  // namespace
}  // namespace crossdock::testing
