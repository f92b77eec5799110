// Graphs of kernels that keep their epochs and barriers on the device: captured once on every rank,
// replayed any number of times with new data, mixed with plain launches.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/graph.hpp"

#include <gmock/gmock.h>

#include "gpu/symm/symm_fixture.hpp"
#include "symm/copy.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

using SymmGraphGpu = SymmGpuTest;

constexpr u32 kCounts = 33;

// Counts of one rank and what it gathers, outside of the graph's nodes.
struct RankBuffers {
  symm::LocalMemory counts;
  symm::LocalMemory gathered;
};

std::vector<u32> counts_of(u32 round, u32 rank) {
  std::vector<u32> values(kCounts);
  for (u32 i = 0; i < kCounts; ++i)
    values[i] = device::mix(round * 7919 + rank * 131 + i);
  return values;
}

struct Replay {
  SymmWorld& w;
  symm::AllGatherCounts gather;
  symm::Barrier barrier;
  symm::Barrier grid_barrier;
  std::vector<RankBuffers> buffers;

  explicit Replay(SymmWorld& world)
      : w(world),
        gather(symm::AllGatherCounts::create(*w.launcher, w.areas.gather,
                                             {.blocks = 3, .wait = w.shape.wait}, soon())
                   .value()),
        barrier(symm::Barrier::create(*w.launcher, w.areas.barrier,
                                      {.verify = true, .wait = w.shape.wait}, soon())
                    .value()),
        grid_barrier(
            symm::Barrier::create(
                *w.launcher, w.areas.grid_barrier,
                {.grid_sync = true, .verify = true, .blocks = w.shape.blocks, .wait = w.shape.wait},
                soon())
                .value()) {
    for (const u32 r : w.group->local_ranks()) {
      symm::Rank& rank = w.group->rank(r);
      buffers.push_back({rank.allocate(kCounts * sizeof(u32)).value(),
                         rank.allocate(u64{kCounts} * rank.world() * sizeof(u32)).value()});
    }
  }
  Result<> launch(u32 r, bool with_grid) {
    const symm::Rank& rank = w.group->rank(r);
    CROSSDOCK_CHECK_OK(gather.launch(rank, {.counts = buffers[r].counts.as<u32>(),
                                            .gathered = buffers[r].gathered.as<u32>(),
                                            .num_counts = kCounts}));
    CROSSDOCK_CHECK_OK(barrier.launch(rank, 3));
    if (with_grid) CROSSDOCK_CHECK_OK(grid_barrier.launch(rank, 2));
    return {};
  }
  void fill(u32 round) {
    for (const u32 r : w.group->local_ranks())
      EXPECT_TRUE(
          symm::upload(w.group->rank(r), buffers[r].counts.as<u32>(), counts_of(round, r), soon())
              .ok());
  }
  void check(u32 round) {
    const auto done = w.launcher->synchronize(soon());
    ASSERT_TRUE(done.ok()) << "round " << round << ": " << done.error().describe();
    for (const u32 r : w.group->local_ranks()) {
      const symm::Rank& rank = w.group->rank(r);
      const auto got =
          symm::download(rank, buffers[r].gathered.as<u32>(), u64{kCounts} * rank.world(), soon())
              .value();
      for (u32 from = 0; from < rank.world(); ++from)
        EXPECT_EQ(
            std::vector<u32>(got.begin() + from * kCounts, got.begin() + (from + 1) * kCounts),
            counts_of(round, from))
            << "round " << round << " at rank " << r << " from " << from;
      EXPECT_EQ(barrier.outcome(rank, soon()).value().mismatches, 0u);
      EXPECT_EQ(grid_barrier.outcome(rank, soon()).value().mismatches, 0u);
    }
  }
};

void check_replay(SymmWorld& w, bool with_grid) {
  Replay replay(w);
  std::vector<cuda::Graph> graphs;
  for (const u32 r : w.group->local_ranks()) {
    const cuda::Stream& stream = **w.launcher->stream(w.group->rank(r));
    auto capture = cuda::Capture::begin(stream).value();
    const auto recorded = replay.launch(r, with_grid);
    ASSERT_TRUE(recorded.ok()) << recorded.error().describe();
    graphs.push_back(capture.finish().value());
  }
  // An odd number of replays between plain launches: parities do not repeat in step.
  for (u32 round = 0; round < 8; ++round) {
    replay.fill(round);
    for (const u32 r : w.group->local_ranks()) {
      const auto launched = round % 4 == 3
                                ? replay.launch(r, with_grid)
                                : graphs[r].launch(**w.launcher->stream(w.group->rank(r)));
      ASSERT_TRUE(launched.ok()) << launched.error().describe();
    }
    ASSERT_NO_FATAL_FAILURE(replay.check(round));
  }
  // The suite counts epochs of its own in the same words, so it begins with a reset.
  const auto reset = w.group->reset(soon());
  ASSERT_TRUE(reset.ok()) << reset.error().describe();
  const auto after = w.suite->run_all(soon());
  EXPECT_TRUE(after.ok()) << after.error().describe();
}

TEST_F(SymmGraphGpu, ReplaysKeepTheirEpochs) {
  for (const u32 world : worlds()) {
    SCOPED_TRACE(world);
    SymmWorld w = make(world);
    check_replay(w, false);
  }
}

TEST_F(SymmGraphGpu, ReplaysWithGridSync) {
  SymmWorld w = make(static_cast<u32>(num_ranks()));
  check_replay(w, true);
}

TEST_F(SymmGraphGpu, PreparingIsRefusedWhileTheStreamIsCaptured) {
  SymmWorld w = make(1);
  const cuda::Stream& stream = **w.launcher->stream(w.group->rank(0));
  auto capture = cuda::Capture::begin(stream).value();
  const auto refused = symm::GridSync::create(*w.launcher, {}, soon());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("before the capture begins"));
}

}  // namespace
}  // namespace crossdock::testing
