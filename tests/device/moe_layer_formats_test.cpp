// Expert layers with weights in e2m1 and with scales of one byte, in the twin: the whole chain
// against the reference, every tile, odd routings and scales, the same bits whatever the schedule.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>

#include "support/moe_layer_rig.hpp"

namespace crossdock::testing {
namespace {

using moe::Format;
using moe::ScaleType;

// The twin adds up in fp32 as the reference does in fp64: hardly a rounding turns.
constexpr MoeLayerRig::Bounds kBounds{.share_equal = 0.995, .error = 1e-3, .magnitude = 1.0 / 256};

struct Kind {
  Format format;
  ScaleType scales;
};
constexpr Kind kKinds[] = {{Format::kE4m3, ScaleType::kUe8m0},
                           {Format::kE2m1, ScaleType::kF32},
                           {Format::kE2m1, ScaleType::kUe8m0}};

constexpr Kind kAllKinds[] = {{Format::kE4m3, ScaleType::kF32}, kKinds[0], kKinds[1], kKinds[2]};

MoeLayerRig twin_rig(const MoeCase& c, u64 seed) {
  auto made = MoeLayerRig::create(c, symm::Backend::kCpu);
  if (!made.ok()) ADD_FAILURE() << made.error().describe();
  twin::Schedule schedule;
  schedule.seed = seed;
  schedule.weak = schedule.stale = schedule.fire_deadlines = true;
  made->layer.core().group().launcher().set_schedule(schedule);
  return std::move(made).value();
}
void round(MoeCase c) {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(::testing::Message() << "format " << int(kind.format) << " scales "
                                      << int(kind.scales) << " world " << c.world);
    c.format = kind.format;
    c.scales = kind.scales;
    MoeLayerRig rig = twin_rig(c, c.seed);
    ASSERT_NO_FATAL_FAILURE(rig.round(MoeData(c), kBounds));
  }
}

TEST(MoeLayerFormats, OneRank) {
  round({.world = 1, .experts = 4, .top_k = 2, .max_tokens = 5});
}
TEST(MoeLayerFormats, TwoRanksWithExpertsThatDoNotDivide) {
  round({.world = 2, .experts = 5, .max_tokens = 5, .residual = true});
}
// Five groups of K and more are more than one word of scales.
TEST(MoeLayerFormats, SeveralWordsOfScales) {
  round({.world = 1, .experts = 2, .top_k = 2, .max_tokens = 3, .hidden = 640, .inter = 640});
}
TEST(MoeLayerFormats, OneGroupOfK) {
  round({.world = 1, .experts = 2, .top_k = 2, .max_tokens = 5, .hidden = 128, .inter = 128});
}
TEST(MoeLayerFormats, RowsThatAreQuantisedAlready) {
  round({.max_tokens = 4, .hidden = 640, .quantised_input = true});
}
TEST(MoeLayerFormats, SharedExpertsAndBias) {
  round({.world = 1, .experts = 2, .max_tokens = 3, .shared_inter = 256, .bias = true});
  round({.world = 1, .experts = 2, .max_tokens = 3, .shared_inter = 128, .quantised_input = true});
}
TEST(MoeLayerFormats, AllToOneExpertAndExpertsWithoutRows) {
  round({.top_k = 2, .max_tokens = 5, .routing = EpRoutingKind::kOneExpert});
  round({.max_tokens = 3, .residual = true, .routing = EpRoutingKind::kAllMasked});
  round({.max_tokens = 3, .tokens = {0, 3}});
}
TEST(MoeLayerFormats, MoreRowsThanATileHas) {
  MoeCase c{.world = 1, .experts = 2, .top_k = 1, .max_tokens = 70, .hidden = 128};
  c.format = Format::kE2m1;
  c.tile = moe::GemmTile::k64;
  c.routing = EpRoutingKind::kOneExpert;
  for (const moe::RowOrder order : {moe::RowOrder::kGather, moe::RowOrder::kCopy}) {
    c.row_order = order;
    MoeLayerRig rig = twin_rig(c, 1);
    ASSERT_NO_FATAL_FAILURE(rig.round(MoeData(c), kBounds));
  }
}
TEST(MoeLayerFormats, EveryTile) {
  MoeCase c{.world = 1, .experts = 2, .top_k = 2, .max_tokens = 9, .hidden = 128};
  for (const Kind& kind : kKinds)
    for (const moe::GemmTile tile : {moe::GemmTile::k128, moe::GemmTile::k64, moe::GemmTile::kFew32,
                                     moe::GemmTile::kFew16, moe::GemmTile::kFew8}) {
      SCOPED_TRACE(::testing::Message() << "format " << int(kind.format) << " tile " << int(tile));
      c.format = kind.format;
      c.scales = kind.scales;
      c.tile = tile;
      MoeLayerRig rig = twin_rig(c, 2);
      ASSERT_NO_FATAL_FAILURE(rig.round(MoeData(c), kBounds));
    }
}
TEST(MoeLayerFormats, TheSameBitsUnderEveryScheduleAndInEitherOrder) {
  for (const Kind& kind : kKinds) {
    MoeCase c{.max_tokens = 4, .format = kind.format, .scales = kind.scales};
    const MoeData data(c);
    std::vector<u16> first;
    for (const moe::RowOrder order : {moe::RowOrder::kGather, moe::RowOrder::kCopy}) {
      c.row_order = order;
      MoeLayerRig rig = twin_rig(c, 4 + static_cast<u64>(order));
      ASSERT_NO_FATAL_FAILURE(rig.load(data));
      ASSERT_NO_FATAL_FAILURE(rig.run());
      if (first.empty()) first = rig.outputs();
      ASSERT_EQ(rig.outputs(), first) << "format " << int(kind.format);
    }
  }
}

// Each rank gives rows as it has them, or none.
TEST(MoeLayerFormats, RanksThatGiveRowsOfDifferentFormats) {
  for (const Kind& kind : kAllKinds)
    for (const u32 hidden : {128u, 256u, 512u})
      for (const moe::RowOrder order : {moe::RowOrder::kGather, moe::RowOrder::kCopy}) {
        SCOPED_TRACE(::testing::Message() << "format " << int(kind.format) << " scales "
                                          << int(kind.scales) << " hidden " << hidden);
        MoeCase c{.max_tokens = 3, .hidden = hidden, .format = kind.format, .scales = kind.scales};
        c.quantised_input = true;
        c.row_order = order;
        c.bf16_ranks = order == moe::RowOrder::kGather ? 1 : 2;
        MoeLayerRig rig = twin_rig(c, hidden);
        ASSERT_NO_FATAL_FAILURE(rig.round(MoeData(c), kBounds));
        c.tokens = {0, 3};
        const MoeData data(c);
        MoeLayerRig idle = twin_rig(c, hidden);
        ASSERT_NO_FATAL_FAILURE(idle.load(data));
        idle.input(0) = {};
        ASSERT_NO_FATAL_FAILURE(idle.run());
        ASSERT_NO_FATAL_FAILURE(idle.check(data, kBounds));
      }
}
// Blocks that copy rows as they come have to know how scales come.
TEST(MoeLayerFormats, RowsThatTheDispatchCopiesAreOfOneFormat) {
  for (const Kind& kind : kAllKinds) {
    const MoeCase c{.max_tokens = 3,
                    .hidden = 512,
                    .format = kind.format,
                    .scales = kind.scales,
                    .quantised_input = true,
                    .bf16_ranks = 1,
                    .row_order = moe::RowOrder::kCopy,
                    .expand_sms = 1};
    const MoeData data(c);
    MoeLayerRig rig = twin_rig(c, 1);
    ASSERT_NO_FATAL_FAILURE(rig.load(data));
    ASSERT_NO_FATAL_FAILURE(rig.forward(rig.layer));
    const auto done = rig.layer.synchronize(moe_soon());
    ASSERT_EQ(done.code(), Code::kInvalidArgument);
    EXPECT_THAT(done.error().message, ::testing::HasSubstr("LayerInput::format"));
  }
}
// What is too large for fp32 between the products does not come back as a number, even where the
// second product makes everything small.
TEST(MoeLayerFormats, InfiniteActivationsAreNotNumbers) {
  for (const Kind& kind : kAllKinds)
    for (const moe::GemmTile tile :
         {moe::GemmTile::k128, moe::GemmTile::k64, moe::GemmTile::kFew8}) {
      SCOPED_TRACE(::testing::Message() << "format " << int(kind.format) << " scales "
                                        << int(kind.scales) << " tile " << int(tile));
      const MoeCase c{.world = 1,
                      .experts = 2,
                      .top_k = 2,
                      .max_tokens = 3,
                      .format = kind.format,
                      .scales = kind.scales,
                      .clamp = std::numeric_limits<float>::infinity(),
                      .tile = tile};
      const MoeData data(c);
      MoeLayerRig rig = twin_rig(c, 1);
      ASSERT_NO_FATAL_FAILURE(rig.load_tokens(data));
      const auto weights = moe::Weights::prepare(data.plain(0), c.format, c.scales).value();
      const u64 count = moe::weight_sizes(weights.layout()).value().down_scales;
      const std::vector<float> small(count, std::ldexp(1.0f, -30));
      const std::vector<u8> codes(count, 127 - 30);
      auto view = weights.view();
      view.down_scales = c.ue8m0() ? static_cast<const void*>(codes.data()) : small.data();
      ASSERT_TRUE(rig.layer.load(0, view, moe_soon()).ok());
      ASSERT_NO_FATAL_FAILURE(rig.run());
      const auto before = rig.outputs();
      ASSERT_GE(data.routes(0).ids[0], 0) << "take another seed";
      std::fill_n(static_cast<u16*>(const_cast<void*>(rig.input(0).rows)), c.hidden,
                  bf16_of(1e25f));  // gates are numbers, not so their products
      ASSERT_NO_FATAL_FAILURE(rig.run());
      const auto after = rig.outputs();
      for (u32 i = 0; i < c.hidden; ++i)
        ASSERT_FALSE(std::isfinite(from_bf16(after[i]))) << "value " << i;
      for (u64 i = c.hidden; i < after.size(); ++i)
        ASSERT_EQ(after[i], before[i]) << i;
    }
}

// Codes of a caller's scales: 255 (NaN) and 0 stay with their tokens.
TEST(MoeLayerFormats, OddScalesStayWithTheirTokens) {
  const MoeCase c{.max_tokens = 5,
                  .hidden = 640,
                  .format = Format::kE2m1,
                  .scales = ScaleType::kUe8m0,
                  .quantised_input = true,
                  .clamp = 1e30f};
  const MoeData data(c);
  MoeLayerRig rig = twin_rig(c, 1);
  ASSERT_NO_FATAL_FAILURE(rig.load(data));
  ASSERT_NO_FATAL_FAILURE(rig.run());
  const auto before = rig.outputs();
  auto* scales = static_cast<u32*>(const_cast<void*>(rig.input(0).scales));
  const u32 words = device::ceil_div(c.hidden, 512u);
  const u32 odd[] = {0xffffffffu, 0u};
  for (u32 token = 0; token < 2; ++token)
    std::fill_n(scales + token * words, words, odd[token]);
  ASSERT_NO_FATAL_FAILURE(rig.run());
  const auto after = rig.outputs();
  for (u32 token = 0; token < 2; ++token) {
    const i64* ids = &data.routes(0).ids[token * c.top_k];
    ASSERT_TRUE(std::any_of(ids, ids + c.top_k, [](i64 id) { return id >= 0; }))
        << "token " << token << " goes nowhere: take another seed";
    for (u32 i = token * c.hidden; i < (token + 1) * c.hidden; ++i)
      if (token == 1) {
        ASSERT_EQ(from_bf16(after[i]), 0) << i;
      } else {
        ASSERT_FALSE(std::isfinite(from_bf16(after[i]))) << "value " << i;
      }
  }
  for (u64 i = u64{2} * c.hidden; i < after.size(); ++i)
    ASSERT_EQ(after[i], before[i]) << i;
}
// Blocks of weights whose scale is 0 count as zeros.
TEST(MoeLayerFormats, ZeroScalesOfWeightsGiveZeros) {
  for (const Kind& kind : kKinds) {
    const MoeCase c{.world = 1,
                    .experts = 2,
                    .top_k = 2,
                    .max_tokens = 3,
                    .format = kind.format,
                    .scales = kind.scales};
    const MoeData data(c);
    MoeLayerRig rig = twin_rig(c, 1);
    ASSERT_NO_FATAL_FAILURE(rig.load_tokens(data));
    const auto weights = moe::Weights::prepare(data.plain(0), c.format, c.scales).value();
    const auto sizes = moe::weight_sizes(weights.layout()).value();
    const std::vector<u8> zeros(sizes.down_scales * sizes.scale_bytes + 4, 0);
    auto view = weights.view();
    view.down_scales = zeros.data();
    ASSERT_TRUE(rig.layer.load(0, view, moe_soon()).ok());
    ASSERT_NO_FATAL_FAILURE(rig.run());
    const auto out = rig.outputs();
    for (u32 i = 0; i < c.max_tokens * c.hidden; ++i)
      ASSERT_EQ(from_bf16(out[i]), 0) << "format " << int(kind.format) << " value " << i;
  }
}

// Prepared by a kernel where they are used, or on the host: the same bits.
TEST(MoeLayerFormats, WeightsPreparedOnARank) {
  const MoeCase c{.world = 1,
                  .experts = 2,
                  .top_k = 2,
                  .max_tokens = 3,
                  .format = Format::kE2m1,
                  .scales = ScaleType::kUe8m0};
  const MoeData data(c);
  MoeLayerRig rig = twin_rig(c, 1);
  ASSERT_NO_FATAL_FAILURE(rig.load(data));
  ASSERT_NO_FATAL_FAILURE(rig.run());
  const auto want = rig.outputs();
  moe::PlainWeights plain = data.plain(0);
  const auto put = [&](const void* from, u64 values) {
    auto memory = rig.rank(0).allocate(values * sizeof(float)).value();
    EXPECT_TRUE(rig.rank(0).write(memory.address(), from, values * sizeof(float), moe_soon()).ok());
    return memory;
  };
  const u64 matrix = u64{c.experts} * c.hidden * c.inter;
  const auto gate_up = put(plain.gate_up, 2 * matrix), down = put(plain.down, matrix);
  plain.gate_up = gate_up.address();
  plain.down = down.address();
  const auto made = rig.layer.prepare_weights(0, plain, moe_soon());
  ASSERT_TRUE(made.ok()) << made.error().describe();
  EXPECT_EQ(made->report().inexact_groups, 0u);
  ASSERT_TRUE(rig.layer.use(0, made->view()).ok());
  ASSERT_NO_FATAL_FAILURE(rig.run());
  EXPECT_EQ(rig.outputs(), want);
}

}  // namespace
}  // namespace crossdock::testing
