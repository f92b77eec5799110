// Dispatch and combine of few tokens in the twin: every world, payload and routing against the
// plain reference, under schedules with weak memory, several launches at a time with no host in
// between; halves launched apart; faults.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_small_rig.hpp"

namespace crossdock::testing {
namespace {

TEST(EpSmall, EveryWorldUnderSixteenSchedules) {
  for (u32 world : {1u, 2u, 3u, 4u, 5u, 8u}) {
    small_under_all_seeds<kSmallPlain>({.world = world,
                                        .experts = 2 * world + 3,
                                        .top_k = 4,
                                        .max_tokens = 40,
                                        .row_bytes = 48,
                                        .scale_bytes = 12,
                                        .blocks = {3, 2, 1}});
    if (HasFatalFailure()) return;
  }
}
TEST(EpSmall, ThirtyTwoRanks) {
  small_under_all_seeds<kSmallPlain>(
      {.world = 32, .experts = 50, .top_k = 8, .max_tokens = 6, .row_bytes = 16, .blocks = {1, 2}});
}
TEST(EpSmall, WideIdsLargeRowsScalesByColumn) {
  small_under_all_seeds<kSmallPlain>({.world = 3,
                                      .experts = 9,
                                      .top_k = 3,
                                      .max_tokens = 35,
                                      .row_bytes = 2064,
                                      .scale_bytes = 64,
                                      .scales_by_column = true,
                                      .wide_ids = true,
                                      .weights = false});
}
TEST(EpSmall, CastsToFp8) {
  for (u32 values : {128u, 640u, 1152u}) {
    small_under_all_seeds<kSmallCast>(
        {.world = 4, .max_tokens = 14, .row_bytes = values * 2, .cast = true});
    if (HasFatalFailure()) return;
  }
  small_under_all_seeds<kSmallCast>(
      {.world = 3, .max_tokens = 14, .row_bytes = 1280, .scales_by_column = true, .cast = true});
}
TEST(EpSmall, CastsToFp8WithScalesOfOneByte) {
  for (const bool by_column : {false, true})
    small_under_all_seeds<kSmallCast>({.world = 2,
                                       .max_tokens = 9,
                                       .row_bytes = 1280,
                                       .scales_by_column = by_column,
                                       .cast = true,
                                       .cast_ue8m0 = true});
}
TEST(EpSmall, TokenCountsDifferAndMayBeZero) {
  small_under_all_seeds<kSmallPlain>({.world = 4, .max_tokens = 33, .tokens = {0, 1, 17, 33}});
  small_under_all_seeds<kSmallPlain>({.world = 3, .tokens = {0}});
  small_under_all_seeds<kSmallPlain>({.world = 2, .tokens = {1}, .blocks = {4, 1}});
}
TEST(EpSmall, EveryTopK) {
  for (u32 top_k : {1u, 2u, 9u, 32u}) {
    small_under_all_seeds<kSmallPlain>(
        {.world = 2, .experts = 64, .top_k = top_k, .max_tokens = 9, .row_bytes = 16});
    if (HasFatalFailure()) return;
  }
}
TEST(EpSmall, AllToOneExpertAllMaskedSkewedFewerExpertsThanRanks) {
  for (EpRoutingKind kind :
       {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed}) {
    small_under_all_seeds<kSmallPlain>({.world = 4, .max_tokens = 21, .routing = kind});
    if (HasFatalFailure()) return;
  }
  small_under_all_seeds<kSmallPlain>({.world = 5, .experts = 3, .max_tokens = 9});
}

TEST(EpSmall, RoundsWithCombineInEveryWorld) {
  for (u32 world : {1u, 2u, 3u, 4u, 5u, 8u, 32u}) {
    SCOPED_TRACE(world);
    SmallRounds rounds({.world = world,
                        .experts = 2 * world + 3,
                        .top_k = 4,
                        .max_tokens = world > 8 ? 1u : 20u,
                        .combine_bytes = world > 8 ? 16u : 208u,
                        .combine_weights = false,
                        .blocks = {world > 8 ? 1u : 3u, world > 8 ? 1u : 2u, 1}});
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      ASSERT_NO_FATAL_FAILURE(rounds.run_and_check(seed));
    }
  }
}

// Else a rank that never reads again would be taken to have read what is 2^31 combines later.
TEST(EpSmall, OnceInAMillionCombinesRanksTellWhatTheyHaveRead) {
  const EpCase c{.world = 3,
                 .experts = 9,
                 .top_k = 4,
                 .max_tokens = 20,
                 .combine_bytes = 208,
                 .combine_weights = false,
                 .blocks = {3, 2, 1}};
  for (const u32 epoch : {kEpFollowEvery, 2048u * kEpFollowEvery, 0u}) {
    SCOPED_TRACE(epoch);
    SmallRounds rounds(c);
    rounds.rig.combined_so_far(epoch - 2);
    ASSERT_NO_FATAL_FAILURE(rounds.run_and_check(1));
    for (u32 i = 0; i < EpSmallRig::kSlots * c.world * c.world; ++i)
      EXPECT_EQ(rounds.rig.told_reads(i % c.world, i / c.world / c.world, i / c.world % c.world),
                epoch - 1);
  }
}

// ---- faults ------------------------------------------------------------------------------------

void expect_works_after_reset(EpSmallRig& rig, u32 seed) {
  const EpCase& c = rig.of();
  rig.reset();
  const EpInputs inputs(c, seed);
  rig.load(inputs, 1);
  rig.launch_all<kSmallPlain>(1);
  ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
  for (u32 rank = 0; rank < c.world; ++rank)
    ASSERT_NO_FATAL_FAILURE(EpReference(c, inputs).check(rank, rig.delivered(rank, 1)));
}

TEST(EpSmall, AnIdOutOfRangeIsNamedAtItsRankAndItsRankAtAllOthers) {
  const EpCase c{.world = 4, .max_tokens = 40, .blocks = {2, 3}, .fixed = true};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    const u32 bad = seed % c.world;
    const i64 id = seed % 2 == 0 ? c.experts : -2 - static_cast<i64>(seed);
    const u32 token = seed * 5 % c.tokens_of(bad);
    EpSmallRig rig(c);
    rig.load(EpInputs(c, seed), 0);
    rig.set_id(rig.params(bad, 0), u64{token} * c.top_k + 1, id);
    rig.launch_all<kSmallPlain>(0);
    // No deadline has to pass.
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      const FaultRecord& fault = rig.ranks().fault(rank);
      SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(rank));
      expect_fault(fault, KernelId::kEpSmallDispatch,
                   rank == bad ? Phase::kRouting : Phase::kPeerRouting, rank, bad);
      if (rank != bad) continue;
      EXPECT_EQ(fault.expected, token);
      EXPECT_EQ(static_cast<i64>(fault.seen), id);
    }
    ASSERT_NO_FATAL_FAILURE(expect_works_after_reset(rig, seed));
  }
}
TEST(EpSmall, AMissingRankIsNamedByAllOthers) {
  const EpCase c{.world = 4, .max_tokens = 40, .fixed = true};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    const u32 missing = seed % c.world;
    EpSmallRig rig(c);
    rig.load(EpInputs(c, seed), 0);
    for (u32 rank = 0; rank < c.world; ++rank)
      if (rank != missing) rig.launch<kSmallPlain>(rank, 0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(fault_schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      if (rank == missing) continue;
      SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(rank));
      expect_fault(rig.ranks().fault(rank), KernelId::kEpSmallDispatch, Phase::kEpochWord, rank,
                   missing);
    }
    ASSERT_NO_FATAL_FAILURE(expect_works_after_reset(rig, seed));
  }
}
TEST(EpSmall, RanksWithRowsOfDifferentShapesNameEachOther) {
  const EpCase c{.world = 2, .max_tokens = 8, .fixed = true};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    EpSmallRig rig(c);
    rig.load(EpInputs(c, seed), 0);
    EpCase other = c;
    other.row_bytes = 32;
    EpSmallParams& p = rig.params(1, 0);
    p.output = other.output();
    p.input.row_bytes = p.output.row_bytes;
    rig.launch_all<kSmallPlain>(0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(schedule(seed)));
    // Each finds it by itself, or is told by the other, which has.
    u32 found = 0;
    for (u32 rank = 0; rank < c.world; ++rank) {
      const FaultRecord& fault = rig.ranks().fault(rank);
      ASSERT_EQ(fault.state, FaultRecord::kWritten) << "seed " << seed << " rank " << rank;
      if (fault.phase == Phase::kPeerRouting) continue;
      ++found;
      expect_fault(fault, KernelId::kEpSmallDispatch, Phase::kShape, rank, 1 - rank);
      EXPECT_EQ(fault.expected, rank == 0 ? 64u : 32u);
      EXPECT_EQ(fault.seen, rank == 0 ? 32u : 64u);
    }
    EXPECT_GE(found, 1u);
  }
}

}  // namespace
}  // namespace crossdock::testing
