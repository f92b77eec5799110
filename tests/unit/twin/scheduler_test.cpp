// Fibers, policies, replay, streams, deadlock reports and virtual time.
// SPDX-License-Identifier: Apache-2.0
#include <set>
#include <string>

#include "unit/twin/kit.hpp"

namespace crossdock::twin {
namespace {

using namespace kit;

TEST(TwinScheduler, EveryThreadOfEveryBlockRunsOnce) {
  auto world = make_world(2);
  for (int rank = 0; rank < 2; ++rank) {
    u32* out = make(*world, rank, 3 * 96);
    start(*world, {.rank = rank, .grid = 3, .block = 96}, [out] {
      st(out + block_index() * block_size() + thread_index(),
         hk::self().rank * 1000 + thread_index() + 1);
    });
  }
  ASSERT_TRUE(run(*world, {.seed = 3}).ok());
  for (int rank = 0; rank < 2; ++rank) {
    const auto* out = reinterpret_cast<const u32*>(world->heap(rank));
    for (u32 i = 0; i < 3 * 96; ++i)
      ASSERT_EQ(out[i], static_cast<u32>(rank) * 1000 + i % 96 + 1);
  }
}

struct Params {
  u32* out;
  u32 value;
};
CROSSDOCK_KERNEL write_params(CROSSDOCK_PARAMS(Params, p)) {
  st(p.out + thread_index(), p.value);
}

TEST(TwinScheduler, AKernelSeesItsParameters) {
  auto world = make_world(1);
  u32* out = make(*world, 0, 32);
  {
    Params params{out, 41};
    ASSERT_TRUE(world->launch({.block = 32}, write_params, params).ok());
    params.value = 0;  // the launch has its own copy
  }
  ASSERT_TRUE(run(*world, {}).ok());
  for (u32 i = 0; i < 32; ++i)
    ASSERT_EQ(out[i], 41u);
}

TEST(TwinScheduler, KernelsOfAStreamRunInOrderAndStreamsSideBySide) {
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    auto world = make_world(1);
    u32* flag = make(*world, 0, 64);
    u32* seen = make(*world, 0, 64);
    start(*world, {.block = 64}, [flag] { st(flag + thread_index(), thread_index() + 1); });
    start(*world, {.block = 64},
          [=] { st(seen + thread_index(), ld(flag + (thread_index() + 7) % 64)); });
    // Needs the other stream to run at the same time.
    u32* ping = make(*world, 0, 2);
    const hk::Access release{Order::kRelease, Scope::kGpu};
    const hk::Access acquire{Order::kAcquire, Scope::kGpu};
    start(*world, {.stream = 1, .block = 1}, [=] {
      st(ping, 1, release);
      wait_until(ping + 1, 1, acquire);
    });
    start(*world, {.stream = 2, .block = 1}, [=] {
      wait_until(ping, 1, acquire);
      st(ping + 1, 1, release);
    });
    const Report report = run(*world, schedule_of(seed));
    ASSERT_TRUE(report.ok()) << "seed " << seed << ": " << report.message;
    for (u32 i = 0; i < 64; ++i)
      ASSERT_EQ(seen[i], (i + 7) % 64 + 1) << "seed " << seed;
  }
}

std::uint64_t hash_of(std::uint64_t seed) {
  auto world = make_world(2);
  u32* counter = make(*world, 1, 1);
  for (int rank = 0; rank < 2; ++rank)
    start(*world, {.rank = rank, .grid = 2, .block = 64}, [counter] {
      add(counter, 1, {Order::kAcqRel, Scope::kSys});
      wait_until(counter, 256, {Order::kAcquire, Scope::kSys});
      syncthreads();
    });
  const Report report = run(*world, schedule_of(seed));
  EXPECT_TRUE(report.ok()) << report.message;
  return report.schedule_hash;
}

TEST(TwinScheduler, ASeedReplaysAndSeedsDiffer) {
  std::set<std::uint64_t> hashes;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::uint64_t first = hash_of(seed);
    ASSERT_EQ(first, hash_of(seed)) << "seed " << seed;
    hashes.insert(first);
  }
  EXPECT_EQ(hashes.size(), 20u);
}

TEST(TwinScheduler, ADeadlockNamesRankBlockThreadsOperationAndLine) {
  auto world = make_world(2);
  u32* flag = make(*world, 1, 1);
  start(*world, {.rank = 1, .grid = 2, .block = 64, .name = "waiter"}, [flag] {
    if (block_index() == 1) return;
    if (thread_index() < 32) {
      wait_until(flag, 1, {Order::kAcquire, Scope::kSys});
    } else {
      syncthreads();
    }
  });
  const u32 line = __LINE__;
  const Report report = run(*world, {.seed = 1});
  EXPECT_EQ(report.outcome, Outcome::kDeadlock);
  EXPECT_NE(report.message.find("rank 1 cta 0 of waiter: poll"), std::string::npos)
      << report.message;
  EXPECT_NE(report.message.find("[32 threads: 0-31]"), std::string::npos) << report.message;
  EXPECT_NE(report.message.find("__syncthreads 0 (32 of 64 threads)"), std::string::npos)
      << report.message;
  EXPECT_NE(report.message.find("scheduler_test.cpp:" + std::to_string(line - 5)),
            std::string::npos)
      << report.message;
  EXPECT_NE(report.message.find("64 of 128 threads have ended"), std::string::npos)
      << report.message;
}

TEST(TwinScheduler, ALivelockEndsAtTheStepLimit) {
  auto world = make_world(1);
  start(*world, {.block = 1}, [] {
    for (;;)
      hk::nanosleep(1, Site::here());
  });
  const Report report = run(*world, {.max_steps = 1000});
  EXPECT_EQ(report.outcome, Outcome::kStepLimit);
}

TEST(TwinScheduler, DeadlinesFireOnlyWhenAsked) {
  for (bool fire : {false, true}) {
    auto world = make_world(1);
    u32* flag = make(*world, 0, 1);
    u32* expired = make(*world, 0, 1);
    start(*world, {.block = 32}, [=] {
      const std::uint64_t start_ns = hk::global_timer();
      while (ld(flag, {Order::kAcquire, Scope::kSys}) == 0) {
        if (hk::global_timer() - start_ns > 2'000'000'000ull) {
          add(expired, 1, {Order::kRelaxed, Scope::kSys});
          return;
        }
        spin();
      }
    });
    const Report report = run(*world, {.seed = 5, .fire_deadlines = fire});
    EXPECT_EQ(report.outcome, fire ? Outcome::kCompleted : Outcome::kDeadlock) << report.message;
    EXPECT_EQ(*expired, fire ? 32u : 0u);
    if (fire) {
      EXPECT_GE(report.virtual_ns, 2'000'000'000ull);
    }
  }
}

TEST(TwinScheduler, MistakesOfTheCallerAreErrors) {
  auto world = make_world(2);
  const auto body = [] {};
  EXPECT_EQ(world->launch_body({.rank = 2}, body).code(), Code::kInvalidArgument);
  EXPECT_EQ(world->launch_body({.block = 1025}, body).code(), Code::kInvalidArgument);
  EXPECT_EQ(world->launch_body({.shared_bytes = 300'000}, body).code(), Code::kInvalidArgument);
  EXPECT_EQ(world->allocate(0, std::size_t{1} << 40).code(), Code::kNoMemory);
  EXPECT_EQ(world->allocate(5, 16).code(), Code::kInvalidArgument);
  EXPECT_EQ(World::create({.ranks = 0}).code(), Code::kInvalidArgument);
  EXPECT_EQ(World::create({.ranks = 1, .heap_bytes = 100}).code(), Code::kInvalidArgument);
}

TEST(TwinScheduler, WorldsCanExistSideBySide) {
  auto first = make_world(1);
  auto second = make_world(1);
  EXPECT_NE(first->heap(0), second->heap(0));
  u32* a = make(*first, 0, 1);
  u32* b = make(*second, 0, 1);
  start(*first, {.block = 1}, [a] { st(a, 1); });
  start(*second, {.block = 1}, [b] { st(b, 2); });
  ASSERT_TRUE(run(*second, {}).ok());
  ASSERT_TRUE(run(*first, {}).ok());
  EXPECT_EQ(*a, 1u);
  EXPECT_EQ(*b, 2u);
}

TEST(TwinScheduler, AForeignPointerIsAViolation) {
  auto world = make_world(2);
  make(*world, 0, 1);
  u32 host = 0;
  start(*world, {.block = 1}, [&host] { st(&host, 1); });
  const Report report = run(*world, {});
  EXPECT_EQ(report.outcome, Outcome::kViolation);
  EXPECT_EQ(report.kind, "out-of-bounds");
  EXPECT_EQ(host, 0u);
}

TEST(TwinScheduler, AnOverlappingKernelWaitsBeforeItTouchesMemory) {
  auto world = make_world(1);
  auto* word = make(*world, 0, 1);
  const LaunchConfig config{.block = 1, .overlap = true, .name = "early"};
  start(*world, config, [word] { st(word, 1); });
  const Report report = run(*world, {});
  EXPECT_EQ(report.outcome, Outcome::kViolation);
  EXPECT_EQ(report.kind, "dependency");
  EXPECT_EQ(*word, 0u);
  start(*world, config, [word] {
    hk::grid_dependency_wait(Site::here());
    st(word, 2);
  });
  ASSERT_TRUE(run(*world, {}).ok());
  EXPECT_EQ(*word, 2u);
}

// Without the call TSan reports the plain access and the load. What others do is looked at again.
TEST(TwinScheduler, AThreadThatGaveUpAWaitMayRace) {
  auto world = make_world(1);
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    start(*world, {.block = 64, .shared_bytes = 16}, [] {
      auto* words = reinterpret_cast<u32*>(dynamic_shared());
      if (thread_index() == 0) {
        words[0] = 1;
        st(words + 1, 1);
      } else if (thread_index() == 32) {
        hk::unordered_from_here(Site::here());
        hk::unordered_from_here(Site::here());  // twice is fine
        words[0] = 2;
        st(words + 2, ld(words + 1));
      }
    });
    ASSERT_TRUE(run(*world, schedule_of(seed)).ok());
  }
}

TEST(TwinScheduler, AttachedMemoryBelongsToItsRank) {
  auto world = make_world(2);
  alignas(16) static u32 outside[64];
  ASSERT_TRUE(world->attach(1, outside, sizeof outside).ok());
  EXPECT_EQ(world->attach(0, outside + 16, 16).code(), Code::kInvalidArgument);
  start(*world, {.block = 64}, [] { st(outside + thread_index(), thread_index()); });
  ASSERT_TRUE(run(*world, {.weak = true}).ok());
  for (u32 i = 0; i < 64; ++i)
    ASSERT_EQ(outside[i], i);
  ASSERT_TRUE(world->detach(outside).ok());
  EXPECT_EQ(world->detach(outside).code(), Code::kNotFound);
}

}  // namespace
}  // namespace crossdock::twin
