// Copies of received rows by expert, expanded and masked, and the way back through combine, in the
// twin through the API: against plain loops over what was delivered.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <gmock/gmock.h>

#include "support/ep_expanded.hpp"
#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

constexpr u32 kAlignment = 8;

EpGroupRig expanding_rig(const EpCase& c, u32 slots = 2) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.expert_alignment = kAlignment;
  options.ep.slots = slots;
  return EpGroupRig::create(c, options).value();
}

struct Layout {
  bool masked = false;
  bool scales_by_column = false;
  u32 gap = 0;  // bytes between rows
};

void expand_all(const EpCase& c, u32 seed, const Layout& layout) {
  SCOPED_TRACE("seed " + std::to_string(seed) + (layout.masked ? " masked" : " expanded"));
  EpGroupRig rig = expanding_rig(c);
  rig.group().core().launcher().set_schedule(weak_schedule(seed));
  rig.load(EpInputs(c, seed));
  const auto handles = rig.dispatch();
  std::vector<EpExpandedMemory> memory;
  for (const auto& handle : handles) {
    const auto grouped = rig.group().group_rows(handle).value();
    auto shape = expanded_shape(c, handle, grouped, kAlignment, layout.masked);
    shape.scales_by_column = layout.scales_by_column;
    shape.row_gap = layout.gap;
    memory.emplace_back(rig.rank(handle.rank()), handle, grouped, shape);
    const auto done = rig.group().expand_rows(handle, memory.back().to());
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (const EpExpandedMemory& m : memory)
    ASSERT_NO_FATAL_FAILURE(m.check(ep_soon()));
}

TEST(EpExpand, EveryLayoutOfEveryRouting) {
  u32 seed = 0;
  for (const EpRoutingKind kind : {EpRoutingKind::kRandom, EpRoutingKind::kOneExpert,
                                   EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed})
    for (const bool masked : {false, true})
      for (const bool by_column : {false, true}) {
        ++seed;
        expand_all({.world = 2,
                    .experts = 7,
                    .max_tokens = 30,
                    .row_bytes = 64 + 16 * (seed % 3),
                    .scale_bytes = 12,
                    .scales_by_column = seed % 3 == 0,
                    .routing = kind},
                   seed, {.masked = masked, .scales_by_column = by_column, .gap = 16 * (seed % 2)});
        if (HasFatalFailure()) return;
      }
}
TEST(EpExpand, LargeRowsInPartsManyChoicesNoTokens) {
  expand_all({.world = 2, .max_tokens = 12, .row_bytes = 7184, .combine_bytes = 64}, 1, {});
  expand_all({.world = 2, .max_tokens = 5, .row_bytes = 32768, .combine_bytes = 64}, 2,
             {.masked = true});
  expand_all({.world = 3, .experts = 40, .top_k = 32, .max_tokens = 9}, 3, {});
  expand_all({.world = 2, .weights = false, .tokens = {0}}, 4, {});
  expand_all({.world = 1, .experts = 1, .top_k = 1, .max_tokens = 1}, 5, {.masked = true});
}

TEST(EpExpand, RowsOfFewTokensWithGapsBetweenTheirSources) {
  for (const bool masked : {false, true})
    for (const bool by_column : {false, true})
      expand_all({.world = 3,
                  .experts = 7,
                  .max_tokens = 14,
                  .scale_bytes = 12,
                  .scales_by_column = by_column,
                  .fixed = true},
                 11 + by_column, {.masked = masked, .scales_by_column = by_column});
}

// What expert `e` makes of a row: something that tells the expert and is exact in bf16.
u16 expert_output(u16 value, u32 e) {
  return bf16_of(from_bf16(value) * static_cast<float>(1 + e % 3));
}

// Small numbers, exact in bf16.
EpInputs small_numbers(const EpCase& c, u32 seed) {
  EpInputs inputs(c, seed);
  for (u32 r = 0; r < c.world; ++r)
    for (u32 t = 0; t < inputs.of(r).tokens; ++t)
      for (u32 i = 0; i < c.row_bytes / 2; ++i) {
        const u16 value = bf16_of(static_cast<float>((r * 5 + t * 3 + i) % 17) - 8);
        std::memcpy(&inputs.of(r).rows[u64{t} * c.row_bytes + 2 * i], &value, 2);
      }
  return inputs;
}
// Copies by expert, the experts in place, their sums in the input of combine.
void experts(EpGroupRig& rig, const EpCase& c, const ep::Handle& handle, u32 per_expert) {
  const auto grouped = rig.group().group_rows(handle).value();
  const EpExperts map = c.expert_map();
  const u64 places = per_expert != 0 ? u64{per_expert} * map.count(handle.rank()) : grouped.places;
  const auto rows = rig.rank(handle.rank()).allocate(places * c.row_bytes).value();
  ASSERT_TRUE(
      rig.group()
          .expand_rows(handle,
                       {.places = places, .rows_per_expert = per_expert, .rows = rows.address()})
          .ok());
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (u32 e = 0; e < map.count(handle.rank()); ++e) {
    const u64 begin = per_expert != 0 ? u64{e} * per_expert : grouped.offsets[e];
    const u64 end = begin + handle.received().expert_counts[e];
    for (u64 at = begin * c.row_bytes / 2; at < end * c.row_bytes / 2; ++at)
      rows.as<u16>()[at] = expert_output(rows.as<u16>()[at], map.first(handle.rank()) + e);
  }
  const auto done = rig.group().reduce_rows(
      handle, {.rows = rows.address(), .rows_per_expert = per_expert, .weighted = c.weights});
  ASSERT_TRUE(done.ok()) << done.error().describe();
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
}
// What combine should make of a value of a token.
float sum_of_experts(const EpCase& c, const EpTokensIn& in, u32 token, u16 value) {
  float sum = 0;
  for (u32 d = 0; d < c.world; ++d) {  // a bf16 row from each rank
    float at_rank = 0;
    bool there = false;
    for (u32 k = 0; k < c.top_k; ++k) {
      const i64 id = in.ids[u64{token} * c.top_k + k];
      if (id < 0 || c.expert_map().owner(static_cast<u32>(id)) != d) continue;
      there = true;
      const float weight = c.weights ? in.weights[u64{token} * c.top_k + k] : 1.0f;
      at_rank = std::fma(weight, from_bf16(expert_output(value, static_cast<u32>(id))), at_rank);
    }
    if (there) sum += from_bf16(bf16_of(at_rank));
  }
  return sum;
}
// dispatch, expand, experts, weighted sums, combine: each token becomes the sum of what its experts
// make of it, times their weights.
void there_and_back(const EpCase& c, u32 seed, bool masked, u32 slots) {
  EpGroupRig rig = expanding_rig(c, slots);
  const EpInputs inputs = small_numbers(c, seed);
  rig.load(inputs);
  const auto held = rig.dispatch();  // so that with one slot the next is a copy
  const auto handles = rig.dispatch();
  for (const auto& handle : handles) {
    EXPECT_EQ(handle.copied(), slots == 1);
    ASSERT_NO_FATAL_FAILURE(experts(rig, c, handle, masked ? c.world * c.max_tokens * c.top_k : 0));
  }
  for (const auto& handle : handles)
    ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (u32 r = 0; r < c.world; ++r)
    for (u32 t = 0; t < inputs.of(r).tokens; ++t)
      for (u32 i = 0; i < c.row_bytes / 2; ++i) {
        u16 value = 0;
        std::memcpy(&value, &inputs.of(r).rows[u64{t} * c.row_bytes + 2 * i], 2);
        ASSERT_EQ(reinterpret_cast<const u16*>(rig.combined(r))[u64{t} * c.row_bytes / 2 + i],
                  bf16_of(sum_of_experts(c, inputs.of(r), t, value)))
            << "rank " << r << " token " << t << " value " << i;
      }
}
TEST(EpExpand, ExpertsThenWeightedSumsThenCombine) {
  const EpCase c{.world = 3, .experts = 8, .max_tokens = 20};
  there_and_back(c, 1, false, 2);
  there_and_back(c, 2, true, 2);
  EpCase unweighted = c;
  unweighted.weights = false;
  there_and_back(unweighted, 3, false, 2);
}
TEST(EpExpand, FewTokensGoThereAndBackToo) {
  const EpCase c{.world = 3, .experts = 8, .max_tokens = 14, .fixed = true};
  there_and_back(c, 5, false, 2);
  there_and_back(c, 6, true, 2);
}
TEST(EpExpand, CopiesAreExpandedAndCombinedToo) {
  there_and_back({.world = 2, .experts = 5, .max_tokens = 12}, 4, false, 1);
}

// ---- mistakes ----------------------------------------------------------------------------------

TEST(EpExpand, TooLittleRoomIsAFaultAndNothingIsWrittenBehindIt) {
  const EpCase c{.world = 1, .experts = 2, .max_tokens = 20, .routing = EpRoutingKind::kOneExpert};
  for (const bool masked : {false, true}) {
    EpGroupRig rig = expanding_rig(c);
    rig.load(EpInputs(c, 1));
    const auto handles = rig.dispatch();
    ASSERT_TRUE(rig.group().group_rows(handles[0]).ok());
    auto rows = rig.rank(0).allocate(80 * c.row_bytes).value();
    std::memset(rows.address(), 0xee, rows.bytes());
    // 80 choices, all of the last expert.
    ASSERT_TRUE(rig.group()
                    .expand_rows(handles[0], {.places = masked ? 158u : 79u,
                                              .rows_per_expert = masked ? 79u : 0u,
                                              .rows = rows.address()})
                    .ok());
    const auto done = rig.group().synchronize(ep_soon());
    ASSERT_EQ(done.code(), Code::kInvalidArgument) << done.error().describe();
    EXPECT_THAT(done.error().message, HasSubstr("80 choices"));
    EXPECT_THAT(done.error().message, HasSubstr("room for 79"));
    for (u64 i = 0; i < rows.bytes(); ++i)
      ASSERT_EQ(rows.as<u8>()[i], 0xee);
  }
}
TEST(EpExpand, WrongPlanesAreRefused) {
  const EpCase c{.world = 1, .experts = 4, .max_tokens = 8, .weights = false};
  EpGroupRig rig = expanding_rig(c), other = expanding_rig(c);
  rig.load(EpInputs(c, 1));
  const auto handles = rig.dispatch();
  ASSERT_TRUE(rig.group().group_rows(handles[0]).ok());
  auto memory = rig.rank(0).allocate(1 << 16).value();
  const auto refuse = [&](const ep::Expanded& to, const char* text) {
    const auto got = rig.group().expand_rows(handles[0], to);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  u8* at = memory.as<u8>();
  refuse({.places = 31, .rows_per_expert = 8, .rows = at},
         "places = 31 must be at least 4 experts");
  refuse({.places = 64, .rows = at + 8}, "multiples of 16");
  refuse({.places = 64, .rows = at, .row_stride = 72}, "a stride of 72");
  refuse({.places = 64, .rows = at, .row_stride = 48}, "one row of 64 bytes apart");
  refuse({.places = 64, .scales = at}, "the dispatch had no scales");
  refuse({.places = 64, .weights = memory.as<float>()}, "the dispatch had no weights");
  refuse({.places = 64, .sources = reinterpret_cast<ep::Source*>(at + 2)}, "sources at");
  EXPECT_THAT(other.group().expand_rows(handles[0], {}).error().message,
              HasSubstr("another group"));
  const auto weighted = rig.group().reduce_rows(handles[0], {.rows = at, .weighted = true});
  EXPECT_THAT(weighted.error().message, HasSubstr("had no weights"));
  const auto ids = rig.group().reduce_rows(
      handles[0], {.rows = at, .ids = reinterpret_cast<const std::int32_t*>(at + 2)});
  ASSERT_EQ(ids.code(), Code::kInvalidArgument);
  EXPECT_THAT(ids.error().message, HasSubstr("must be i32, on a multiple of 4"));
}
// A slot keeps the lists of the dispatch before: they must not be taken for those of the next.
TEST(EpExpand, RowsThatAreNotListedAreRefused) {
  const EpCase c{.world = 1, .experts = 4, .max_tokens = 8};
  EpGroupRig rig = expanding_rig(c);
  rig.load(EpInputs(c, 1));
  auto memory = rig.rank(0).allocate(1 << 16).value();
  for (int round = 0; round < 3; ++round) {
    const auto handles = rig.dispatch();
    for (const auto& got :
         {rig.group().expand_rows(handles[0], {.places = 64, .rows = memory.as<u8>()}),
          rig.group().reduce_rows(handles[0], {.rows = memory.as<u8>()})}) {
      ASSERT_EQ(got.code(), Code::kInvalidArgument) << "round " << round;
      EXPECT_THAT(got.error().message, HasSubstr("call group_rows() first"));
    }
    ASSERT_TRUE(rig.group().group_rows(handles[0]).ok());
    EXPECT_TRUE(rig.group().expand_rows(handles[0], {.places = 64, .rows = memory.as<u8>()}).ok());
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  }
}
TEST(EpExpand, ScaleStridesAreChecked) {
  const EpCase c{.world = 1, .experts = 4, .max_tokens = 8, .scale_bytes = 12};
  EpGroupRig rig = expanding_rig(c);
  rig.load(EpInputs(c, 1));
  const auto handles = rig.dispatch();
  ASSERT_TRUE(rig.group().group_rows(handles[0]).ok());
  auto memory = rig.rank(0).allocate(1 << 16).value();
  const auto text = [&](const ep::Expanded& to) {
    return rig.group().expand_rows(handles[0], to).error().message;
  };
  u8* at = memory.as<u8>();
  EXPECT_THAT(text({.places = 64, .scales = at, .scale_stride = 8}),
              HasSubstr("12 bytes from row to row apart"));
  EXPECT_THAT(text({.places = 64, .scales = at, .scale_stride = 14}), HasSubstr("stride of 14"));
  EXPECT_THAT(text({.places = 64, .scales = at + 2}), HasSubstr("multiples of 4"));
  EXPECT_THAT(text({.places = 64, .scales = at, .scales_by_column = true, .scale_stride = 63}),
              HasSubstr("64 words from column to column apart"));
}

}  // namespace
}  // namespace crossdock::testing
