// flag_ping_pong, push_rows and pull_rows in the twin.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/kernel/flag_ping_pong.cuh>
#include <crossdock/kernel/pull_rows.cuh>
#include <crossdock/kernel/push_rows.cuh>

#include "ranks.hpp"

namespace crossdock::testing {
namespace {

template <FlagPingPongConfig kConfig>
void check_ping_pong(u32 world, u32 first, u32 second) {
  SymmetricLayout layout;
  const u64 flag = layout.add("flag", 128);
  Ranks ranks(world, layout);
  std::vector<u64*> elapsed;
  for (u32 rank = 0; rank < world; ++rank)
    elapsed.push_back(ranks.local<u64>(rank, 1));
  constexpr u32 kRounds = 9;
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    for (u32 rank = 0; rank < world; ++rank) {
      *elapsed[rank] = 0;
      FlagPingPongParams p{};
      p.common = ranks.common(rank, KernelId::kFlagPingPong);
      p.view = ranks.view(rank);
      p.flag = flag;
      p.elapsed_ns = elapsed[rank];
      p.first = first;
      p.second = second;
      p.rounds = kRounds;
      p.start = (seed - 1) * kRounds;
      ranks.launch(rank, {1, 32, 0, "flag_ping_pong"}, kernel::flag_ping_pong<kConfig>, p);
    }
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
    for (u32 rank : {first, second})
      EXPECT_EQ(*ranks.window<u32>(rank, flag), seed * kRounds);
    for (u32 rank = 0; rank < world; ++rank)
      EXPECT_EQ(*elapsed[rank] > 0, rank == first);
  }
}

TEST(FlagPingPong, TwoRanksOfMany) {
  check_ping_pong<{.release = true}>(2, 0, 1);
  check_ping_pong<{.release = false}>(5, 3, 1);
  check_ping_pong<{.release = true}>(1, 0, 0);
}

TEST(FlagPingPong, AMissingPartnerIsNamed) {
  SymmetricLayout layout;
  const u64 flag = layout.add("flag", 128);
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(2, layout);
    FlagPingPongParams p{};
    p.common = ranks.common(1, KernelId::kFlagPingPong);
    p.view = ranks.view(1);
    p.flag = flag;
    p.elapsed_ns = ranks.local<u64>(1, 1);
    p.first = 0;
    p.second = 1;
    p.rounds = 3;
    ranks.launch(1, {1, 32, 0, "flag_ping_pong"}, kernel::flag_ping_pong<{.release = true}>, p);
    ASSERT_NO_FATAL_FAILURE(ranks.run(fault_schedule(seed)));
    expect_fault(ranks.fault(1), KernelId::kFlagPingPong, Phase::kFlag, 1, 0);
    EXPECT_EQ(ranks.fault(1).expected, 1u);
    EXPECT_EQ(ranks.fault(1).seen, 0u);
  }
}

// ---- push_rows, pull_rows ----------------------------------------------------------------------

constexpr MoveRowsConfig kMove{.warps = 2, .stages = 3};
constexpr u32 kRowBytes = 80;
constexpr u32 kRowWords = kRowBytes / sizeof(u32);
constexpr u32 kGrid = 2;
constexpr u32 kRowsPerWarp = 11;  // more than three turns of the stages
constexpr u32 kRows = kGrid * kMove.warps * kRowsPerWarp;

u32 row_word(u32 rank, u32 row, u32 i) {
  return mix(rank * 4099 + row) + i;
}

struct Rows {
  SymmetricLayout layout;
  u64 source;
  u64 pushed;  // [world][kRows]
  explicit Rows(u32 world) {
    source = layout.add("source", u64{kRows} * kRowBytes);
    pushed = layout.add("pushed", u64{world} * kRows * kRowBytes);
  }
  MoveRowsParams params(Ranks& ranks, u32 rank, KernelId id, u64* elapsed) const {
    MoveRowsParams p{};
    p.common = ranks.common(rank, id);
    p.view = ranks.view(rank);
    p.source = source;
    p.destination = pushed;
    p.elapsed_ns = elapsed;
    p.row_bytes = kRowBytes;
    p.rows_per_warp = kRowsPerWarp;
    p.slots = kRows;
    p.fixed_peer = kNoPeer;
    return p;
  }
  void fill(Ranks& ranks, u32 world) const {
    for (u32 rank = 0; rank < world; ++rank) {
      for (u32 i = 0; i < kRows * kRowWords; ++i)
        ranks.window<u32>(rank, source)[i] = row_word(rank, i / kRowWords, i % kRowWords);
      std::memset(ranks.window<u8>(rank, pushed), 0xee, u64{world} * kRows * kRowBytes);
    }
  }
};

constexpr Ranks::Shape kMoveShape{kGrid, kMove.warps * 32,
                                  kernel::move_rows_shared_bytes(kMove, kRowBytes), "move_rows"};

TEST(PushRows, EveryRowLandsAtItsPeerAndNowhereElse) {
  for (u32 world : kWorlds) {
    SCOPED_TRACE(world);
    const Rows rows(world);
    Ranks ranks(world, rows.layout, world == 8);
    std::vector<u64*> elapsed;
    for (u32 rank = 0; rank < world; ++rank)
      elapsed.push_back(ranks.local<u64>(rank, kGrid));
    for (u32 seed = 1; seed <= kSeeds; ++seed) {
      rows.fill(ranks, world);
      std::vector<MoveRowsParams> params;
      for (u32 rank = 0; rank < world; ++rank) {
        params.push_back(rows.params(ranks, rank, KernelId::kPushRows, elapsed[rank]));
        params.back().seed = seed;
        if (seed % 4 == 0) params.back().fixed_peer = (rank + 1) % world;
        ranks.launch(rank, kMoveShape, kernel::push_rows<kMove>, params.back());
      }
      ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
      for (u32 at = 0; at < world; ++at)
        for (u32 from = 0; from < world; ++from)
          for (u32 row = 0; row < kRows; ++row) {
            const u32* got =
                ranks.window<u32>(at, rows.pushed) + (u64{from} * kRows + row) * kRowWords;
            const bool mine = row_peer(params[from], row) == at;
            for (u32 i = 0; i < kRowWords; ++i)
              ASSERT_EQ(got[i], mine ? row_word(from, row, i) : 0xeeeeeeeeu)
                  << "seed " << seed << " at " << at << " from " << from << " row " << row;
          }
    }
  }
}

TEST(PullRows, EveryRowComesFromItsPeer) {
  for (u32 world : kWorlds) {
    SCOPED_TRACE(world);
    const Rows rows(world);
    Ranks ranks(world, rows.layout);
    std::vector<u64*> elapsed;
    for (u32 rank = 0; rank < world; ++rank)
      elapsed.push_back(ranks.local<u64>(rank, kGrid));
    for (u32 seed = 1; seed <= kSeeds; ++seed) {
      rows.fill(ranks, world);
      std::vector<MoveRowsParams> params;
      for (u32 rank = 0; rank < world; ++rank) {
        params.push_back(rows.params(ranks, rank, KernelId::kPullRows, elapsed[rank]));
        params.back().seed = seed;
        ranks.launch(rank, kMoveShape, kernel::pull_rows<kMove>, params.back());
      }
      ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
      for (u32 rank = 0; rank < world; ++rank)
        for (u32 row = 0; row < kRows; ++row)
          for (u32 i = 0; i < kRowWords; ++i)
            ASSERT_EQ(ranks.window<u32>(rank, rows.pushed)[row * kRowWords + i],
                      row_word(row_peer(params[rank], row), row, i))
                << "seed " << seed << " rank " << rank << " row " << row;
    }
  }
}

}  // namespace
}  // namespace crossdock::testing
