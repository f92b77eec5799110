// all_gather_counts in the twin: launches in a row without any barrier between them, and a rank
// that does not take part.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/kernel/all_gather_counts.cuh>

#include "ranks.hpp"

namespace crossdock::testing {
namespace {

constexpr AllGatherCountsConfig kConfig{.threads = 64};
constexpr u32 kMaxCounts = 40;
constexpr u32 kLaunches = 7;  // each of the two slots is used at least three times

struct Gather {
  SymmetricLayout layout;
  AllGatherCountsLayout areas;
  explicit Gather(u32 world) { areas = add_all_gather_counts(layout, world, kMaxCounts); }

  AllGatherCountsParams params(Ranks& ranks, u32 rank, EpochState* epoch, u32 counts) const {
    AllGatherCountsParams p{};
    p.common = ranks.common(rank, KernelId::kAllGatherCounts);
    p.view = ranks.view(rank);
    p.layout = areas;
    p.epoch = epoch;
    p.counts = ranks.local<u32>(rank, counts + 1);
    p.gathered = ranks.local<u32>(rank, u64{ranks.world()} * counts + 1);
    p.num_counts = counts;
    return p;
  }
};

u32 count_of(u32 launch, u32 rank, u32 i, u32 seed) {
  return mix(launch * 1000003 + rank * 7919 + i * 31 + seed);
}
// Counts of a launch, the same on all ranks: none, one, and the most possible among them.
u32 counts_in(u32 launch) {
  constexpr u32 kCounts[kLaunches] = {5, kMaxCounts, 1, 0, 33, 8, kMaxCounts};
  return kCounts[launch];
}

TEST(AllGatherCounts, ManyLaunchesInARow) {
  for (u32 world : kWorlds) {
    SCOPED_TRACE(world);
    const Gather gather(world);
    Ranks ranks(world, gather.layout, world == 2);
    std::vector<EpochState*> epochs;
    std::vector<std::vector<AllGatherCountsParams>> params(kLaunches);
    for (u32 rank = 0; rank < world; ++rank)
      epochs.push_back(ranks.local<EpochState>(rank, 1));
    for (u32 launch = 0; launch < kLaunches; ++launch)
      for (u32 rank = 0; rank < world; ++rank)
        params[launch].push_back(gather.params(ranks, rank, epochs[rank], counts_in(launch)));
    const u32 grid = world > 8 ? 1 : 2;
    for (u32 seed = 1; seed <= kSeeds; ++seed) {
      for (u32 launch = 0; launch < kLaunches; ++launch)
        for (u32 rank = 0; rank < world; ++rank) {
          const AllGatherCountsParams& p = params[launch][rank];
          for (u32 i = 0; i < p.num_counts; ++i)
            const_cast<u32*>(p.counts)[i] = count_of(launch, rank, i, seed);
          std::memset(p.gathered, 0xee, u64{world} * p.num_counts * sizeof(u32));
          ranks.launch(rank, {grid, kConfig.threads, 16, "all_gather_counts"},
                       kernel::all_gather_counts<kConfig>, p);
        }
      ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
      for (u32 launch = 0; launch < kLaunches; ++launch)
        for (u32 rank = 0; rank < world; ++rank)
          for (u32 from = 0; from < world; ++from)
            for (u32 i = 0; i < counts_in(launch); ++i)
              ASSERT_EQ(params[launch][rank].gathered[from * counts_in(launch) + i],
                        count_of(launch, from, i, seed))
                  << "seed " << seed << " launch " << launch << " rank " << rank;
    }
    for (u32 rank = 0; rank < world; ++rank) {
      EXPECT_EQ(epochs[rank]->finished, kSeeds * kLaunches);
      EXPECT_EQ(epochs[rank]->readers, 0u);
    }
  }
}

// A launch without counts must still keep ranks together: else one could write the words of the
// epoch after it over those of the epoch before it, which another still reads.
TEST(AllGatherCounts, LaunchesWithoutCountsKeepRanksTogether) {
  constexpr u32 kWorld = 4;
  const Gather gather(kWorld);
  Ranks ranks(kWorld, gather.layout);
  std::vector<std::vector<AllGatherCountsParams>> params(3);
  for (u32 rank = 0; rank < kWorld; ++rank) {
    EpochState* epoch = ranks.local<EpochState>(rank, 1);
    for (u32 launch = 0; launch < 3; ++launch)
      params[launch].push_back(gather.params(ranks, rank, epoch, launch == 1 ? 0 : kMaxCounts));
  }
  for (u32 seed = 1; seed <= 4 * kSeeds; ++seed) {
    for (u32 launch = 0; launch < 3; ++launch)
      for (u32 rank = 0; rank < kWorld; ++rank)
        ranks.launch(rank, {2, kConfig.threads, 16, "all_gather_counts"},
                     kernel::all_gather_counts<kConfig>, params[launch][rank]);
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(fault_schedule(seed)));
  }
}

TEST(AllGatherCounts, ARankThatNeverSendsIsNamed) {
  constexpr u32 kWorld = 3, kMissing = 2;
  const Gather gather(kWorld);
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(kWorld, gather.layout);
    std::vector<AllGatherCountsParams> params;
    std::vector<EpochState*> epochs;
    for (u32 rank = 0; rank < kWorld; ++rank) {
      epochs.push_back(ranks.local<EpochState>(rank, 1));
      params.push_back(gather.params(ranks, rank, epochs[rank], 4));
    }
    const auto launch = [&](u32 rank) {
      ranks.launch(rank, {2, kConfig.threads, 16, "all_gather_counts"},
                   kernel::all_gather_counts<kConfig>, params[rank]);
    };
    for (u32 rank = 0; rank < kWorld; ++rank)
      launch(rank);
    for (u32 rank = 0; rank < kWorld; ++rank)
      if (rank != kMissing) launch(rank);
    ASSERT_NO_FATAL_FAILURE(ranks.run(fault_schedule(seed)));
    for (u32 rank : {0u, 1u}) {
      expect_fault(ranks.fault(rank), KernelId::kAllGatherCounts, Phase::kEpochWord, rank,
                   kMissing);
      EXPECT_EQ(ranks.fault(rank).expected, 2u);
      EXPECT_EQ(ranks.fault(rank).seen, 0u) << "the slot of odd epochs was never written";
    }
    ranks.reset();
    for (u32 rank = 0; rank < kWorld; ++rank) {
      *epochs[rank] = EpochState{};
      launch(rank);
    }
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
  }
}

}  // namespace
}  // namespace crossdock::testing
