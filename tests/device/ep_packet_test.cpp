// A handful of tokens in packets, in the twin: dispatch and combine against the plain reference,
// under schedules with weak memory, several launches at a time with no host in between, in turns
// with the path by flags; halves launched apart; faults.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_small_rig.hpp"

namespace crossdock::testing {
namespace {

template <bool kCast>
void packets_under_all_seeds(EpCase c) {
  c.fixed = true;
  SCOPED_TRACE("world " + std::to_string(c.world) + " top_k " + std::to_string(c.top_k) + " row " +
               std::to_string(c.row_bytes));
  EpSmallRig rig(c);
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    std::vector<EpInputs> inputs;
    for (u32 turn = 0; turn < EpSmallRig::kSlots; ++turn) {
      inputs.emplace_back(c, seed * EpSmallRig::kSlots + turn);
      rig.load(inputs[turn], turn);
      for (u32 rank = 0; rank < c.world; ++rank)
        rig.launch_packets<kCast>(rank, turn);
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 turn = 0; turn < EpSmallRig::kSlots; ++turn)
      for (u32 rank = 0; rank < c.world; ++rank)
        ASSERT_NO_FATAL_FAILURE(EpReference(c, inputs[turn]).check(rank, rig.delivered(rank, turn)))
            << "seed " << seed << " turn " << turn;
  }
}

TEST(EpPackets, EveryWorldUnderSixteenSchedules) {
  for (const u32 world : {1u, 2u, 3u, 4u, 5u, 8u}) {
    packets_under_all_seeds<false>({.world = world,
                                    .experts = 2 * world + 3,
                                    .top_k = 4,
                                    .max_tokens = 6,
                                    .row_bytes = 48,
                                    .scale_bytes = 12,
                                    .blocks = {2, 1}});
    if (HasFatalFailure()) return;
  }
}
TEST(EpPackets, ThirtyTwoRanksOneToken) {
  packets_under_all_seeds<false>(
      {.world = 32, .experts = 50, .top_k = 4, .max_tokens = 1, .row_bytes = 16, .blocks = {1}});
}
TEST(EpPackets, LargeRowsWideIdsScalesByColumnThirtyTwoTokens) {
  packets_under_all_seeds<false>({.world = 2,
                                  .experts = 9,
                                  .top_k = 3,
                                  .max_tokens = 32,
                                  .row_bytes = 2064,
                                  .scale_bytes = 64,
                                  .scales_by_column = true,
                                  .wide_ids = true,
                                  .weights = false,
                                  .tokens = {32, 0}});
}
TEST(EpPackets, CastsToFp8) {
  for (const u32 values : {128u, 640u, 1152u}) {
    packets_under_all_seeds<true>({.world = 3,
                                   .max_tokens = 5,
                                   .row_bytes = values * 2,
                                   .scales_by_column = values == 640,
                                   .cast = true});
    if (HasFatalFailure()) return;
  }
}
TEST(EpPackets, EveryTopKAndRouting) {
  for (const u32 top_k : {1u, 9u, 32u})
    packets_under_all_seeds<false>(
        {.world = 2, .experts = 64, .top_k = top_k, .max_tokens = 4, .row_bytes = 16});
  for (const EpRoutingKind kind :
       {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed})
    packets_under_all_seeds<false>({.world = 4, .max_tokens = 5, .routing = kind});
}

// Dispatch in packets or by flags, experts, combine in packets, in turns, all queued at once.
void rounds(const EpCase& c, u32 seed, bool halves) {
  const u32 num_rounds = c.world > 8 ? 2 : 5;
  EpSmallRig rig(c);
  std::vector<u8*> outputs;
  for (u32 i = 0; i < num_rounds * c.world; ++i)
    outputs.push_back(rig.ranks().local<u8>(i % c.world, u64{c.max_tokens} * c.combine_bytes + 16));
  std::vector<EpInputs> inputs;
  for (u32 slot = 0; slot < EpSmallRig::kSlots; ++slot) {
    inputs.emplace_back(c, seed * EpSmallRig::kSlots + slot);
    rig.load(inputs[slot], slot);
  }
  using Half = EpSmallRig::Half;
  for (u32 rank = 0; rank < c.world; ++rank)
    for (u32 round = 0; round < num_rounds; ++round) {
      u8* rows = outputs[round * c.world + rank];
      const bool packets = (round + seed) % 3 != 0;
      for (const Half half : halves ? std::vector<Half>{Half::kSend, Half::kReceive}
                                    : std::vector<Half>{Half::kBoth}) {
        if (packets) rig.launch_packets<false>(rank, round, half);
        if (!packets) rig.launch<kSmallPlain>(rank, round, half);
      }
      rig.launch_experts(rank, round, round);
      for (const Half half :
           halves ? std::vector<Half>{Half::kSend, Half::kReceive} : std::vector<Half>{Half::kBoth})
        rig.launch_packet_combine(rank, round, rows, half);
    }
  ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
  for (u32 round = 0; round < num_rounds; ++round)
    for (u32 rank = 0; rank < c.world; ++rank) {
      const EpReference reference(c, inputs[round % EpSmallRig::kSlots]);
      ASSERT_NO_FATAL_FAILURE(
          reference.check_combined(rank, outputs[round * c.world + rank], round))
          << "seed " << seed;
      if (round + EpSmallRig::kSlots >= num_rounds) {
        ASSERT_NO_FATAL_FAILURE(
            reference.check_weights(rank, rig.combined(rank, round).output.weights));
      }
    }
}
TEST(EpPackets, RoundsWithCombineInEveryWorld) {
  for (const u32 world : {1u, 2u, 3u, 4u, 5u, 8u, 32u})
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      SCOPED_TRACE("world " + std::to_string(world));
      ASSERT_NO_FATAL_FAILURE(rounds({.world = world,
                                      .experts = 2 * world + 3,
                                      .max_tokens = world > 8   ? 1u
                                                    : world > 5 ? 2u
                                                                : 5u,
                                      .combine_bytes = world > 8 ? 16u : 208u,
                                      .blocks = {world > 8 ? 1u : 2u, 1},
                                      .fixed = true},
                                     seed, seed % 2 == 0));
    }
}

// ---- after very many of them -------------------------------------------------------------------

// Rounds in one slot, in packets or by flags, of dispatch, experts and combine.
struct OneSlot {
  const EpCase c{.world = 3,
                 .experts = 9,
                 .max_tokens = 5,
                 .combine_bytes = 208,
                 .combine_weights = false,
                 .blocks = {2, 1},
                 .fixed = true};
  EpSmallRig rig{c};
  u32 round = 0;

  void run_and_check(u32 rounds, bool packets, u32 seed) {
    const EpInputs inputs(c, seed);
    rig.load(inputs, 0);
    std::vector<u8*> outputs;
    for (u32 i = 0; i < rounds; ++i)
      for (u32 rank = 0; rank < c.world; ++rank) {
        outputs.push_back(rig.ranks().local<u8>(rank, u64{c.max_tokens} * c.combine_bytes));
        if (packets) rig.launch_packets<false>(rank, 0);
        if (!packets) rig.launch<kSmallPlain>(rank, 0);
        rig.launch_experts(rank, 0, round + i);
        if (packets) rig.launch_packet_combine(rank, 0, outputs.back());
        if (!packets) rig.launch_combine(rank, 0, outputs.back());
      }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 i = 0; i < rounds; ++i)
      for (u32 rank = 0; rank < c.world; ++rank)
        ASSERT_NO_FATAL_FAILURE(
            EpReference(c, inputs).check_combined(rank, outputs[i * c.world + rank], round + i));
    round += rounds;
  }
};

// Combines by flags deal tokens by tickets, which the combine before has to have set back.
TEST(EpPackets, TakeTurnsWithCombinesByFlagsInOneSlot) {
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    OneSlot slot;
    for (const u32 packets : {1u, 2u, 1u}) {
      ASSERT_NO_FATAL_FAILURE(slot.run_and_check(1, false, seed));
      ASSERT_NO_FATAL_FAILURE(slot.run_and_check(packets, true, seed));
    }
    ASSERT_NO_FATAL_FAILURE(slot.run_and_check(1, false, seed));
  }
}
// Words that announce rows have 16 bits of the epoch. Those that a combine by flags has left must
// not be taken for those of the next one, when as many have travelled in packets since.
TEST(EpPackets, AnnouncementsOfLongAgoAreNotTakenForNewOnes) {
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    OneSlot slot;
    ASSERT_NO_FATAL_FAILURE(slot.run_and_check(2, false, seed));
    slot.rig.in_packets_so_far(2, 3 * kEpPacketsFollowEvery - 1);
    ASSERT_NO_FATAL_FAILURE(slot.run_and_check(3, true, seed));
    slot.rig.in_packets_so_far(5, 1u << 16);
    ASSERT_NO_FATAL_FAILURE(slot.run_and_check(2, false, seed));
  }
}
TEST(EpPackets, NowAndThenRanksTellWhatTheyHaveRead) {
  for (const u32 epoch : {kEpPacketsFollowEvery, 1u << 31, 3u << 30}) {
    SCOPED_TRACE(epoch);
    OneSlot slot;
    slot.rig.in_packets_so_far(0, epoch - 1);
    ASSERT_NO_FATAL_FAILURE(slot.run_and_check(2, true, 1));
    for (u32 rank = 0; rank < slot.c.world; ++rank)
      for (u32 source = 0; source < slot.c.world; ++source)
        EXPECT_EQ(slot.rig.told_reads(rank, 0, source), epoch) << rank << " by " << source;
  }
}
// Words of a dispatch have all 32 bits, and one that is ahead is a fault.
TEST(EpPackets, WordsOfADispatchOfLongAgoAreNotAhead) {
  for (const u32 since : {1u << 31, 3u << 30, ~0u << 20}) {
    OneSlot slot;
    ASSERT_NO_FATAL_FAILURE(slot.run_and_check(2, false, 1));
    slot.rig.in_packets_so_far(since, 2);
    ASSERT_NO_FATAL_FAILURE(slot.run_and_check(2, true, 2));
    ASSERT_NO_FATAL_FAILURE(slot.run_and_check(2, false, 3));
  }
}

// ---- faults ------------------------------------------------------------------------------------

TEST(EpPackets, AnIdOutOfRangeIsNamedAtItsRankAndItsRankAtAllOthers) {
  const EpCase c{.world = 4, .max_tokens = 6, .fixed = true};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    const u32 bad = seed % c.world;
    EpSmallRig rig(c);
    rig.load(EpInputs(c, seed), 0);
    rig.set_id(rig.params(bad, 0), c.top_k + 1, c.experts);
    for (u32 rank = 0; rank < c.world; ++rank)
      rig.launch_packets<false>(rank, 0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(rank));
      expect_fault(rig.ranks().fault(rank), KernelId::kEpSmallDispatch,
                   rank == bad ? Phase::kRouting : Phase::kPeerRouting, rank, bad);
    }
  }
}
TEST(EpPackets, AMissingRankIsNamedByAllOthersInDispatchAndInCombine) {
  const EpCase c{.world = 3, .max_tokens = 4, .combine_weights = false, .fixed = true};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    const u32 missing = seed % c.world;
    const bool dispatches = seed % 2 == 0;
    EpSmallRig rig(c);
    rig.load(EpInputs(c, seed), 0);
    for (u32 rank = 0; rank < c.world; ++rank) {
      if (rank == missing && !dispatches) continue;
      rig.launch_packets<false>(rank, 0);
      if (rank == missing || !dispatches) continue;
      rig.launch_experts(rank, 0, 0);
      rig.launch_packet_combine(rank, 0,
                                rig.ranks().local<u8>(rank, u64{c.max_tokens} * c.combine_bytes));
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(fault_schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      if (rank == missing) continue;
      SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(rank));
      expect_fault(rig.ranks().fault(rank),
                   dispatches ? KernelId::kEpCombine : KernelId::kEpSmallDispatch,
                   Phase::kEpochWord, rank, missing);
    }
  }
}

}  // namespace
}  // namespace crossdock::testing
