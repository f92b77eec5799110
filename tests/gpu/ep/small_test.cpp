// The path for few tokens on real GPUs: payloads and sizes against the reference, graphs replayed
// with changing routing, both paths in one captured loop, two batches on two streams, long runs.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <gmock/gmock.h>

#include "cuda/graph.hpp"
#include "gpu/ep/ep_gpu.hpp"

namespace crossdock::testing {
namespace {

EpCase few(EpCase c) {
  c.fixed = true;
  return c;
}

TEST_F(EpGpu, FewTokensOfEveryPayload) {
  for (const u32 tokens : {1u, 7u, 128u, 256u}) {
    SCOPED_TRACE(tokens);
    EpCase fp8 = few(large(tokens));
    fp8.scale_bytes = 224;
    ASSERT_NO_FATAL_FAILURE(rounds(fp8));
    fp8.scales_by_column = true;
    ASSERT_NO_FATAL_FAILURE(rounds(fp8));
    EpCase bf16 = few(large(tokens));
    bf16.row_bytes = 14336;
    bf16.wide_ids = true;
    ASSERT_NO_FATAL_FAILURE(rounds(bf16));
    EpCase cast = bf16;
    cast.cast = true;
    cast.overlap = true;
    ASSERT_NO_FATAL_FAILURE(rounds(cast));
  }
}
TEST_F(EpGpu, FewTokensOfDifferentRanksAndNone) {
  EpCase c = few(large(100));
  c.tokens = {100, 0, 1, 31};
  ASSERT_NO_FATAL_FAILURE(rounds(c));
  c.tokens = {0, 100};
  ASSERT_NO_FATAL_FAILURE(rounds(c));
  for (const EpRoutingKind kind :
       {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed}) {
    c.routing = kind;
    ASSERT_NO_FATAL_FAILURE(rounds(c));
  }
}
TEST_F(EpGpu, GraphsOfFewTokensWithChangingRouting) {
  for (const bool overlap : {false, true}) {
    EpCase c = few(identity_case(world_, 64));
    c.overlap = overlap;
    EpGroupRig r = rig(c);
    ASSERT_NO_FATAL_FAILURE(capture_replay_and_check(r, c, 200));
  }
}
TEST_F(EpGpu, BothPathsInOneGraph) {
  EpCase c = identity_case(world_, 64);
  EpGroupRig r = rig(c, [&](ep::Options& o) { o.small_tokens = 64; });
  r.load(finite_inputs(c, 1));
  std::vector<cuda::Graph> graphs;
  for (const u32 rank : r.group().local_ranks()) {
    const auto& stream = *r.rank(rank).device().stream();
    auto capture = cuda::Capture::begin(stream).value();
    for (const ep::Path path : {ep::Path::kSmall, ep::Path::kLarge, ep::Path::kSmall}) {
      auto handle = r.group().dispatch(rank, r.tokens(rank), {.path = path}).value();
      const u64 bytes = u64{handle.received().capacity} * handle.received().row_bytes;
      ASSERT_TRUE(cuda::copy_async(cuda::device_ptr(handle.expert_input().rows),
                                   cuda::device_ptr(handle.received().rows), bytes, stream)
                      .ok());
      ASSERT_NO_FATAL_FAILURE(r.combine(handle));
    }
    graphs.push_back(capture.finish().value());
  }
  ASSERT_NO_FATAL_FAILURE(replay_and_check(r, c, graphs, 100));
}
// Both halves of two batches, in turns, in one graph: in packets, and by flags.
TEST_F(EpGpu, HalvesOfTwoBatchesInOneGraph) {
  for (const u32 tokens : {4u, 64u}) {
    EpCase c = few(identity_case(world_, tokens));
    EpGroupRig r = rig(c);
    r.load(finite_inputs(c, 1));
    std::vector<cuda::Graph> graphs;
    for (const u32 rank : r.group().local_ranks()) {
      const auto& stream = *r.rank(rank).device().stream();
      auto capture = cuda::Capture::begin(stream).value();
      std::vector<ep::Handle> batches;
      for (u32 i = 0; i < 2; ++i)
        batches.push_back(r.group().dispatch_send(rank, r.tokens(rank)).value());
      for (const auto& handle : batches) {
        ASSERT_TRUE(r.group().dispatch_receive(handle).ok());
        const u64 bytes = u64{handle.received().capacity} * handle.received().row_bytes;
        ASSERT_TRUE(cuda::copy_async(cuda::device_ptr(handle.expert_input().rows),
                                     cuda::device_ptr(handle.received().rows), bytes, stream)
                        .ok());
      }
      for (const auto& handle : batches)
        ASSERT_TRUE(r.group().combine_send(handle).ok());
      for (const auto& handle : batches)
        ASSERT_TRUE(r.group().combine_receive(handle, {.rows = r.combined(rank)}).ok());
      graphs.push_back(capture.finish().value());
    }
    ASSERT_NO_FATAL_FAILURE(replay_and_check(r, c, graphs, 100));
  }
}
// The last rank is masked by the others on all paths, then let in again.
TEST_F(EpGpu, MasksOnAllPaths) {
  if (world_ < 2) GTEST_SKIP() << "needs at least two GPUs";
  for (const u32 tokens : {4u, 100u})
    for (const ep::Path path : {ep::Path::kSmall, ep::Path::kLarge}) {
      EpCase c = few(identity_case(world_, tokens));
      EpGroupRig r = rig(c, [](ep::Options& o) { o.masks = true; });
      const u32 gone = world_ - 1;
      for (u32 seed = 1; seed <= 6; ++seed) {
        const bool apart = seed % 2 == 0;
        const EpInputs all(c, seed);
        const EpInputs seen = apart ? all.without(gone) : all;
        r.load(all);
        std::vector<ep::Handle> handles;
        for (u32 rank = 0; rank < world_; ++rank) {
          // Ranks that are apart go on, each with those that it sees.
          for (u32 peer = 0; peer < world_; ++peer)
            if (peer != rank && (rank == gone || peer == gone)) {
              ASSERT_TRUE(r.group().mask(rank, peer, apart).ok());
            }
          handles.push_back(r.group().dispatch(rank, r.tokens(rank), {.path = path}).value());
        }
        ASSERT_NO_FATAL_FAILURE(r.synchronize());
        for (const auto& handle : handles) {
          if (handle.rank() == gone) continue;
          ASSERT_NO_FATAL_FAILURE(r.check(handle, EpReference(c, seen))) << "seed " << seed;
          r.write_expert_rows(handle, seen, seed);
        }
        for (const auto& handle : handles)
          ASSERT_NO_FATAL_FAILURE(r.combine(handle));
        ASSERT_NO_FATAL_FAILURE(r.synchronize());
        for (u32 rank = 0; apart && rank < gone; ++rank)
          ASSERT_NO_FATAL_FAILURE(r.check_combined(rank, EpReference(c, seen), seed));
      }
    }
}
// A rank that does not call is masked by the kernels of the others, which go on.
TEST_F(EpGpu, ARankThatDoesNotComeIsMasked) {
  if (world_ < 2) GTEST_SKIP() << "needs at least two GPUs";
  for (const ep::Path path : {ep::Path::kSmall, ep::Path::kLarge}) {
    EpCase c = few(identity_case(world_, 64));
    EpGroupRig r = rig(c, [](ep::Options& o) {
      o.masks = o.mask_late = true;
      o.wait = std::chrono::milliseconds(300);
    });
    const EpInputs all(c, 1);
    const u32 gone = world_ - 1;
    const EpInputs seen = all.without(gone);
    r.load(all);
    for (u32 turn = 0; turn < 3; ++turn) {
      std::vector<ep::Handle> handles;
      for (u32 rank = 0; rank < gone; ++rank)
        handles.push_back(r.group().dispatch(rank, r.tokens(rank), {.path = path}).value());
      ASSERT_NO_FATAL_FAILURE(r.synchronize());
      for (const auto& handle : handles)
        ASSERT_NO_FATAL_FAILURE(r.check(handle, EpReference(c, seen))) << "turn " << turn;
    }
    EXPECT_EQ(r.group().masked(0, ep_soon()).value(), 1u << gone);
  }
}
// Decode steps in graphs, far ahead of the host, in packets and by flags: up to a million replays,
// or as many as fit into the time. A stall is a fault at its deadline; every so often all of them
// get other tokens and routings, and what comes back is compared.
TEST_F(EpGpu, AMillionReplaysOfAStepWithoutAStall) {
  using Clock = std::chrono::steady_clock;
  constexpr u32 kReplays = 500'000, kAtATime = 5'000;
  for (const u32 tokens : {2u, 12u}) {
    EpCase c = few(identity_case(world_, tokens));
    c.overlap = true;
    c.host_counts = false;
    EpGroupRig r = rig(c);
    r.load(finite_inputs(c, 1));
    std::vector<cuda::Graph> graphs;
    for (const u32 rank : r.group().local_ranks()) {
      auto capture = cuda::Capture::begin(*r.rank(rank).device().stream()).value();
      ASSERT_NO_FATAL_FAILURE(identity_round(r, rank));
      graphs.push_back(capture.finish().value());
    }
    const auto start = Clock::now();
    u32 replays = 0;
    for (u32 seed = 1; replays < kReplays && Clock::now() - start < std::chrono::seconds(18);
         ++seed, replays += kAtATime) {
      const EpInputs inputs = finite_inputs(c, seed);
      r.load(inputs);
      for (u32 i = 0; i < kAtATime; ++i)
        for (u32 rank = 0; rank < graphs.size(); ++rank)
          ASSERT_TRUE(
              graphs[rank].launch(*r.rank(r.group().local_ranks()[rank]).device().stream()).ok());
      ASSERT_NO_FATAL_FAILURE(r.synchronize()) << "after " << replays << " replays";
      ASSERT_NO_FATAL_FAILURE(check_identity(r, c, inputs)) << "after " << replays << " replays";
    }
    std::printf("  %u tokens: %u replays\n", tokens, replays);
  }
}
// Dispatches alone, far ahead of the host and of each other: nobody overwrites what is still read.
TEST_F(EpGpu, ManyDispatchesOfFewTokensWithoutCombine) {
  EpCase c = few(large(32));
  EpGroupRig r = rig(c);
  const EpInputs inputs(c, 5);
  const EpReference reference(c, inputs);
  r.load(inputs);
  for (u32 i = 0; i < 2000; ++i)
    (void)r.dispatch();
  const auto last = r.dispatch();
  ASSERT_NO_FATAL_FAILURE(r.synchronize());
  for (const auto& handle : last)
    ASSERT_NO_FATAL_FAILURE(r.check(handle, reference));
}

}  // namespace
}  // namespace crossdock::testing
