// ep_dispatch in the twin: every world size, payload and routing against the plain reference, under
// schedules with weak memory, two launches at a time with no host in between; counts, statistics
// and faults.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_rig.hpp"

namespace crossdock::testing {
namespace {

TEST(EpDispatch, EveryWorldUnderSixteenSchedules) {
  for (u32 world : {1u, 2u, 3u, 4u, 5u, 8u}) {
    // More tokens than the blocks deal to their warps, so that the pool is used; blocks differ.
    dispatch_under_all_seeds<kPlain>({.world = world,
                                      .experts = 2 * world + 3,
                                      .top_k = 4,
                                      .max_tokens = 40,
                                      .row_bytes = 48,
                                      .scale_bytes = 12,
                                      .blocks = {3, 2, 1}},
                                     world == 3);
    if (HasFatalFailure()) return;
  }
}
TEST(EpDispatch, ThirtyTwoRanks) {
  dispatch_under_all_seeds<kPlain>({.world = 32,
                                    .experts = 50,
                                    .top_k = 8,
                                    .max_tokens = 12,
                                    .row_bytes = 16,
                                    .blocks = {1, 2}});
}
TEST(EpDispatch, WideIdsLargeRowsScalesByColumn) {
  dispatch_under_all_seeds<kWide>({.world = 3,
                                   .experts = 9,
                                   .top_k = 3,
                                   .max_tokens = 35,
                                   .row_bytes = 2064,
                                   .scale_bytes = 64,
                                   .scales_by_column = true,
                                   .wide_ids = true,
                                   .weights = false});
}
TEST(EpDispatch, VectorScales) {
  dispatch_under_all_seeds<kPlain>(
      {.world = 2, .max_tokens = 70, .row_bytes = 32, .scale_bytes = 48, .blocks = {1}});
}
TEST(EpDispatch, CastsToFp8) {
  for (u32 values : {128u, 512u, 640u, 1152u}) {
    dispatch_under_all_seeds<kCast>(
        {.world = 4, .max_tokens = 14, .row_bytes = values * 2, .cast = true});
    if (HasFatalFailure()) return;
  }
}
TEST(EpDispatch, CastsToFp8WithScalesOfOneByte) {
  for (u32 values : {128u, 512u, 1152u}) {
    dispatch_under_all_seeds<kCast>({.world = 3,
                                     .max_tokens = 14,
                                     .row_bytes = values * 2,
                                     .scales_by_column = values == 1152,
                                     .cast = true,
                                     .cast_ue8m0 = true});
    if (HasFatalFailure()) return;
  }
}
TEST(EpDispatch, CastsToFp8WithScalesByColumn) {
  dispatch_under_all_seeds<kCast>(
      {.world = 3, .max_tokens = 14, .row_bytes = 1280, .scales_by_column = true, .cast = true});
}
TEST(EpDispatch, TokenCountsDifferAndMayBeZero) {
  dispatch_under_all_seeds<kPlain>({.world = 4, .max_tokens = 33, .tokens = {0, 1, 17, 33}});
  dispatch_under_all_seeds<kPlain>({.world = 3, .tokens = {0}});
  dispatch_under_all_seeds<kPlain>({.world = 2, .tokens = {1}, .blocks = {4, 1}});
}
TEST(EpDispatch, EveryTopK) {
  for (u32 top_k : {1u, 2u, 7u, 8u, 9u, 16u, 31u, 32u}) {
    dispatch_under_all_seeds<kPlain>(
        {.world = 2, .experts = 64, .top_k = top_k, .max_tokens = 9, .row_bytes = 16});
    if (HasFatalFailure()) return;
  }
}
TEST(EpDispatch, FewerExpertsThanRanks) {
  dispatch_under_all_seeds<kPlain>({.world = 5, .experts = 3, .max_tokens = 9});
}
TEST(EpDispatch, AllToOneExpertAllMaskedSkewed) {
  for (EpRoutingKind kind :
       {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed}) {
    dispatch_under_all_seeds<kPlain>({.world = 4, .max_tokens = 21, .routing = kind});
    if (HasFatalFailure()) return;
  }
}

TEST(EpDispatch, HostCountsAndStatistics) {
  const EpCase c{.world = 3, .experts = 7};
  EpRig rig(c);
  std::vector<std::vector<u64>> sums(c.world, std::vector<u64>(3, 0));
  for (u32 ticket = 1; ticket <= 3; ++ticket) {
    const EpInputs inputs(c, ticket);
    const EpReference reference(c, inputs);
    rig.load(inputs, 0);
    for (u32 rank = 0; rank < c.world; ++rank)
      rig.params(rank, 0).result.host_ticket = ticket;
    rig.launch_all<kPlain>(0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(ticket)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      const EpDispatchParams& p = rig.params(rank, 0);
      EXPECT_EQ(*p.result.host_rows, u64{ticket} << 32 | reference.rows_at(rank));
      for (u32 e = 0; e < c.expert_map().count(rank); ++e) {
        EXPECT_EQ(p.result.host_experts[e], u64{ticket} << 32 | p.result.expert_counts[e]);
        sums[rank][e] += p.result.expert_counts[e];
        EXPECT_EQ(p.statistics.expert_selections[e], sums[rank][e]);
      }
    }
  }
  for (u32 source = 1; source < c.world; ++source)
    EXPECT_GT(rig.params(0, 0).statistics.source_wait_ns[source], 0u);
}

// ---- faults ------------------------------------------------------------------------------------

void expect_works_after_reset(EpRig& rig, const EpCase& c, u32 seed) {
  rig.reset();
  const EpInputs inputs(c, seed);
  rig.load(inputs, 1);
  rig.launch_all<kPlain>(1);
  ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
  for (u32 rank = 0; rank < c.world; ++rank)
    ASSERT_NO_FATAL_FAILURE(EpReference(c, inputs).check(rank, rig.delivered(rank, 1)));
}

TEST(EpDispatch, AnIdOutOfRangeIsNamedAtItsRankAndItsRankAtAllOthers) {
  const EpCase c{.world = 4, .max_tokens = 40, .blocks = {2, 3}};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    const u32 bad = seed % c.world;
    const i64 id = seed % 2 == 0 ? c.experts : -2 - static_cast<i64>(seed);
    const u32 token = seed * 5 % c.tokens_of(bad);
    EpRig rig(c);
    rig.load(EpInputs(c, seed), 0);
    rig.set_id(rig.params(bad, 0), u64{token} * c.top_k + 1, id);
    rig.launch_all<kPlain>(0);
    // No deadline has to pass.
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      const FaultRecord& fault = rig.ranks().fault(rank);
      SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(rank));
      expect_fault(fault, KernelId::kEpDispatch,
                   rank == bad ? Phase::kRouting : Phase::kPeerRouting, rank, bad);
      if (rank != bad) continue;
      EXPECT_EQ(fault.expected, token);
      EXPECT_EQ(static_cast<i64>(fault.seen), id);
    }
    ASSERT_NO_FATAL_FAILURE(expect_works_after_reset(rig, c, seed));
  }
}

TEST(EpDispatch, AMissingRankIsNamedByAllOthers) {
  const EpCase c{.world = 4, .max_tokens = 40};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    const u32 missing = seed % c.world;
    EpRig rig(c);
    const EpInputs inputs(c, seed);
    rig.load(inputs, 0);
    for (u32 rank = 0; rank < c.world; ++rank)
      if (rank != missing) rig.launch<kPlain>(rank, 0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(fault_schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      if (rank == missing) continue;
      const FaultRecord& fault = rig.ranks().fault(rank);
      SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(rank) + " in " +
                   phase_name(fault.phase));
      EXPECT_EQ(fault.state, FaultRecord::kWritten);
      EXPECT_EQ(fault.peer, missing);
      EXPECT_TRUE(fault.phase == Phase::kEpochWord || fault.phase == Phase::kPeerRouting);
    }
    ASSERT_NO_FATAL_FAILURE(expect_works_after_reset(rig, c, seed));
  }
}

TEST(EpDispatch, ALaunchAfterAFaultDoesNothing) {
  const EpCase c{.world = 2};
  EpRig rig(c);
  rig.load(EpInputs(c, 1), 0);
  rig.set_id(rig.params(1, 0), 0, 1000);
  rig.launch_all<kPlain>(0);
  rig.launch_all<kPlain>(0);
  ASSERT_NO_FATAL_FAILURE(rig.ranks().run(schedule(1)));
  EXPECT_EQ(rig.ranks().fault(1).phase, Phase::kRouting);
}

}  // namespace
}  // namespace crossdock::testing
