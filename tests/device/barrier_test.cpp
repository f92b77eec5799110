// grid_sync_bench and barrier in the twin: right under every schedule, and what happens when a
// block or a rank never comes.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/kernel/barrier.cuh>
#include <crossdock/kernel/grid_sync_bench.cuh>

#include "ranks.hpp"

namespace crossdock::testing {
namespace {

using kernel::barrier;
using kernel::grid_sync_bench;

TEST(GridSync, CarriesWritesAcrossBlocksOnEveryCounter) {
  constexpr GridSyncBenchConfig kConfig{.threads = 64, .verify = true};
  for (u32 grid : {1u, 2u, 5u}) {
    Ranks ranks(1, {});
    GridSyncBenchParams p{};
    p.common = ranks.common(0, KernelId::kGridSyncBench);
    p.words = ranks.local<u32>(0, 2 * grid);
    p.elapsed_ns = ranks.local<u64>(0, grid);
    p.mismatches = ranks.local<u32>(0, 1);
    p.rounds = 7;
    for (u32 seed = 1; seed <= kSeeds; ++seed) {
      p.counter = seed % kGridSyncCounters;
      std::memset(p.elapsed_ns, 0, grid * sizeof(u64));
      ranks.launch(0, {grid, kConfig.threads, 0, "grid_sync"}, grid_sync_bench<kConfig>, p);
      ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
      ASSERT_EQ(*p.mismatches, 0u) << "grid " << grid << " seed " << seed;
      for (u32 block = 0; block < grid; ++block)
        EXPECT_GT(p.elapsed_ns[block], 0u);
    }
    for (const PaddedWord& counter : ranks.control(0).grid_sync)
      EXPECT_EQ(counter.value & ~kGridSyncBit, 0u) << "the low bits return to zero";
  }
}

// A kernel whose last block forgets to come.
struct AbsentParams {
  LaunchCommon common;
  u32* left;
};
CROSSDOCK_KERNEL grid_sync_without_last_block(CROSSDOCK_PARAMS(AbsentParams, p)) {
  if (block_index() == grid_size() - 1) return;
  const bool passed = grid_sync(p.common, 0, ThreadGroup::block());
  if (!passed) ptx::red_add_relaxed_gpu(p.left, 1u);
}

TEST(GridSync, ABlockThatNeverComesIsAFaultAndEveryThreadLeaves) {
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(1, {});
    AbsentParams p{ranks.common(0, KernelId::kGridSyncBench), ranks.local<u32>(0, 1)};
    ranks.launch(0, {3, 64, 0, "absent"}, grid_sync_without_last_block, p);
    ASSERT_NO_FATAL_FAILURE(ranks.run(fault_schedule(seed)));
    expect_fault(ranks.fault(0), KernelId::kGridSyncBench, Phase::kGridSync, 0, kNoPeer);
    EXPECT_EQ(ranks.fault(0).expected, kGridSyncBit);
    EXPECT_EQ(ranks.fault(0).seen & kGridSyncBit, 0u);
    EXPECT_EQ(*p.left, 128u) << "both blocks, all threads";
  }
}

struct BarrierSetup {
  SymmetricLayout layout;
  PeerBarrierLayout barrier;
  u64 words;

  BarrierSetup(u32 world, u32 threads_of_grid) {
    barrier = add_peer_barrier(layout, world);
    words = layout.add("words", u64{2} * world * threads_of_grid * sizeof(u32));
  }
  BarrierParams params(Ranks& ranks, u32 rank, u32 rounds) const {
    BarrierParams p{};
    p.common = ranks.common(rank, KernelId::kBarrier);
    p.view = ranks.view(rank);
    p.barrier = barrier;
    p.words = words;
    p.elapsed_ns = ranks.local<u64>(rank, 1);
    p.mismatches = ranks.local<u32>(rank, 1);
    p.rounds = rounds;
    return p;
  }
};

// Two launches a seed, together more than three turns of the four barrier states; fewer at 32
// ranks, where the seeds add up to as many.
template <BarrierConfig kConfig>
void check_barrier(u32 world, u32 grid, bool table) {
  const u32 rounds = world > 8 ? 2 : 7;
  const BarrierSetup setup(world, grid * kConfig.threads);
  Ranks ranks(world, setup.layout, table);
  std::vector<BarrierParams> params;
  for (u32 rank = 0; rank < world; ++rank)
    params.push_back(setup.params(ranks, rank, rounds));
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    for (u32 launch = 0; launch < 2; ++launch)
      for (u32 rank = 0; rank < world; ++rank)
        ranks.launch(rank, {grid, kConfig.threads, 0, "barrier"}, barrier<kConfig>, params[rank]);
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
    for (u32 rank = 0; rank < world; ++rank) {
      ASSERT_EQ(*params[rank].mismatches, 0u) << "seed " << seed << " rank " << rank;
      ASSERT_EQ(ranks.control(rank).barrier_turn.value, 2 * rounds * seed);
    }
  }
}

// With that of ring_all_to_all_test.cpp the bounds are a minute on one core.
TEST(Barrier, OneBlockOfEachRank) {
  for (u32 world : kWorlds) {
    SCOPED_TRACE(world);
    bounded_at_32_ranks(world, 10, "barrier of one block a rank", [&] {
      check_barrier<{.threads = 32, .grid_sync = false, .verify = true}>(world, 1, world == 3);
    });
  }
}

TEST(Barrier, AllBlocksOfAllRanks) {
  for (u32 world : kWorlds) {
    SCOPED_TRACE(world);
    bounded_at_32_ranks(world, 40, "barrier of two blocks a rank", [&] {
      check_barrier<{.threads = 64, .grid_sync = true, .verify = true}>(world, world > 8 ? 2 : 3,
                                                                        world == 5);
    });
  }
}

template <BarrierConfig kConfig>
void check_missing_rank(u32 world, u32 grid, u32 missing) {
  const BarrierSetup setup(world, grid * kConfig.threads);
  Ranks ranks(world, setup.layout);
  std::vector<BarrierParams> params;
  for (u32 rank = 0; rank < world; ++rank)
    params.push_back(setup.params(ranks, rank, 6));
  const Ranks::Shape shape{grid, kConfig.threads, 0, "barrier"};
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    // Some barriers pass first, so that the missing one has a number.
    for (u32 rank = 0; rank < world; ++rank)
      ranks.launch(rank, shape, barrier<kConfig>, params[rank]);
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));

    for (u32 rank = 0; rank < world; ++rank)
      if (rank != missing) ranks.launch(rank, shape, barrier<kConfig>, params[rank]);
    ASSERT_NO_FATAL_FAILURE(ranks.run(fault_schedule(seed)));
    for (u32 rank = 0; rank < world; ++rank) {
      if (rank == missing) continue;
      expect_fault(ranks.fault(rank), KernelId::kBarrier, Phase::kPeerBarrier, rank, missing);
      EXPECT_EQ(ranks.fault(rank).expected, 7u) << "its seventh barrier";
      EXPECT_EQ(ranks.fault(rank).seen, 6u);
      EXPECT_EQ(ranks.fault(rank).waited_ns, 5 * kMillisecond);
    }

    // Until a reset every launch leaves at once, and the first record stays.
    const FaultRecord first = ranks.fault(missing == 0 ? 1 : 0);
    for (u32 rank = 0; rank < world; ++rank)
      if (rank != missing) ranks.launch(rank, shape, barrier<kConfig>, params[rank]);
    ASSERT_NO_FATAL_FAILURE(ranks.run(schedule(seed)));
    EXPECT_EQ(std::memcmp(&first, &ranks.fault(missing == 0 ? 1 : 0), sizeof first), 0);

    ranks.reset();
    for (u32 rank = 0; rank < world; ++rank)
      ranks.launch(rank, shape, barrier<kConfig>, params[rank]);
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
    for (u32 rank = 0; rank < world; ++rank)
      ASSERT_EQ(*params[rank].mismatches, 0u);
    ranks.reset();
  }
}

TEST(Barrier, AMissingRankIsNamedAndAResetMakesTheGroupUsable) {
  check_missing_rank<{.threads = 32, .grid_sync = false, .verify = true}>(3, 1, 1);
  check_missing_rank<{.threads = 64, .grid_sync = true, .verify = true}>(5, 2, 0);
}

}  // namespace
}  // namespace crossdock::testing
