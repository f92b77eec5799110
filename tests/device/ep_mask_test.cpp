// Masked ranks in the twin, on both paths: masked before, masked by kernels because
// they do not come, at every step and for one wait; ranks that disagree; the others get all that is
// not theirs.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_small_rig.hpp"

namespace crossdock::testing {
namespace {

constexpr u32 kTokens = 12;

EpCase mask_case(u32 world) {
  return {.world = world,
          .experts = 2 * world + 1,
          .top_k = 3,
          .max_tokens = kTokens,
          .combine_bytes = 208,
          .combine_weights = false,
          .blocks = {2, 3},
          .fixed = true};
}

struct SmallPath {
  using Rig = EpSmallRig;
  static void dispatch(Rig& rig, u32 rank, u32 turn) { rig.launch<kSmallPlain>(rank, turn); }
  static void combine(Rig& rig, u32 rank, u32 turn, u8* rows) {
    rig.launch_combine(rank, turn, rows);
  }
};
struct LargePath {
  using Rig = EpRig;
  static void dispatch(Rig& rig, u32 rank, u32 turn) { rig.launch<kPlain>(rank, turn); }
  static void combine(Rig& rig, u32 rank, u32 turn, u8* rows) {
    rig.launch_combine<kPull>(rank, turn, rows);
  }
};

// Rounds in which `gone` takes part up to a step.
template <class Path>
struct MaskedRounds {
  static constexpr u32 kRounds = 4;
  EpCase c;
  typename Path::Rig rig;
  std::vector<u8*> outputs;  // [round][rank]

  explicit MaskedRounds(u32 world) : c(mask_case(world)), rig(c) {
    for (u32 i = 0; i < kRounds * world; ++i)
      outputs.push_back(
          rig.ranks().template local<u8>(i % world, u64{kTokens} * c.combine_bytes + 16));
  }
  // Steps of `gone`: dispatch and combine of each round; all others take all of them.
  void run(u32 seed, u32 gone, u32 steps_of_gone) {
    for (u32 slot = 0; slot < EpSmallRig::kSlots; ++slot)
      rig.load(EpInputs(c, seed + slot), slot);
    for (u32 rank = 0; rank < c.world; ++rank) {
      u32 left = rank == gone ? steps_of_gone : 2 * kRounds;
      for (u32 round = 0; round < kRounds && left != 0; ++round) {
        Path::dispatch(rig, rank, round);
        if (--left == 0) break;
        --left;
        rig.launch_experts(rank, round, round);
        Path::combine(rig, rank, round, outputs[round * c.world + rank]);
      }
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
  }
  // Round `round` of all but `gone`, which took part in its dispatch, in its combine, or not.
  void check(u32 seed, u32 gone, u32 round, bool dispatched, bool combined) {
    const EpInputs all(c, seed + round % EpSmallRig::kSlots);
    const EpInputs rows = dispatched ? all : all.without(gone);
    const EpInputs sums = combined ? all : all.without(gone);
    for (u32 rank = 0; rank < c.world; ++rank) {
      if (rank == gone) continue;
      SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
      if (round >= kRounds - EpSmallRig::kSlots) {
        ASSERT_NO_FATAL_FAILURE(EpReference(c, rows).check(rank, rig.delivered(rank, round)));
      }
      ASSERT_NO_FATAL_FAILURE(
          EpReference(c, sums).check_combined(rank, outputs[round * c.world + rank], round));
    }
  }
};

template <class Path>
void masked_beforehand() {
  for (const u32 world : {2u, 3u, 5u}) {
    MaskedRounds<Path> rounds(world);
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      const u32 gone = seed % world;
      rounds.rig.reset();
      for (u32 rank = 0; rank < world; ++rank)
        if (rank != gone) rounds.rig.mask(rank).ranks = 1u << gone;
      ASSERT_NO_FATAL_FAILURE(rounds.run(seed, gone, 0));
      for (u32 round = 0; round < rounds.kRounds; ++round)
        ASSERT_NO_FATAL_FAILURE(rounds.check(seed, gone, round, false, false));
    }
  }
}
TEST(EpMask, ARankMaskedBeforehandIsLeftOutBothWays) {
  masked_beforehand<SmallPath>();
}
TEST(EpMask, ARankMaskedBeforehandIsLeftOutBothWaysOfManyTokens) {
  masked_beforehand<LargePath>();
}

template <class Path>
void stops_at_any_step() {
  for (const u32 world : {2u, 4u}) {
    MaskedRounds<Path> rounds(world);
    rounds.rig.mask_late();
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      const u32 gone = seed % world;
      const u32 steps = seed % (2 * rounds.kRounds);
      SCOPED_TRACE("steps " + std::to_string(steps));
      rounds.rig.reset();
      ASSERT_NO_FATAL_FAILURE(rounds.run(seed, gone, steps));
      for (u32 round = 0; round < rounds.kRounds; ++round)
        ASSERT_NO_FATAL_FAILURE(
            rounds.check(seed, gone, round, 2 * round < steps, 2 * round + 1 < steps));
      for (u32 rank = 0; rank < world; ++rank) {
        if (rank == gone) continue;
        EXPECT_EQ(rounds.rig.mask(rank).ranks, 1u << gone);
        EXPECT_EQ(rounds.rig.mask(rank).late, 1u << gone);
      }
    }
  }
}
TEST(EpMask, ARankThatStopsAtAnyStepIsMaskedByTheOthersThatGoOn) {
  stops_at_any_step<SmallPath>();
}
TEST(EpMask, ARankThatStopsAtAnyStepOfManyTokensIsMaskedByTheOthersThatGoOn) {
  stops_at_any_step<LargePath>();
}
// Time stands still while a thread can do anything and then runs ahead by doubling, so a wait of
// this long, or of half as long again, takes until 2.097 s have passed, whoever else begins to wait
// meanwhile; what follows that wait starts anew.
constexpr u64 kLongWait = 1'300 * kMillisecond;
constexpr u64 kTakes = 2'097 * kMillisecond;

// However many launches and waits of a launch there are in which the rank that is gone is missed.
template <class Path>
void one_wait_is_all() {
  for (const u32 world : {2u, 4u}) {
    MaskedRounds<Path> rounds(world);
    rounds.rig.mask_late();
    for (u32 rank = 0; rank < world; ++rank)
      for (u32 turn = 0; turn < 2; ++turn)
        rounds.rig.params(rank, turn).common.deadline_ns =
            rounds.rig.combined(rank, turn).common.deadline_ns = kLongWait;
    for (u32 steps = 0; steps < 2 * rounds.kRounds; ++steps) {
      SCOPED_TRACE("world " + std::to_string(world) + " steps " + std::to_string(steps));
      rounds.rig.reset();
      const u32 gone = steps % world;
      ASSERT_NO_FATAL_FAILURE(rounds.run(steps + 1, gone, steps));
      const u64 took = rounds.rig.ranks().virtual_ns();
      EXPECT_GE(took, kLongWait);
      EXPECT_LT(took, kTakes + kTakes / 2) << "so the others have waited twice";
      EXPECT_EQ(rounds.rig.mask((gone + 1) % world).late, 1u << gone);
    }
  }
}
TEST(EpMask, ARankThatStopsCostsTheOthersOneWait) {
  one_wait_is_all<SmallPath>();
}
TEST(EpMask, ARankThatStopsCostsTheOthersOfManyTokensOneWait) {
  one_wait_is_all<LargePath>();
}
// Rank 0 masks rank 1, which learns of it by waiting. The others see both.
template <class Path>
void ranks_disagree() {
  const EpCase c = mask_case(4);
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    typename Path::Rig rig(c);
    rig.mask_late();
    rig.mask(0).ranks = 2;
    const EpInputs all(c, seed);
    rig.load(all, 0);
    for (u32 rank = 0; rank < c.world; ++rank)
      Path::dispatch(rig, rank, 0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
    EXPECT_EQ(rig.mask(1).ranks, 1u);
    for (u32 rank = 0; rank < c.world; ++rank) {
      if (rank > 1) {
        EXPECT_EQ(rig.mask(rank).ranks, 0u);
      }
      const EpInputs seen = rank > 1 ? all : all.without(1 - rank);
      ASSERT_NO_FATAL_FAILURE(EpReference(c, seen).check(rank, rig.delivered(rank, 0)))
          << "seed " << seed;
    }
  }
}
TEST(EpMask, RanksMayDisagreeAboutWhoIsMasked) {
  ranks_disagree<SmallPath>();
}
// Ranks 0 and 1 mask each other, beforehand; the others see both.
TEST(EpMask, RanksWithManyTokensMayDisagreeAboutWhoIsMasked) {
  const EpCase c = mask_case(4);
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    EpRig rig(c);
    rig.mask(0).ranks = 2;
    rig.mask(1).ranks = 1;
    const EpInputs all(c, seed);
    rig.load(all, 0);
    rig.launch_all<kPlain>(0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      const EpInputs seen = rank > 1 ? all : all.without(1 - rank);
      ASSERT_NO_FATAL_FAILURE(EpReference(c, seen).check(rank, rig.delivered(rank, 0)))
          << "seed " << seed;
    }
  }
}
// All others are masked: a rank alone.
TEST(EpMask, ARankGoesOnAlone) {
  MaskedRounds<SmallPath> rounds(3);
  for (u32 rank = 0; rank < 3; ++rank)
    rounds.rig.mask(rank).ranks = 7u & ~(1u << rank);
  ASSERT_NO_FATAL_FAILURE(rounds.run(1, kNoPeer, 0));
  for (u32 round = 0; round < rounds.kRounds; ++round) {
    const EpInputs all(rounds.c, 1 + round % EpSmallRig::kSlots);
    for (u32 rank = 0; rank < 3; ++rank) {
      const EpInputs own = all.without((rank + 1) % 3).without((rank + 2) % 3);
      ASSERT_NO_FATAL_FAILURE(
          EpReference(rounds.c, own).check_combined(rank, rounds.outputs[round * 3 + rank], round));
    }
  }
}

}  // namespace
}  // namespace crossdock::testing
