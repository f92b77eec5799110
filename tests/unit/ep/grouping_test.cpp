// Received rows by expert, and the sums of what the experts made of them, in the twin through the
// API: against lists and sums made by plain loops.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <gmock/gmock.h>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

constexpr u32 kAlignment = 8;

EpGroupRig grouping_rig(const EpCase& c, u32 alignment = kAlignment) {
  auto options = ep_options(c, symm::Backend::kCpu);
  options.ep.expert_alignment = alignment;
  return {c, ep::Group::create(options).value()};
}
// Everything of one rank, read in the twin's memory.
struct Seen {
  u32 rows;
  u32 experts;
  const i32* ids;
  const float* weights;
  ep::Grouped grouped;
};

// Every choice has its place, in order, and the padding says so.
void check_lists(const EpCase& c, const Seen& s) {
  u32 place = 0;
  for (u32 e = 0; e < s.experts; ++e) {
    ASSERT_EQ(s.grouped.offsets[e], place) << "expert " << e;
    for (u32 choice = 0; choice < s.rows * c.top_k; ++choice) {
      if (s.ids[choice] != static_cast<i32>(e)) continue;
      ASSERT_EQ(s.grouped.rows[place], static_cast<i32>(choice / c.top_k)) << "place " << place;
      ASSERT_EQ(s.grouped.positions[choice], place);
      ASSERT_EQ(s.grouped.weights[place], s.weights[choice]) << "place " << place;
      ++place;
    }
    for (; place % kAlignment != 0; ++place)
      ASSERT_EQ(s.grouped.rows[place], -1) << "padding at " << place;
  }
  ASSERT_EQ(s.grouped.offsets[s.experts], place);
  ASSERT_LE(place, s.grouped.places);
}
// What an expert makes of a place.
u16 place_value(u32 rank, u32 place, u32 i) {
  return expert_value(rank, 17, place, i, 3);
}
void check_sums(const EpCase& c, const Seen& s, u32 rank, const u16* input, bool weighted) {
  const u32 values = c.combine_bytes / 2;
  for (u32 row = 0; row < s.rows; ++row)
    for (u32 i = 0; i < values; ++i) {
      float sum = 0;
      for (u32 choice = row * c.top_k; choice < (row + 1) * c.top_k; ++choice)
        if (s.ids[choice] >= 0)
          sum = std::fma(weighted ? s.weights[choice] : 1.0f,
                         from_bf16(place_value(rank, s.grouped.positions[choice], i)), sum);
      ASSERT_EQ(input[u64{row} * values + i], bf16_of(sum)) << "row " << row << " value " << i;
    }
}

void group_and_reduce(const EpCase& c, u32 seed, bool weighted) {
  EpGroupRig rig = grouping_rig(c);
  rig.group().core().launcher().set_schedule(weak_schedule(seed));
  const EpInputs inputs(c, seed);
  rig.load(inputs);
  const auto handles = rig.dispatch();
  std::vector<ep::Grouped> grouped;
  for (const auto& handle : handles)
    grouped.push_back(rig.group().group_rows(handle).value());
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  std::vector<symm::LocalMemory> by_place;
  for (const auto& handle : handles) {
    const u32 r = handle.rank();
    const Seen seen{handle.rows(ep_soon()).value(), c.expert_map().count(r), handle.received().ids,
                    handle.received().weights, grouped[r]};
    ASSERT_NO_FATAL_FAILURE(check_lists(c, seen)) << "rank " << r;
    by_place.push_back(rig.rank(r).allocate(grouped[r].places * c.combine_bytes).value());
    for (u64 place = 0; place < grouped[r].places; ++place)
      for (u32 i = 0; i < c.combine_bytes / 2; ++i)
        by_place[r].as<u16>()[place * (c.combine_bytes / 2) + i] =
            place_value(r, static_cast<u32>(place), i);
    const auto done = rig.group().reduce_rows(handle, by_place[r].address(), 0, weighted);
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  ASSERT_NO_FATAL_FAILURE(rig.synchronize());
  for (const auto& handle : handles) {
    const u32 r = handle.rank();
    const Seen seen{handle.rows(ep_soon()).value(), c.expert_map().count(r), handle.received().ids,
                    handle.received().weights, grouped[r]};
    ASSERT_NO_FATAL_FAILURE(
        check_sums(c, seen, r, static_cast<const u16*>(handle.expert_input().rows), weighted))
        << "rank " << r;
  }
}

TEST(EpGrouping, ListsAndSumsOfEveryRouting) {
  for (const EpRoutingKind kind : {EpRoutingKind::kRandom, EpRoutingKind::kOneExpert,
                                   EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed})
    for (u32 seed = 1; seed <= 2; ++seed) {
      group_and_reduce({.world = 2,
                        .experts = 7,
                        .top_k = 4,
                        .max_tokens = 50,
                        .combine_bytes = 528,
                        .routing = kind},
                       seed, seed == 2);
      if (HasFatalFailure()) return;
    }
}
TEST(EpGrouping, SumsOfRowsThatAreCutIntoParts) {
  group_and_reduce({.world = 2, .experts = 6, .top_k = 5, .max_tokens = 7, .combine_bytes = 4112},
                   1, false);
  group_and_reduce({.world = 1, .experts = 6, .top_k = 3, .max_tokens = 40, .combine_bytes = 2064},
                   2, true);
}
TEST(EpGrouping, ManyChoicesOfFewTokens) {
  group_and_reduce({.world = 3, .experts = 40, .top_k = 32, .max_tokens = 9}, 1, true);
  group_and_reduce({.world = 2, .tokens = {0}}, 1, true);
  group_and_reduce({.world = 3, .experts = 2, .top_k = 2, .max_tokens = 9}, 1, true);
}
// What is beyond the reach of one block, or of one turn of experts. Rows of 16 bytes.
TEST(EpGrouping, ListsOfManyPiecesAndOfManyExperts) {
  for (const EpRoutingKind kind : {EpRoutingKind::kRandom, EpRoutingKind::kOneExpert})
    group_and_reduce({.world = 1,
                      .experts = 7,
                      .top_k = 8,
                      .max_tokens = 1100,
                      .row_bytes = 16,
                      .combine_bytes = 16,
                      .routing = kind,
                      .tokens = {1090}},
                     3, false);
  group_and_reduce({.world = 2, .experts = 601, .top_k = 6, .max_tokens = 60}, 1, true);
  group_and_reduce({.world = 1,
                    .experts = 300,
                    .top_k = 32,
                    .max_tokens = 260,
                    .row_bytes = 16,
                    .combine_bytes = 16},
                   2, true);
}
TEST(EpGrouping, PiecesGrowWithTheChoicesAndShrinkWithTheExperts) {
  EXPECT_EQ(device::ep_list_pieces(0, 64, 64), 1u);
  EXPECT_EQ(device::ep_list_pieces(4096, 64, 64), 1u);
  EXPECT_EQ(device::ep_list_pieces(4097, 64, 64), 2u);
  EXPECT_EQ(device::ep_list_pieces(131072, 64, 64), 32u);
  EXPECT_EQ(device::ep_list_pieces(131072, 64, 20), 20u);
  EXPECT_EQ(device::ep_list_pieces(131072, 4096, 64), 4u);
  EXPECT_EQ(device::ep_list_pieces(131072, 65536, 64), 1u);
}
TEST(EpGrouping, IsRefusedWithoutAnAlignment) {
  const EpCase c{.world = 1};
  EpGroupRig rig = grouping_rig(c, 0);
  rig.load(EpInputs(c, 1));
  const auto handles = rig.dispatch();
  const auto refused = rig.group().group_rows(handles[0]);
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("expert_alignment = 0"));
  EpGroupRig other = grouping_rig(c);
  EXPECT_THAT(other.group().group_rows(handles[0]).error().message, HasSubstr("another group"));
}

}  // namespace
}  // namespace crossdock::testing
