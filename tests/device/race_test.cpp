// ThreadSanitizer on device code, one TSan fiber per CUDA thread: planted races end the process
// with a report, the kernels without a bug do not. Built with CROSSDOCK_SANITIZE=thread only.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "mutation_fixture.hpp"

extern "C" {
// TSan asks for its options here. The first report ends the process: printing thousands takes
// minutes.
const char* __tsan_default_options();
const char* __tsan_default_options() {
  return "halt_on_error=1 exitcode=66";
}
}

namespace crossdock::testing {
namespace {

constexpr ExchangeShape kSmall{.world = 2, .blocks = 1, .rows = 16, .rounds = 2};
constexpr u64 kSeeds = 6;

twin::Schedule plain(u64 seed) {
  twin::Schedule s;
  s.seed = seed;
  s.proxy_check = false;
  return s;
}

TEST(TwinRace, CorrectKernelsHaveNone) {
  for (u64 seed = 0; seed < 10; ++seed) {
    const Verdict exchanged = run_exchange(Bug::kNone, plain(seed), kSmall);
    ASSERT_FALSE(exchanged.wrong) << exchanged.why;
    const Verdict multiplied = run_multiply(Bug::kNone, plain(seed), 6);
    ASSERT_FALSE(multiplied.wrong) << multiplied.why;
  }
}

[[noreturn]] void run_all(Bug bug) {
  for (u64 seed = 0; seed < kSeeds; ++seed)
    (void)(bug == Bug::kEarlyFree ? run_multiply(bug, plain(seed), 6)
                                  : run_exchange(bug, plain(seed), kSmall));
  std::_Exit(0);
}

class TwinRaceDeathTest : public ::testing::TestWithParam<Bug> {};

TEST_P(TwinRaceDeathTest, ThePlantedRaceIsReported) {
  EXPECT_EXIT(run_all(GetParam()), ::testing::ExitedWithCode(66), "ThreadSanitizer: data race");
}

INSTANTIATE_TEST_SUITE_P(Bugs, TwinRaceDeathTest,
                         ::testing::Values(Bug::kNoRelease, Bug::kNoAcquire, Bug::kNoBulkWait,
                                           Bug::kNoSyncWarp, Bug::kNoNamedBarrier,
                                           Bug::kBarrierEarly, Bug::kEarlyFree));

}  // namespace
}  // namespace crossdock::testing
