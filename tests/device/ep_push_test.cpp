// ep_combine by push in the twin: as ep_combine_test.cpp, with blocks that send and blocks that
// add.
// The sums are compared with the same reference, bit by bit. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_rounds.hpp"

namespace crossdock::testing {
namespace {

void push_under_all_seeds(const EpCase& c, u32 parts_per_ticket = 0, bool table = false) {
  SCOPED_TRACE("world " + std::to_string(c.world) + " row " + std::to_string(c.combine_bytes));
  Rounds rounds(c, table);
  for (u32 seed = 1; seed <= kEpSeeds; ++seed)
    ASSERT_NO_FATAL_FAILURE(rounds.run_and_check<kPush>(seed, parts_per_ticket));
}

TEST(EpPush, EveryWorldUnderSixteenSchedules) {
  for (u32 world : {1u, 2u, 3u, 4u, 5u, 8u}) {
    push_under_all_seeds({.world = world,
                          .experts = 2 * world + 1,
                          .max_tokens = 24,
                          .row_bytes = 16,
                          .combine_bytes = 48,
                          .combine_weights = world % 2 == 0,
                          .blocks = {2, 1}},
                         0, world == 3);
    if (HasFatalFailure()) return;
  }
}
TEST(EpPush, ThirtyTwoRanks) {
  push_under_all_seeds({.world = 32,
                        .experts = 40,
                        .top_k = 8,
                        .max_tokens = 5,
                        .row_bytes = 16,
                        .combine_bytes = 48,
                        .combine_weights = false,
                        .blocks = {1}});
}
// Rows that are cut for sending and for adding, at different places.
TEST(EpPush, RowsOfManyPartsWithTwoBiases) {
  push_under_all_seeds({.world = 4,
                        .max_tokens = 9,
                        .row_bytes = 16,
                        .combine_bytes = 656,
                        .combine_weights = false,
                        .biases = 2});
}
TEST(EpPush, TicketsOfSingleParts) {
  push_under_all_seeds(
      {.world = 3, .max_tokens = 9, .row_bytes = 16, .combine_bytes = 528, .biases = 1}, 1);
}
TEST(EpPush, TokenCountsDifferAndMayBeZero) {
  push_under_all_seeds({.world = 4, .max_tokens = 9, .row_bytes = 16, .tokens = {0, 1, 9, 3}});
  push_under_all_seeds({.world = 3, .row_bytes = 16, .tokens = {0}});
}
TEST(EpPush, AllToOneExpertAndAllMasked) {
  push_under_all_seeds(
      {.world = 3, .max_tokens = 20, .row_bytes = 16, .routing = EpRoutingKind::kOneExpert});
  push_under_all_seeds({.world = 2,
                        .max_tokens = 5,
                        .row_bytes = 16,
                        .biases = 1,
                        .routing = EpRoutingKind::kAllMasked});
}

TEST(EpPush, AMissingRankIsNamedByAllOthers) {
  const EpCase c{.world = 3, .max_tokens = 12, .row_bytes = 16, .combine_weights = false};
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    Rounds rounds(c);
    ASSERT_NO_FATAL_FAILURE(rounds.check_missing_rank<kPush>(seed));
  }
}

}  // namespace
}  // namespace crossdock::testing
