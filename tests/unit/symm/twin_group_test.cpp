// A group whose ranks all live in this process, on the CPU: its windows are memory of the twin, and
// kernels run on it as they are. Wrong options, faults, reset, lifetimes.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <gmock/gmock.h>
#include <memory>

#include <crossdock/kernel/barrier.cuh>

#include "support/symm_members.hpp"
#include "symm/group.hpp"
#include "symm/heap.hpp"
#include "twin/launch.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using namespace crossdock::device;  // NOLINT: kernels and their parameters
using ::testing::HasSubstr;

Deadline soon() {
  return Deadline::in(30s);
}

constexpr BarrierConfig kBarrier{.threads = 32, .grid_sync = false, .verify = true};

struct BarrierArea {
  SymmetricLayout layout;
  PeerBarrierLayout barrier;
  u64 words;
  explicit BarrierArea(u32 world) {
    barrier = add_peer_barrier(layout, world);
    words = layout.add("words", u64{2} * world * kBarrier.threads * sizeof(u32));
  }
};

std::unique_ptr<Group> make(u32 world, const BarrierArea& setup, Addressing addressing) {
  auto made = Group::create({.world = world,
                             .backend = Backend::kCpu,
                             .addressing = addressing,
                             .cpu_local_bytes = 1 << 20},
                            setup.layout);
  EXPECT_TRUE(made.ok()) << made.error().describe();
  return std::move(made).value();
}

// One launch of the barrier kernel on the rank; its outputs live as long as this.
struct BarrierLaunch {
  LocalMemory elapsed;
  LocalMemory mismatches;

  BarrierLaunch(Group& group, u32 r, const BarrierArea& setup, u32 rounds) {
    Rank& rank = group.rank(r);
    elapsed = rank.allocate(sizeof(u64)).value();
    mismatches = rank.allocate(sizeof(u32)).value();
    BarrierParams p{};
    p.common = rank.common(KernelId::kBarrier, 5ms);
    p.view = rank.view();
    p.barrier = setup.barrier;
    p.words = setup.words;
    p.elapsed_ns = elapsed.as<u64>();
    p.mismatches = mismatches.as<u32>();
    p.rounds = rounds;
    twin::LaunchConfig config;
    config.rank = static_cast<int>(r);
    config.block = kBarrier.threads;
    config.name = "barrier";
    EXPECT_TRUE(group.twin()->launch(config, kernel::barrier<kBarrier>, p).ok());
  }
};

twin::Report run(Group& group, u64 seed, bool fire_deadlines = false) {
  twin::Schedule schedule;
  schedule.seed = seed;
  schedule.weak = true;
  schedule.stale = true;
  schedule.fire_deadlines = fire_deadlines;
  return group.twin()->run(schedule).value();
}

TEST(TwinGroup, KernelsMeetThroughItsWindows) {
  for (u32 world : {1u, 2u, 3u, 5u, 8u})
    for (Addressing addressing : {Addressing::kStride, Addressing::kTable}) {
      SCOPED_TRACE(world);
      const BarrierArea setup(world);
      const auto group = make(world, setup, addressing);
      ASSERT_EQ(group->local_ranks().size(), world);
      std::vector<BarrierLaunch> launches;
      for (u32 r = 0; r < world; ++r) {
        EXPECT_EQ(group->rank(r).view().offsets == nullptr, addressing == Addressing::kStride);
        launches.emplace_back(*group, r, setup, 7);
      }
      const auto report = run(*group, world);
      ASSERT_TRUE(report.ok()) << report.message;
      EXPECT_TRUE(group->check().ok());
      for (const auto& launch : launches) {
        EXPECT_EQ(*launch.mismatches.as<u32>(), 0u);
        EXPECT_GT(*launch.elapsed.as<u64>(), 0u);
      }
    }
}

TEST(TwinGroup, AMissingRankIsAnErrorAndAResetMendsIt) {
  const u32 world = 3;
  const BarrierArea setup(world);
  const auto group = make(world, setup, Addressing::kStride);
  auto state = group->rank(0).allocate_state(64).value();
  auto kept = group->rank(0).allocate(64).value();
  state.as<u32>()[3] = 77;
  kept.as<u32>()[3] = 77;
  for (u32 r : {0u, 2u}) {
    const BarrierLaunch launch(*group, r, setup, 1);
    (void)launch;
  }
  const auto report = run(*group, 1, true);
  ASSERT_TRUE(report.ok()) << report.message;
  const auto fault = group->check();
  ASSERT_EQ(fault.code(), Code::kPeerLost);
  EXPECT_EQ(fault.error().scope, Scope::kPeer);
  EXPECT_THAT(fault.error().message,
              HasSubstr("rank 0: kernel barrier (block 0) waited 5.000 ms for rank 1 in phase "
                        "'peer barrier': expected 1, saw 0"));
  EXPECT_EQ(group->rank(0).check().code(), Code::kPeerLost);
  EXPECT_TRUE(group->rank(1).check().ok()) << "it never waited";

  ASSERT_TRUE(group->reset(soon()).ok());
  EXPECT_EQ(state.as<u32>()[3], 0u);
  EXPECT_EQ(kept.as<u32>()[3], 77u);
  ASSERT_TRUE(group->check().ok());
  std::vector<BarrierLaunch> launches;
  for (u32 r = 0; r < world; ++r)
    launches.emplace_back(*group, r, setup, 6);
  ASSERT_TRUE(run(*group, 2).ok());
  EXPECT_TRUE(group->check().ok());
  for (const auto& launch : launches)
    EXPECT_EQ(*launch.mismatches.as<u32>(), 0u);
}

TEST(TwinGroup, AFaultInsideARankIsADeadline) {
  const BarrierArea setup(1);
  const auto group = make(1, setup, Addressing::kStride);
  auto* const record = group->rank(0).common(KernelId::kGridSyncBench, 1ms).fault;
  record->kernel = KernelId::kGridSyncBench;
  record->phase = Phase::kGridSync;
  record->peer = kNoPeer;
  record->waited_ns = 4'000'000;
  record->state = FaultRecord::kWritten;
  const auto fault = group->check();
  ASSERT_EQ(fault.code(), Code::kDeadline);
  EXPECT_THAT(fault.error().message,
              HasSubstr("kernel grid_sync_bench (block 0) waited 4.000 ms for its own blocks"));
}

TEST(TwinGroup, MemoryIsZeroedReusedAndOutlivesTheGroup) {
  const BarrierArea setup(2);
  auto group = make(2, setup, Addressing::kStride);
  Rank& rank = group->rank(1);
  // More in all than the rank has: freed blocks have to come back.
  for (int i = 0; i < 1000; ++i) {
    const auto memory = rank.allocate(64 << 10);
    ASSERT_TRUE(memory.ok()) << memory.error().describe();
    ASSERT_EQ(memory->as<u32>()[100], 0u);
    memory->as<u32>()[100] = 1;
  }
  EXPECT_EQ(rank.allocate(0).code(), Code::kInvalidArgument);
  EXPECT_EQ(rank.allocate(2 << 20).code(), Code::kNoMemory);
  const u32 value = 42;
  u32 back = 0;
  ASSERT_TRUE(rank.write(rank.at<u32>(setup.words), &value, sizeof value, soon()).ok());
  // Seen by rank 0 through its own view.
  const SymmetricView& view = group->rank(0).view();
  EXPECT_EQ(*view.at<u32>(setup.words, 1), 42u);
  ASSERT_TRUE(rank.read(&back, rank.at<u32>(setup.words), sizeof back, soon()).ok());
  EXPECT_EQ(back, 42u);
  auto memory = rank.allocate(256).value();
  group.reset();
  memory.as<u32>()[0] = 1;
  memory = {};
}

TEST(TwinGroup, WrongOptionsAreRefusedWithTheRule) {
  const BarrierArea setup(2);
  const auto refuse = [&](const GroupOptions& options, const SymmetricLayout& layout,
                          const char* text) {
    const auto made = Group::create(options, layout);
    ASSERT_EQ(made.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(made.error().message, HasSubstr(text));
  };
  refuse({.world = 0, .backend = Backend::kCpu}, setup.layout, "world = 0 must be 1 to 1024");
  refuse({.world = 1025, .backend = Backend::kCpu}, setup.layout, "world = 1025 must be");
  refuse({.world = 2, .backend = Backend::kCpu}, SymmetricLayout{}, "is empty: add an area");
  refuse({.world = 2, .ranks = {{.rank = 2}}, .backend = Backend::kCpu}, setup.layout,
         "rank 2 of a world of 2: ranks are 0 to 1");
  refuse({.world = 2, .ranks = {{.rank = 1}, {.rank = 1}}, .backend = Backend::kCpu}, setup.layout,
         "rank 1 is given twice");
  refuse({.world = 2, .ranks = {{.rank = 1}}, .backend = Backend::kCpu}, setup.layout,
         "1 of 2 ranks are in this process and there is no exchange");
  SymmetricLayout many;
  for (u32 i = 0; i <= SymmetricLayout::kMaxAreas; ++i)
    (void)many.add("area", 128);
  refuse({.world = 2, .backend = Backend::kCpu}, many, "more than 24 areas");
}

TEST(TwinGroup, ThousandCyclesLeaveNothing) {
  const BarrierArea setup(4);
  crossdock::testing::ProcessUse before;
  for (int i = 0; i < 1050; ++i) {
    if (i == 50) before = crossdock::testing::process_use();
    ASSERT_TRUE(make(4, setup, Addressing::kTable)->check().ok());
  }
  crossdock::testing::expect_no_growth(before, crossdock::testing::process_use());
}
// A process that dies takes its launches with it.
TEST(TwinHeap, WhatARankHadLaunchedGoesWithItsSeat) {
  const std::shared_ptr<twin::World> world = twin::World::create({.ranks = 2}).value();
  const auto heap = make_twin_heap(world, 4096);
  std::atomic<int> threads[2] = {};
  for (const u32 rank : {0u, 1u}) {
    ASSERT_TRUE(heap->allocate(rank).ok());
    ASSERT_TRUE(
        world->launch_body({.rank = static_cast<int>(rank)}, [&, rank] { ++threads[rank]; }).ok());
  }
  ASSERT_TRUE(heap->vacate(1).ok());
  ASSERT_TRUE(world->run({}).ok());
  EXPECT_GT(threads[0].load(), 0);
  EXPECT_EQ(threads[1].load(), 0);
}

}  // namespace
}  // namespace crossdock::symm
