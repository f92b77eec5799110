// Planted bugs: each has to be found within 64 seeds by the method that is there for it, and the
// correct kernels have to pass every seed of every method. The table of docs/design/twin.md comes
// from here.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <string>

#include "mutation_fixture.hpp"
#include "twin/sanitizer.hpp"

#define SKIP_UNDER_TSAN() \
  if (twin::kTsan) GTEST_SKIP() << "TSan takes the place of the weak-memory model: race_test.cpp"

namespace crossdock::testing {
namespace {

constexpr u64 kSeeds = 64;

enum class Method {
  kPlain,    // seeded schedules on strong memory
  kWeak,     // with store buffers and stale loads
  kChecker,  // the shared-memory checker, on strong memory
  kEarly,    // plain, asynchronous operations at once
  kLate,     // plain, as late as is legal
};

twin::Schedule schedule_for(Method method, u64 seed) {
  twin::Schedule s;
  s.seed = seed;
  s.weak = s.stale = method == Method::kWeak;
  s.proxy_check = method == Method::kChecker;
  if (method == Method::kEarly) s.async_mode = twin::AsyncMode::kEarly;
  if (method == Method::kLate) s.async_mode = twin::AsyncMode::kLate;
  return s;
}

Verdict run(Bug bug, Method method, u64 seed) {
  const bool is_multiply = bug == Bug::kEarlyFree || bug == Bug::kNoFullWait;
  const twin::Schedule schedule = schedule_for(method, seed);
  return is_multiply ? run_multiply(bug, schedule) : run_exchange(bug, schedule);
}

struct Planted {
  const char* name;
  Bug bug;
  Method method;
  const char* evidence;  // part of the verdict
};

class TwinMutation : public ::testing::TestWithParam<Planted> {};

TEST_P(TwinMutation, IsFoundWithin64Seeds) {
  SKIP_UNDER_TSAN();
  const Planted planted = GetParam();
  for (u64 seed = 0; seed < kSeeds; ++seed) {
    const Verdict verdict = run(planted.bug, planted.method, seed);
    if (!verdict.wrong) continue;
    EXPECT_NE(verdict.why.find(planted.evidence), std::string::npos) << verdict.why;
    std::printf("  %s: seed %llu: %s\n", planted.name, static_cast<unsigned long long>(seed),
                verdict.why.substr(0, 160).c_str());
    return;
  }
  FAIL() << planted.name << " was not found in " << kSeeds << " seeds";
}

INSTANTIATE_TEST_SUITE_P(
    Bugs, TwinMutation,
    ::testing::Values(
        Planted{"missing_release", Bug::kNoRelease, Method::kWeak, "wrong data"},
        Planted{"missing_acquire", Bug::kNoAcquire, Method::kWeak, "wrong data"},
        Planted{"gpu_scope_across_ranks", Bug::kGpuScope, Method::kWeak, "wrong data"},
        Planted{"missing_bulk_wait", Bug::kNoBulkWait, Method::kPlain, "wrong data"},
        Planted{"missing_bulk_wait_checked", Bug::kNoBulkWait, Method::kChecker, "smem-reuse"},
        Planted{"missing_syncwarp", Bug::kNoSyncWarp, Method::kWeak, "wrong data"},
        Planted{"missing_proxy_fence", Bug::kNoProxyFence, Method::kChecker, "proxy"},
        Planted{"missing_named_barrier", Bug::kNoNamedBarrier, Method::kPlain, ""},
        Planted{"missing_named_barrier_weak", Bug::kNoNamedBarrier, Method::kWeak, ""},
        Planted{"barrier_too_early", Bug::kBarrierEarly, Method::kPlain, "wrong data"},
        Planted{"barrier_never", Bug::kBarrierDead, Method::kPlain, "rank barrier"},
        Planted{"tile_freed_early", Bug::kEarlyFree, Method::kLate, "wrong data"},
        Planted{"tile_freed_early_checked", Bug::kEarlyFree, Method::kChecker, "smem-reuse"},
        Planted{"tile_read_early", Bug::kNoFullWait, Method::kPlain, ""}),
    [](const auto& test) { return std::string(test.param.name); });

// Why operations have to complete late: completing at once hides the tile that is freed early.
TEST(TwinMutationLimits, EarlyCompletionHidesATileFreedEarly) {
  SKIP_UNDER_TSAN();
  for (u64 seed = 0; seed < 16; ++seed)
    EXPECT_FALSE(run(Bug::kEarlyFree, Method::kEarly, seed).wrong) << "seed " << seed;
}

// Why memory has to be weak: on strong memory these never show.
TEST(TwinMutationLimits, StrongMemoryHidesMissingOrder) {
  SKIP_UNDER_TSAN();
  for (u64 seed = 0; seed < 16; ++seed) {
    EXPECT_FALSE(run(Bug::kNoRelease, Method::kPlain, seed).wrong) << "seed " << seed;
    EXPECT_FALSE(run(Bug::kNoAcquire, Method::kPlain, seed).wrong) << "seed " << seed;
    EXPECT_FALSE(run(Bug::kGpuScope, Method::kPlain, seed).wrong) << "seed " << seed;
  }
}

TEST(TwinMutationControl, TheKernelsWithoutABugPassEverySeed) {
  SKIP_UNDER_TSAN();
  for (Method method :
       {Method::kPlain, Method::kWeak, Method::kChecker, Method::kEarly, Method::kLate})
    for (u64 seed = 0; seed < kSeeds; ++seed) {
      const Verdict exchanged = run(Bug::kNone, method, seed);
      ASSERT_FALSE(exchanged.wrong) << "seed " << seed << ": " << exchanged.why;
      if (seed % 4 != 0) continue;
      const Verdict multiplied = run_multiply(Bug::kNone, schedule_for(method, seed));
      ASSERT_FALSE(multiplied.wrong) << "seed " << seed << ": " << multiplied.why;
    }
}

}  // namespace
}  // namespace crossdock::testing
