// The path for few tokens on real GPUs: payloads and sizes against the reference, graphs replayed
// with changing routing, both paths in one captured loop, two batches on two streams, long runs.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <gmock/gmock.h>
#include <optional>
#include <string>
#include <vector>

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
// One half of a rank's tokens, which is a batch of its own, and where its sums go.
ep::Tokens batch(EpGroupRig& rig, const EpCase& c, u32 rank, u32 which) {
  ep::Tokens t = rig.tokens(rank);
  const u32 first = which == 0 ? 0 : t.count / 2;
  t.count = which == 0 ? t.count / 2 : t.count - first;
  t.rows = static_cast<const u8*>(t.rows) + u64{first} * c.row_bytes;
  t.ids = static_cast<const i32*>(t.ids) + u64{first} * c.top_k;
  t.weights += u64{first} * c.top_k;
  return t;
}
// Two batches on two streams. Events put the calls into one order; the experts of one batch, here a
// copy, run beside what the other batch is about.
struct TwoBatches {
  EpGroupRig& rig;
  const EpCase& c;
  ep::Path path;
  u32 rank;
  const cuda::Stream* streams[2];
  std::vector<cuda::Event>& events;

  // What the stream is given from now on comes after what the other one has been given.
  void follow(u32 which) {
    auto& event = events.emplace_back(cuda::Event::create(streams[which]->context()).value());
    ASSERT_TRUE(event.record(*streams[1 - which]).ok());
    ASSERT_TRUE(streams[which]->wait(event).ok());
  }
  ep::Handle dispatch(u32 which) {
    return rig.group()
        .dispatch(rank, batch(rig, c, rank, which), {.path = path}, streams[which]->handle())
        .value();
  }
  void experts(const ep::Handle& handle, u32 which) const {
    const u64 bytes = u64{handle.received().capacity} * handle.received().row_bytes;
    ASSERT_TRUE(cuda::copy_async(cuda::device_ptr(handle.expert_input().rows),
                                 cuda::device_ptr(handle.received().rows), bytes, *streams[which])
                    .ok());
  }
  void combine(const ep::Handle& handle, u32 which) {
    const u64 first = which == 0 ? 0 : batch(rig, c, rank, 0).count;
    const auto done = rig.group().combine(
        handle, {.rows = rig.combined(rank) + first * c.combine_bytes}, streams[which]->handle());
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  void run() {
    const ep::Handle a = dispatch(0);
    ASSERT_NO_FATAL_FAILURE(follow(1));
    const ep::Handle b = dispatch(1);
    ASSERT_NO_FATAL_FAILURE(experts(a, 0));
    ASSERT_NO_FATAL_FAILURE(follow(0));
    ASSERT_NO_FATAL_FAILURE(combine(a, 0));
    ASSERT_NO_FATAL_FAILURE(experts(b, 1));
    ASSERT_NO_FATAL_FAILURE(follow(1));
    ASSERT_NO_FATAL_FAILURE(combine(b, 1));
    ASSERT_NO_FATAL_FAILURE(follow(0));
  }
};
struct TwoBatchCase {
  u32 tokens;  // of both
  ep::Path path;
};
class TwoBatchesGpu : public EpGpu, public ::testing::WithParamInterface<TwoBatchCase> {
 protected:
  void SetUp() override {
    EpGpu::SetUp();
    if (IsSkipped()) return;
    c_ = few(identity_case(world_, GetParam().tokens));
    rig_.emplace(rig(c_));
    for (const u32 rank : rig_->group().local_ranks())
      second_.push_back(cuda::Stream::create(*rig_->rank(rank).device().context()).value());
  }
  const cuda::Stream& own(u32 rank) { return *rig_->rank(rank).device().stream(); }
  void run(std::size_t index) {
    const u32 rank = rig_->group().local_ranks()[index];
    TwoBatches both{*rig_, c_, GetParam().path, rank, {&own(rank), &second_[index]}, events_};
    both.run();
  }
  EpCase c_;
  std::optional<EpGroupRig> rig_;
  std::vector<cuda::Stream> second_;  // of each rank
  std::vector<cuda::Event> events_;
};
TEST_P(TwoBatchesGpu, OnTwoStreams) {
  for (u32 seed = 1; seed <= 50; ++seed) {
    const EpInputs inputs = finite_inputs(c_, seed);
    rig_->load(inputs);
    for (std::size_t i = 0; i < second_.size(); ++i)
      ASSERT_NO_FATAL_FAILURE(run(i));
    ASSERT_NO_FATAL_FAILURE(rig_->synchronize());
    ASSERT_NO_FATAL_FAILURE(check_identity(*rig_, c_, inputs)) << "seed " << seed;
    events_.clear();
  }
}
TEST_P(TwoBatchesGpu, OnTwoStreamsInOneGraph) {
  rig_->load(finite_inputs(c_, 1));
  std::vector<cuda::Graph> graphs;
  for (std::size_t i = 0; i < second_.size(); ++i) {
    auto capture = cuda::Capture::begin(own(rig_->group().local_ranks()[i])).value();
    for (u32 turn = 0; turn < 3; ++turn)
      ASSERT_NO_FATAL_FAILURE(run(i));
    graphs.push_back(capture.finish().value());
  }
  ASSERT_NO_FATAL_FAILURE(replay_and_check(*rig_, c_, graphs, 100));
}
INSTANTIATE_TEST_SUITE_P(Path, TwoBatchesGpu,
                         ::testing::Values(TwoBatchCase{8, ep::Path::kSmall},
                                           TwoBatchCase{64, ep::Path::kSmall},
                                           TwoBatchCase{64, ep::Path::kLarge}),
                         [](const auto& test) {
                           const bool small = test.param.path == ep::Path::kSmall;
                           return (small ? "Few" : "Large") + std::to_string(test.param.tokens);
                         });
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
using EpReplaysNotUnderSanitizer = EpGpu;  // whose steps are too slow

// Decode steps in graphs, far ahead of the host, in packets and by flags. It proves that none of so
// many replays stalls, which would be a fault at its deadline, and that every so often, with other
// tokens and routings, what comes back is right; how long they take is for `crossdock bench ep`. A
// million where each rank has a GPU of its own. Where n ranks share one, each of them waits for n
// that take turns in its queues, so a step takes n * n times as long and there are so many fewer;
// with GPU_TEST_LONG=1 there are all of them.
TEST_F(EpReplaysNotUnderSanitizer, AMillionReplaysOfAStepWithoutAStall) {
  constexpr u32 kReplays = 500'000, kAtATime = 5'000;
  const bool all = std::getenv("GPU_TEST_LONG") != nullptr;
  const auto sharing = static_cast<u32>(ranks_of_a_gpu());
  const u32 wanted = all ? kReplays : kReplays / (sharing * sharing);
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
    const auto start = std::chrono::steady_clock::now();
    u32 replays = 0;
    for (u32 seed = 1; replays < wanted; ++seed, replays += kAtATime) {
      const EpInputs inputs = finite_inputs(c, seed);
      r.load(inputs);
      for (u32 i = 0; i < kAtATime; ++i)
        for (u32 rank = 0; rank < graphs.size(); ++rank)
          ASSERT_TRUE(
              graphs[rank].launch(*r.rank(r.group().local_ranks()[rank]).device().stream()).ok());
      ASSERT_NO_FATAL_FAILURE(r.synchronize()) << "after " << replays << " replays";
      ASSERT_NO_FATAL_FAILURE(check_identity(r, c, inputs)) << "after " << replays << " replays";
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("  %u tokens: %u replays, one in %.1f us with its part of the checks\n", tokens,
                replays, took.count() / replays);
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
