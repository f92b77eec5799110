// Roles and what they meet through: a kernel of three roles with register reallocation, mbarrier
// stages, named barriers and two grid-sync counters used side by side; and how all of them leave.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/comm/grid_sync.cuh>
#include <crossdock/role/role.cuh>

#include "ranks.hpp"

namespace crossdock::testing {
namespace {

constexpr u32 kStages = 3;
constexpr u32 kItems = 11;  // more than three turns of the stages
constexpr u32 kSyncs = 4;

struct RoleParams {
  LaunchCommon common;
  u32* sums;       // [grid]
  u32* words;      // [2][grid]
  u32* wrong;      // one word
  u32* left;       // threads that left early
  bool no_writer;  // the producer never fills a stage
};

// Shared memory: kStages numbers and their full and empty mbarriers.
struct RoleShared {
  ptx::MBarrier full[kStages];
  ptx::MBarrier empty[kStages];
  u32 item[kStages];
};
CROSSDOCK_DEVICE RoleShared& role_shared() {
  return *reinterpret_cast<RoleShared*>(dynamic_shared());
}

// One lane fills the stages.
struct Produce {
  static constexpr u32 kWarps = 4;
  static constexpr u32 kRegisters = 40;
  CROSSDOCK_DEVICE static void run(const RoleParams& p, u32 warp) {
    if (warp != 0 || lane_index() != 0 || p.no_writer) return;
    RoleShared& s = role_shared();
    for (u32 i = 0; i < kItems; ++i) {
      const u32 stage = i % kStages;
      if (!wait_stage(p.common, &s.empty[stage], (i / kStages & 1u) ^ 1u)) return;
      s.item[stage] = i * 100 + block_index();
      ptx::mbarrier_arrive(&s.full[stage]);
    }
  }
};

// A warpgroup takes them: all threads read the stage, then one frees it. It also meets the same
// group of the other blocks.
struct Consume {
  static constexpr u32 kWarps = 4;
  static constexpr u32 kRegisters = 208;
  CROSSDOCK_DEVICE static void run(const RoleParams& p, u32) {
    const ThreadGroup group{1, Produce::kWarps * kWarpSize, kWarps * kWarpSize};
    RoleShared& s = role_shared();
    u32 sum = 0;
    for (u32 i = 0; i < kItems; ++i) {
      const u32 stage = i % kStages;
      const bool full = wait_stage(p.common, &s.full[stage], i / kStages & 1u);
      if (group.any(!full)) return leave(p);
      sum += s.item[stage];
      group.sync();
      if (group.leader()) ptx::mbarrier_arrive(&s.empty[stage]);
    }
    if (!grid_sync(p.common, 2, group)) return leave(p);
    if (group.index() == 77) ptx::st_weak(p.sums + block_index(), sum);
  }
  CROSSDOCK_DEVICE static void leave(const RoleParams& p) { ptx::red_add_relaxed_gpu(p.left, 1u); }
};

// Meets the same warps of the other blocks on another counter, at its own pace.
struct Meet {
  static constexpr u32 kWarps = 4;
  static constexpr u32 kRegisters = 40;
  CROSSDOCK_DEVICE static void run(const RoleParams& p, u32) {
    const ThreadGroup group{2, 2 * kWarpgroupSize, kWarps * kWarpSize};
    for (u32 i = 0; i < kSyncs; ++i) {
      u32* words = p.words + (i & 1u) * grid_size();
      if (group.index() == 5) ptx::st_weak(words + block_index(), i * 1000 + block_index());
      if (!grid_sync(p.common, 1, group)) return;
      const u32 other = (block_index() + 1) % grid_size();
      if (group.index() == 9 && ptx::ld_weak(words + other) != i * 1000 + other)
        ptx::red_add_relaxed_gpu(p.wrong, 1u);
    }
  }
};

CROSSDOCK_KERNEL three_roles(CROSSDOCK_PARAMS(RoleParams, p)) {
  if (!may_start(p.common)) return;
  RoleShared& s = role_shared();
  if (thread_index() == 0) {
    for (u32 i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&s.full[i], 1);
      ptx::mbarrier_init(&s.empty[i], 1);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::sync_threads();
  run_roles<Produce, Consume, Meet>(p);
}

constexpr u32 kGrid = 2;
constexpr Ranks::Shape kShape{kGrid, RoleList<Produce, Consume, Meet>::kThreads, sizeof(RoleShared),
                              "three_roles"};

RoleParams role_params(Ranks& ranks) {
  return {ranks.common(0, KernelId::kNone), ranks.local<u32>(0, kGrid),
          ranks.local<u32>(0, 2 * kGrid),   ranks.local<u32>(0, 1),
          ranks.local<u32>(0, 1),           false};
}

TEST(Roles, WorkSideBySide) {
  Ranks ranks(1, {});
  const RoleParams p = role_params(ranks);
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    std::memset(p.sums, 0, kGrid * sizeof(u32));
    ranks.launch(0, kShape, three_roles, p);
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
    for (u32 block = 0; block < kGrid; ++block)
      ASSERT_EQ(p.sums[block], kItems * (kItems - 1) / 2 * 100 + kItems * block);
    ASSERT_EQ(*p.wrong, 0u);
    ASSERT_EQ(*p.left, 0u);
  }
}

TEST(Roles, AllLeaveWhenOneWaitFails) {
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(1, {});
    RoleParams p = role_params(ranks);
    p.no_writer = true;
    ranks.launch(0, kShape, three_roles, p);
    ASSERT_NO_FATAL_FAILURE(ranks.run(fault_schedule(seed)));
    expect_fault(ranks.fault(0), KernelId::kNone, Phase::kStage, 0, kNoPeer);
    EXPECT_LT(ranks.fault(0).block, kGrid);
    EXPECT_EQ(*p.left, kGrid * kWarpgroupSize) << "every thread of the consumers";
  }
}

}  // namespace
}  // namespace crossdock::testing
