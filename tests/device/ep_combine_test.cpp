// ep_combine in the twin: dispatch, experts and combine in a row, several rounds with no host in
// between, against sums made in the same order; parts, biases, weights, faults.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_rounds.hpp"

namespace crossdock::testing {
namespace {

void combine_under_all_seeds(const EpCase& c, u32 parts_per_ticket = 0, bool table = false) {
  SCOPED_TRACE("world " + std::to_string(c.world) + " row " + std::to_string(c.combine_bytes));
  Rounds rounds(c, table);
  for (u32 seed = 1; seed <= kEpSeeds; ++seed)
    ASSERT_NO_FATAL_FAILURE(rounds.run_and_check(seed, parts_per_ticket));
}

TEST(EpCombine, EveryWorldUnderSixteenSchedules) {
  for (u32 world : {1u, 2u, 3u, 4u, 5u, 8u}) {
    combine_under_all_seeds({.world = world,
                             .experts = 2 * world + 1,
                             .max_tokens = 20,
                             .row_bytes = 16,
                             .combine_bytes = 112,
                             .blocks = {2, 1}},
                            0, world == 3);
    if (HasFatalFailure()) return;
  }
}
TEST(EpCombine, ThirtyTwoRanks) {
  combine_under_all_seeds({.world = 32,
                           .experts = 40,
                           .top_k = 8,
                           .max_tokens = 5,
                           .row_bytes = 16,
                           .combine_bytes = 48,
                           .blocks = {1}});
}
TEST(EpCombine, RowsOfManyPartsWithTwoBiases) {
  combine_under_all_seeds(
      {.world = 4, .max_tokens = 9, .row_bytes = 16, .combine_bytes = 656, .biases = 2});
}
TEST(EpCombine, TicketsOfSinglePartsWithOneBias) {
  combine_under_all_seeds(
      {.world = 3, .max_tokens = 9, .row_bytes = 16, .combine_bytes = 528, .biases = 1}, 1);
  combine_under_all_seeds({.world = 3, .max_tokens = 9, .row_bytes = 16, .combine_bytes = 528}, 2);
}
TEST(EpCombine, TokensOfManyRows) {
  combine_under_all_seeds({.world = 8,
                           .experts = 8,
                           .top_k = 16,
                           .max_tokens = 6,
                           .row_bytes = 16,
                           .combine_bytes = 96});
}
TEST(EpCombine, TokenCountsDifferAndMayBeZero) {
  combine_under_all_seeds({.world = 4, .max_tokens = 9, .row_bytes = 16, .tokens = {0, 1, 9, 3}});
  combine_under_all_seeds({.world = 3, .row_bytes = 16, .tokens = {0}});
}
// What was pulled before this slot's last use lies more than 2^31 behind, or is about to.
TEST(EpCombine, ASlotThatWasLeftAloneForBillionsOfPullsIsFree) {
  const EpCase c{.world = 3, .max_tokens = 9, .row_bytes = 16, .blocks = {2, 3}};
  for (const u32 epoch : {1536u * kEpFollowEvery, 1024u * kEpFollowEvery, ~0u << 20}) {
    SCOPED_TRACE(epoch);
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      Rounds rounds(c);
      rounds.rig.combined_so_far(epoch - 1);
      ASSERT_NO_FATAL_FAILURE(rounds.run_and_check(seed, 0));
    }
  }
}
TEST(EpCombine, WhatASlotAsksForFollows) {
  EXPECT_EQ(ep_followed(5, 9), 5u);
  EXPECT_EQ(ep_followed(0, 1u << 30), 0u);
  EXPECT_EQ(ep_followed(0, (1u << 30) + 1), 1u);
  EXPECT_EQ(ep_followed(~0u - 3, 7), ~0u - 3);
  EXPECT_EQ(ep_followed(3u << 30, 1u << 31), 1u << 30);
}
TEST(EpCombine, AllMaskedGivesTheBias) {
  combine_under_all_seeds({.world = 2,
                           .max_tokens = 5,
                           .row_bytes = 16,
                           .biases = 1,
                           .routing = EpRoutingKind::kAllMasked});
}

TEST(EpCombine, AMissingRankIsNamedByAllOthers) {
  const EpCase c{.world = 3, .max_tokens = 12, .row_bytes = 16};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    Rounds rounds(c);
    ASSERT_NO_FATAL_FAILURE(rounds.check_missing_rank<kPull>(seed));
  }
}

// A peer that has not read the rows of a slot holds the next dispatch into that slot back.
TEST(EpCombine, ASlotThatIsStillReadIsNamedWithItsReader) {
  const EpCase c{.world = 2, .max_tokens = 12, .row_bytes = 16};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    Rounds rounds(c);
    EpRig& rig = rounds.rig;
    rig.load(EpInputs(c, seed), 0);
    rig.launch_all<kPlain>(0);
    for (u32 rank = 0; rank < c.world; ++rank) {
      rig.launch_experts(rank, 0, 0);
      rig.launch_combine<kPull>(rank, 0, rounds.outputs[rank]);
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    ++rig.params(0, 0).state->free_at[0][1];  // as if rank 1 had one block more to go
    rig.launch_all<kPlain>(0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(fault_schedule(seed)));
    expect_fault(rig.ranks().fault(0), KernelId::kEpDispatch, Phase::kSlotFree, 0, 1);
  }
}

}  // namespace
}  // namespace crossdock::testing
