// Copies beside a dispatch of a group with masks, in the twin: a rank masked beforehand, one that
// does not come, one that comes back, and one that has told everything and does not end well, whose
// copies are made again without it.
// SPDX-License-Identifier: Apache-2.0
#include "ep_expanded_rig.hpp"

namespace crossdock::testing {
namespace {

EpCase mask_case(u32 world) {
  return {.world = world,
          .experts = 2 * world + 1,
          .top_k = 3,
          .max_tokens = 14,
          .row_bytes = 48,
          .scale_bytes = 12,
          .tokens = {14, 3, 9},
          .blocks = {2, 3},
          .fixed = true};
}
// What `rank` has got of both turns.
void check(EpExpandedRig& rig, const EpCase& c, u32 rank, u32 turn, const EpInputs& seen,
           bool beyond = true) {
  ASSERT_NO_FATAL_FAILURE(EpReference(c, seen).check(rank, rig.rig().delivered(rank, turn)))
      << "rank " << rank;
  ASSERT_NO_FATAL_FAILURE(rig.check(rank, turn, beyond)) << "rank " << rank;
}

TEST(EpExpandedMask, PlacesFixedBySource) {
  for (const bool masked : {false, true})
    for (const bool by_column : {false, true}) {
      EpCase c = mask_case(3);
      c.scales_by_column = by_column;
      expand_under_seeds<kFlagged>(c, {.masked = masked, .copy_blocks = 3}, 4);
      if (HasFatalFailure()) return;
    }
  // Gaps of more rows than a warp looks after at a time.
  expand_under_seeds<kFlagged>(
      {.world = 2, .top_k = 1, .max_tokens = 2300, .row_bytes = 16, .tokens = {5}, .fixed = true},
      {.copy_blocks = 1}, 1);
  expand_under_seeds<kFlaggedCast>({.world = 2,
                                    .max_tokens = 9,
                                    .row_bytes = 1024,
                                    .cast = true,
                                    .tokens = {4, 9},
                                    .fixed = true},
                                   {}, 3);
}
TEST(EpExpandedMask, ARankMaskedBeforehandIsLeftOut) {
  for (const u32 world : {2u, 3u, 5u}) {
    const EpCase c = mask_case(world);
    EpExpandedRig rig(c, {});
    for (u32 seed = 1; seed <= kEpSeeds; seed += 2) {
      const u32 gone = seed % world;
      rig.reset();
      std::vector<EpInputs> inputs;
      for (u32 turn = 0; turn < EpRig::kTurns; ++turn) {
        inputs.emplace_back(c, 2 * seed + turn);
        rig.load(inputs[turn], turn);
        for (u32 rank = 0; rank < world; ++rank) {
          rig.rig().mask(rank).ranks = 1u << gone;
          if (rank != gone) rig.launch<kFlagged>(rank, turn);
        }
      }
      ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
      for (u32 turn = 0; turn < EpRig::kTurns; ++turn)
        for (u32 rank = 0; rank < world; ++rank)
          if (rank != gone) {
            ASSERT_NO_FATAL_FAILURE(check(rig, c, rank, turn, inputs[turn].without(gone)))
                << "seed " << seed;
          }
    }
  }
}
TEST(EpExpandedMask, ARankThatStopsIsMaskedAndNotWaitedForAnyLonger) {
  constexpr u32 kRounds = 4;
  for (const u32 world : {2u, 4u}) {
    const EpCase c = mask_case(world);
    EpExpandedRig rig(c, {});
    rig.rig().mask_late();
    for (u32 seed = 1; seed <= kEpSeeds; seed += 2) {
      const u32 gone = seed % world, rounds_of_gone = seed / 2 % kRounds;
      rig.reset();
      std::vector<EpInputs> inputs;
      for (u32 turn = 0; turn < EpRig::kTurns; ++turn) {
        inputs.emplace_back(c, 2 * seed + turn);
        rig.load(inputs[turn], turn);
      }
      for (u32 rank = 0; rank < world; ++rank)
        for (u32 round = 0; round < (rank == gone ? rounds_of_gone : kRounds); ++round)
          rig.launch<kFlagged>(rank, round);
      ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
      for (u32 round = kRounds - EpRig::kTurns; round < kRounds; ++round)
        for (u32 rank = 0; rank < world; ++rank) {
          if (rank == gone) continue;
          SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
          EXPECT_EQ(rig.rig().mask(rank).late, 1u << gone);
          const EpInputs& all = inputs[round % EpRig::kTurns];
          // Earlier rounds may have left copies of more rows behind the places.
          ASSERT_NO_FATAL_FAILURE(
              check(rig, c, rank, round, round < rounds_of_gone ? all : all.without(gone), false));
        }
    }
  }
}
// All blocks of rank 0 have told everything, but of one that the others wait for none knows whether
// its rows are there: so it is masked when the copies have begun, and left out whole.
TEST(EpExpandedMask, CopiesOfARankThatDoesNotEndAreMadeAgainWithoutIt) {
  EpCase c = mask_case(3);
  c.blocks = {2, 3, 3};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed)
    for (const bool masked : {false, true}) {
      EpExpandedRig rig(c, {.masked = masked});
      rig.rig().mask_late();
      const EpInputs all(c, seed);
      rig.load(all, 0);
      for (u32 rank = 1; rank < c.world; ++rank) {
        EpDispatchParams& p = rig.rig().params(rank, 0);
        p.source_blocks[0] = 3;
        for (const EpTold what : {EpTold::kSelections, EpTold::kScales}) {
          const u64 words = (2 + static_cast<u32>(what)) * c.world * u64{p.areas.most_blocks};
          rig.ranks().window<u32>(rank, p.flags.told)[words + 2] = 1;  // of epoch 1, its block 2
        }
      }
      rig.launch_all<kFlagged>(0);
      ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
      EXPECT_EQ(rig.rig().mask(0).ranks, 0u);
      ASSERT_NO_FATAL_FAILURE(check(rig, c, 0, 0, all)) << "seed " << seed;
      for (u32 rank = 1; rank < c.world; ++rank) {
        EXPECT_EQ(rig.rig().mask(rank).late, 1u);
        ASSERT_NO_FATAL_FAILURE(check(rig, c, rank, 0, all.without(0), false)) << "seed " << seed;
      }
    }
}
// Ranks 0 and 1 go apart and let each other in again, with no host in between.
TEST(EpExpandedMask, RanksComeBack) {
  constexpr u32 kRounds = 7;
  const EpCase c = mask_case(3);
  EpExpandedRig rig(c, {});
  for (const u32 apart : {0b0000100u, 0b0011110u, 0b1100011u, 0b0110101u})
    for (u32 seed = 1; seed <= kEpSeeds; seed += 4) {
      rig.reset();
      std::vector<EpInputs> inputs;
      for (u32 turn = 0; turn < EpRig::kTurns; ++turn) {
        inputs.emplace_back(c, 2 * seed + turn);
        rig.load(inputs[turn], turn);
      }
      for (u32 rank = 0; rank < c.world; ++rank)
        for (u32 round = 0; round < kRounds; ++round) {
          if (rank < 2)
            rig.rig().launch_mask(rank, (apart >> round & 1u) << (1 - rank), 1u << (1 - rank));
          rig.launch<kFlagged>(rank, round);
        }
      ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
      for (u32 round = kRounds - EpRig::kTurns; round < kRounds; ++round)
        for (u32 rank = 0; rank < c.world; ++rank) {
          SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
          const EpInputs& all = inputs[round % EpRig::kTurns];
          const bool without = rank < 2 && (apart >> round & 1u) != 0;
          ASSERT_NO_FATAL_FAILURE(
              check(rig, c, rank, round, without ? all.without(1 - rank) : all, false));
        }
    }
}

}  // namespace
}  // namespace crossdock::testing
