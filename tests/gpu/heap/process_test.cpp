// Symmetric heaps of several processes on one host, one real GPU each or shared where there are
// fewer: windows, barriers, a rank that does not come, one that is killed.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <gmock/gmock.h>

#include "gpu/gpu_fixture.hpp"
#include "support/symm_worker.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Sanitizers slow the ranks down by so much, and so differently, that barriers expire.
class GpuProcessesNotUnderSanitizer : public GpuTest {
 protected:
  template <class Change>
  void start(std::uint32_t members, Change&& change) {
    for (std::uint32_t m = 0; m < members; ++m) {
      SymmWorkerOptions o{.store = "file://" + folder_.path(),
                          .name = ::testing::UnitTest::GetInstance()->current_test_info()->name(),
                          .member = m,
                          .members = members,
                          .world = members,
                          .rank = m,
                          .backend = "gpu",
                          .device = device_of(m),
                          .bytes = std::uint64_t{64} << 20,
                          .timeout_ms = 90'000,
                          .share_gpus = share(members) ? "true" : "false",
                          .cache = cache()};
      change(o);
      workers_.push_back(std::make_unique<SymmWorker>(o));
    }
  }
  void start(std::uint32_t members) {
    start(members, [](SymmWorkerOptions&) {});
  }
  // A folder of the test's own, unless the run has one where kernels may be compiled already.
  std::string cache() const {
    return std::getenv("CROSSDOCK_JIT_CACHE_DIR") != nullptr ? "" : folder_.path() + "/kernels";
  }

  support::TempDir folder_;
  std::vector<std::unique_ptr<SymmWorker>> workers_;
};

TEST_F(GpuProcessesNotUnderSanitizer, SeeEachOthersWindowsAndMeet) {
  const std::uint32_t processes = num_processes();
  const std::string barriers = share(processes) ? "barrier 50" : "barrier 1000";
  start(processes);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  for (const std::string& ms : ask_all(workers_, "created"))
    std::printf("group of %u processes: %s ms\n", processes, ms.c_str());
  for (int round = 0; round < 2; ++round) {
    ASSERT_THAT(ask_all(workers_, "write"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "check"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "prepare"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, barriers), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "faults"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "reset 30000"), Each("ok"));
  }
  EXPECT_THAT(ask_all(workers_, "destroy"), Each("ok"));
}

TEST_F(GpuProcessesNotUnderSanitizer, ARankThatDoesNotComeIsNamedAndAResetMendsTheGroup) {
  start(2);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  ASSERT_THAT(ask_all(workers_, "prepare"), Each("ok"));
  ASSERT_THAT(ask_all(workers_, "barrier 5"), Each("ok"));
  const std::string answer = workers_[0]->ask("barrier 1");
  std::printf("%s\n", answer.c_str());
  EXPECT_THAT(answer, AllOf(StartsWith("error peer lost"), HasSubstr("kernel barrier"),
                            HasSubstr("for rank 1 in phase 'peer barrier': expected 6, saw 5")));
  EXPECT_THAT(workers_[0]->ask("faults"), StartsWith("error peer lost"));
  // The context has taken no harm, and after a reset neither has the group.
  EXPECT_EQ(workers_[0]->ask("write"), "ok");
  ASSERT_THAT(ask_all(workers_, "reset 30000"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, share(2) ? "barrier 50" : "barrier 1000"), Each("ok"));
}

TEST_F(GpuProcessesNotUnderSanitizer, AKilledProcessIsNamedByTheBarrierOfTheOthers) {
  start(2);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  ASSERT_THAT(ask_all(workers_, "prepare"), Each("ok"));
  ASSERT_THAT(ask_all(workers_, "barrier 5"), Each("ok"));
  // It waits at the barrier when its peer is killed.
  workers_[0]->say("barrier 1");
  workers_[1]->kill();
  EXPECT_THAT(workers_[0]->hear(), AllOf(StartsWith("error peer lost"), HasSubstr("for rank 1")));
  EXPECT_EQ(workers_[0]->ask("write"), "ok") << "the window of the dead is still mapped";
  EXPECT_EQ(workers_[0]->ask("destroy"), "ok");
}

TEST_F(GpuProcessesNotUnderSanitizer, TheSameGpuTwiceIsToldToBoth) {
  start(2, [](SymmWorkerOptions& o) {
    o.device = 0;
    o.share_gpus = "false";
  });
  EXPECT_THAT(ask_all(workers_, "create"),
              Each(HasSubstr("rank 0 and rank 1 are on the same GPU, GPU-")));
}

// Each process sees only its own GPU, as some launchers arrange it. Whether the driver maps memory
// of a GPU that is hidden is its own affair; that all processes get the same answer is ours.
TEST_F(GpuProcessesNotUnderSanitizer, GpusHiddenFromEachOther) {
  if (num_gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_gpus_;
  start(2, [](SymmWorkerOptions& o) {
    o.visible = std::to_string(o.device);
    o.device = 0;
  });
  const auto answers = ask_all(workers_, "create");
  std::printf("GPUs hidden from each other: %s\n", answers[0].c_str());
  if (answers[0] != "ok") {
    EXPECT_THAT(answers, Each(StartsWith("error")));
    return;
  }
  ASSERT_THAT(answers, Each("ok"));
  ASSERT_THAT(ask_all(workers_, "write"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "check"), Each("ok"));
}

}  // namespace
}  // namespace crossdock::testing
