// Expert parallelism between processes, one real GPU each: rounds, a process that is killed and one
// that is stopped in the middle of a row of dispatches, and the group after it.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <gmock/gmock.h>

#include "gpu/gpu_fixture.hpp"
#include "support/ep_worker.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Sanitizers slow the ranks down by so much, and so differently, that waits expire.
class EpProcessesNotUnderSanitizer : public GpuTest {
 protected:
  void start() {
    for (std::uint32_t rank = 0; rank < 2; ++rank)
      workers_.push_back(std::make_unique<EpWorker>(
          EpWorkerOptions{.store = "file://" + folder_.path(),
                          .name = ::testing::UnitTest::GetInstance()->current_test_info()->name(),
                          .rank = rank,
                          .world = 2}));
    ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "round 1"), Each("ok"));
  }
  // The answer of the rank that is left, which comes within its deadline and not much later.
  std::string answer_in_time() {
    const auto begin = std::chrono::steady_clock::now();
    std::string answer = workers_[0]->hear();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
    std::printf("%s\n", answer.c_str());
    return answer;
  }
  support::TempDir folder_;
  std::vector<std::unique_ptr<EpWorker>> workers_;
};

TEST_F(EpProcessesNotUnderSanitizer, RoundsAgreeWithTheReference) {
  if (num_gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_gpus_;
  ASSERT_NO_FATAL_FAILURE(start());
  for (int seed = 2; seed < 8; ++seed)
    ASSERT_THAT(ask_all(workers_, "round " + std::to_string(seed)), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "loop 2000"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "destroy"), Each("ok"));
}
TEST_F(EpProcessesNotUnderSanitizer, AKilledRankIsNamedAndTheContextIsWhole) {
  if (num_gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_gpus_;
  ASSERT_NO_FATAL_FAILURE(start());
  // It waits for its peer when that is killed.
  workers_[0]->say("dispatch 3");
  workers_[1]->child().signal(SIGKILL);
  (void)workers_[1]->child().wait();
  EXPECT_THAT(answer_in_time(), AllOf(StartsWith("error peer lost"), HasSubstr("for rank 1")));
  EXPECT_EQ(workers_[0]->ask("device"), "ok");
  EXPECT_THAT(workers_[0]->ask("dispatch 4"), StartsWith("error peer lost"));
  EXPECT_THAT(workers_[0]->ask("reset 2000"), StartsWith("error"));
  EXPECT_EQ(workers_[0]->ask("device"), "ok");
  EXPECT_EQ(workers_[0]->ask("destroy"), "ok");
}
TEST_F(EpProcessesNotUnderSanitizer, ARankKilledInARowOfDispatchesIsNamed) {
  if (num_gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_gpus_;
  ASSERT_NO_FATAL_FAILURE(start());
  workers_[0]->say("loop 1000000");
  workers_[1]->say("loop 1000");
  EXPECT_EQ(workers_[1]->hear(), "ok");
  workers_[1]->child().signal(SIGKILL);
  (void)workers_[1]->child().wait();
  EXPECT_THAT(answer_in_time(), AllOf(StartsWith("error peer lost"), HasSubstr("rank 1")));
  EXPECT_EQ(workers_[0]->ask("device"), "ok");
}
TEST_F(EpProcessesNotUnderSanitizer, AStoppedRankIsNamedAndTheGroupGoesOnAfterAReset) {
  if (num_gpus_ < 2) GTEST_SKIP() << "needs 2 GPUs, there is " << num_gpus_;
  ASSERT_NO_FATAL_FAILURE(start());
  workers_[1]->child().stop();
  EXPECT_THAT(workers_[0]->ask("dispatch 3"),
              AllOf(StartsWith("error peer lost"), HasSubstr("for rank 1")));
  workers_[1]->child().signal(SIGCONT);
  ASSERT_THAT(ask_all(workers_, "reset 30000"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "round 5"), Each("ok"));
}

}  // namespace
}  // namespace crossdock::testing

int main(int argc, char** argv) {
  if (crossdock::testing::is_ep_worker(argc, argv))
    return crossdock::testing::ep_worker_main(argc, argv);
  std::signal(SIGPIPE, SIG_IGN);  // a killed child's stdin
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
