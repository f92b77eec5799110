// ep_dispatch_expanded in the twin: rows copied to their places while others are on their way,
// under sixteen schedules with weak memory, two launches at a time, against plain loops.
// SPDX-License-Identifier: Apache-2.0
#include "ep_expanded_rig.hpp"

namespace crossdock::testing {
namespace {

TEST(EpExpandedDispatch, EveryWorld) {
  for (const u32 world : kWorlds) {
    expand_under_seeds<kFlagged>({.world = world,
                                  .experts = 2 * world + 3,
                                  .max_tokens = world > 8   ? 1u
                                                : world > 3 ? 5u
                                                            : 18u,
                                  .row_bytes = 64,
                                  .scale_bytes = 12,
                                  .blocks = {world > 8 ? 1u : 2u}},
                                 {.copy_blocks = world > 8 ? 1u : 2u});
    if (HasFatalFailure()) return;
  }
}
TEST(EpExpandedDispatch, EveryLayoutOfEveryRouting) {
  u32 turn = 0;
  for (const EpRoutingKind kind : {EpRoutingKind::kRandom, EpRoutingKind::kOneExpert,
                                   EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed})
    for (const bool masked : {false, true}) {
      ++turn;
      expand_under_seeds<kFlagged>({.world = 2,
                                    .experts = 7,
                                    .max_tokens = 22,
                                    .row_bytes = 48,
                                    .scale_bytes = 12,
                                    .scales_by_column = turn % 3 == 0,
                                    .routing = kind},
                                   {.masked = masked, .scales_by_column = turn % 2 == 0}, 4);
      if (HasFatalFailure()) return;
    }
}
// Rings of notes and stages come round; rows are cut into parts; a warp has more than 32 rows.
TEST(EpExpandedDispatch, ManyRowsInParts) {
  expand_under_seeds<kFlagged>({.world = 2, .max_tokens = 200, .row_bytes = 16}, {}, 2);
  expand_under_seeds<kFlagged>({.world = 3, .max_tokens = 40, .row_bytes = 400},
                               {.copy_blocks = 3, .alignment = 1}, 4);
  expand_under_seeds<kFlagged>({.world = 1, .top_k = 2, .max_tokens = 2300, .row_bytes = 16},
                               {.copy_blocks = 1}, 1);
}
TEST(EpExpandedDispatch, CastRowsBringTheirScales) {
  for (const bool by_column : {false, true})
    expand_under_seeds<kFlaggedCast>({.world = 3,
                                      .max_tokens = 18,
                                      .row_bytes = 1024,
                                      .scales_by_column = by_column,
                                      .cast = true},
                                     {.scales_by_column = by_column}, 6);
}
TEST(EpExpandedDispatch, NoTokensUnevenTokensOneTokenManyChoices) {
  expand_under_seeds<kFlagged>({.world = 3, .tokens = {0}}, {}, 4);
  expand_under_seeds<kFlagged>({.world = 3, .experts = 2, .top_k = 2, .max_tokens = 9}, {}, 4);
  expand_under_seeds<kFlagged>(
      {.world = 4, .max_tokens = 40, .tokens = {0, 40, 1, 7}, .blocks = {1, 4}}, {.copy_blocks = 4},
      6);
  expand_under_seeds<kFlagged>({.world = 2, .experts = 40, .top_k = 32, .max_tokens = 9}, {}, 4);
  expand_under_seeds<kFlagged>({.world = 1, .experts = 1, .top_k = 1, .max_tokens = 1},
                               {.masked = true}, 4);
}
// Ranks choose by themselves whether they copy.
TEST(EpExpandedDispatch, FlagsWithoutCopies) {
  expand_under_seeds<kFlagged>({.world = 3, .max_tokens = 30}, {.copy_blocks = 0}, 4);
}

// ---- faults ------------------------------------------------------------------------------------

TEST(EpExpandedDispatch, TooLittleRoomIsAFaultOfTheRankAloneAndNothingIsCopied) {
  for (const bool masked : {false, true}) {
    const EpCase c{
        .world = 2, .experts = 4, .max_tokens = 12, .routing = EpRoutingKind::kOneExpert};
    // All choices are of the last expert, 12 + 11 tokens of 4.
    EpExpandedRig rig(c, {.masked = masked, .alignment = 1, .room_less_by = 96 - 91});
    rig.load(EpInputs(c, 1), 0);
    rig.launch_all<kFlagged>(0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(schedule(1)));
    EXPECT_EQ(rig.ranks().fault(0).state, FaultRecord::kEmpty);
    const FaultRecord& fault = rig.ranks().fault(1);
    ASSERT_EQ(fault.state, FaultRecord::kWritten);
    EXPECT_EQ(fault.phase, Phase::kRoom);
    EXPECT_EQ(fault.expected, 91u);
    EXPECT_EQ(fault.seen, 92u);
    ASSERT_NO_FATAL_FAILURE(rig.check_untouched(1, 0));
  }
}
TEST(EpExpandedDispatch, AMissingRankIsNamedByAllOthers) {
  const EpCase c{.world = 4, .max_tokens = 30};
  for (u32 seed = 1; seed <= 8; ++seed) {
    const u32 missing = seed % c.world;
    EpExpandedRig rig(c, {});
    rig.load(EpInputs(c, seed), 0);
    for (u32 rank = 0; rank < c.world; ++rank)
      if (rank != missing) rig.launch<kFlagged>(rank, 0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(fault_schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      if (rank == missing) continue;
      SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(rank));
      EXPECT_EQ(rig.ranks().fault(rank).state, FaultRecord::kWritten);
      EXPECT_EQ(rig.ranks().fault(rank).peer, missing);
    }
    rig.reset();
    const EpInputs inputs(c, seed + 100);
    rig.load(inputs, 1);
    rig.launch_all<kFlagged>(1);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank)
      ASSERT_NO_FATAL_FAILURE(rig.check(rank, 1));
  }
}
TEST(EpExpandedDispatch, AnIdOutOfRangeEndsTheCopiesToo) {
  const EpCase c{.world = 3, .max_tokens = 30};
  for (u32 seed = 1; seed <= 8; ++seed) {
    const u32 bad = seed % c.world;
    EpExpandedRig rig(c, {});
    rig.load(EpInputs(c, seed), 0);
    rig.rig().set_id(rig.rig().params(bad, 0), seed, -7);
    rig.launch_all<kFlagged>(0);
    // No deadline has to pass.
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank)
      expect_fault(rig.ranks().fault(rank), KernelId::kEpDispatch,
                   rank == bad ? Phase::kRouting : Phase::kPeerRouting, rank, bad);
  }
}

}  // namespace
}  // namespace crossdock::testing
