// Expert parallelism between processes, one real GPU each or shared where there are fewer: rounds,
// a process that is killed and one that is stopped in the middle of a row of calls, the group after
// it, and how soon the others go on without one.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <csignal>
#include <gmock/gmock.h>
#include <thread>

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
  [[nodiscard]] EpWorkerOptions options(std::uint32_t rank, std::uint32_t world) const {
    return {.store = "file://" + folder_.path(),
            .name = "ep",
            .rank = rank,
            .world = world,
            .device = device_of(rank),
            .share_gpus = share(world),
            .wait_ms = share(world) ? 4000u : 1000u};
  }
  template <class Change>
  void create(std::uint32_t world, const Change& change) {
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      EpWorkerOptions o = options(rank, world);
      change(o);
      workers_.push_back(std::make_unique<EpWorker>(o));
    }
    ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  }
  void kill(std::size_t worker) {
    workers_[worker]->child().signal(SIGKILL);
    (void)workers_[worker]->child().wait();
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

// Two processes, on the path of many tokens, of few, and of few in packets.
struct PathOfTwo {
  const char* name;
  std::uint32_t tokens;
  bool few;
};
class EpPairNotUnderSanitizer : public EpProcessesNotUnderSanitizer,
                                public ::testing::WithParamInterface<PathOfTwo> {
 protected:
  void start() {
    ASSERT_NO_FATAL_FAILURE(create(2, [](EpWorkerOptions& o) {
      o.tokens = GetParam().tokens;
      o.few = GetParam().few;
    }));
    ASSERT_THAT(ask_all(workers_, "round 1"), Each("ok"));
  }
};

TEST_P(EpPairNotUnderSanitizer, RoundsAgreeWithTheReference) {
  ASSERT_NO_FATAL_FAILURE(start());
  for (int seed = 2; seed < 8; ++seed)
    ASSERT_THAT(ask_all(workers_, "round " + std::to_string(seed)), Each("ok"));
  EXPECT_THAT(ask_all(workers_, share(2) ? "loop 100" : "loop 2000"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "destroy"), Each("ok"));
}
TEST_P(EpPairNotUnderSanitizer, AKilledRankIsNamedAndTheContextIsWhole) {
  ASSERT_NO_FATAL_FAILURE(start());
  // It waits for its peer when that is killed.
  workers_[0]->say("dispatch 3");
  kill(1);
  EXPECT_THAT(answer_in_time(), AllOf(StartsWith("error peer lost"), HasSubstr("for rank 1")));
  EXPECT_EQ(workers_[0]->ask("device"), "ok");
  EXPECT_THAT(workers_[0]->ask("dispatch 4"), StartsWith("error peer lost"));
  EXPECT_THAT(workers_[0]->ask("reset 2000"), StartsWith("error"));
  EXPECT_EQ(workers_[0]->ask("device"), "ok");
  EXPECT_EQ(workers_[0]->ask("destroy"), "ok");
}
TEST_P(EpPairNotUnderSanitizer, ARankKilledInARowOfCallsIsNamed) {
  ASSERT_NO_FATAL_FAILURE(start());
  workers_[0]->say("loop 1000000");
  workers_[1]->say(share(2) ? "loop 50" : "loop 1000");
  EXPECT_EQ(workers_[1]->hear(), "ok");
  kill(1);
  EXPECT_THAT(answer_in_time(), AllOf(StartsWith("error peer lost"), HasSubstr("rank 1")));
  EXPECT_EQ(workers_[0]->ask("device"), "ok");
}
TEST_P(EpPairNotUnderSanitizer, AStoppedRankIsNamedAndTheGroupGoesOnAfterAReset) {
  ASSERT_NO_FATAL_FAILURE(start());
  workers_[1]->child().stop();
  EXPECT_THAT(workers_[0]->ask("dispatch 3"),
              AllOf(StartsWith("error peer lost"), HasSubstr("for rank 1")));
  workers_[1]->child().signal(SIGCONT);
  ASSERT_THAT(ask_all(workers_, "reset 30000"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "round 5"), Each("ok"));
}
INSTANTIATE_TEST_SUITE_P(Path, EpPairNotUnderSanitizer,
                         ::testing::Values(PathOfTwo{"many", 200, false},
                                           PathOfTwo{"few", 48, true},
                                           PathOfTwo{"packets", 6, true}),
                         [](const auto& test) { return test.param.name; });

// Kernels mask a rank that does not come, so its end costs the others one wait and no more, or half
// of one more where it had promised rows: the first step that is right without it, every byte
// compared, comes within that and `kSlack`, for the time in which the driver takes the killed
// process off the GPU and the host makes the reference.
class EpKilledNotUnderSanitizer : public EpProcessesNotUnderSanitizer,
                                  public ::testing::WithParamInterface<bool> {};

TEST_P(EpKilledNotUnderSanitizer, TheOthersMakeAGoodStepWithinAWaitAndAHalf) {
  constexpr std::uint32_t kWaitMs = 2000;
  constexpr auto kSlack = 500ms;  // two waits would be too late
  const std::uint32_t world = num_processes(3);
  ASSERT_NO_FATAL_FAILURE(create(world, [&](EpWorkerOptions& o) {
    o.wait_ms = kWaitMs;
    o.masks = true;
    o.few = GetParam();
    o.tokens = 48;
  }));
  ASSERT_THAT(ask_all(workers_, "step 1000"), Each("ok"));
  for (const auto& worker : workers_)
    worker->say("steps 60000");
  for (const auto& worker : workers_)
    ASSERT_EQ(worker->hear(), "whole");
  const auto killed = std::chrono::steady_clock::now();
  kill(world - 1);
  workers_.pop_back();
  for (const auto& worker : workers_) {
    const std::string answer = worker->hear();
    ASSERT_THAT(answer, StartsWith("good "));
    const std::chrono::steady_clock::time_point good{
        std::chrono::nanoseconds(std::stoll(answer.substr(5)))};
    const std::chrono::duration<double, std::milli> took = good - killed;
    std::printf("killed to good: %.0f ms with a wait of %u ms (%s)\n", took.count(), kWaitMs,
                answer.c_str());
    EXPECT_LE(took, std::chrono::milliseconds(kWaitMs) * 3 / 2 + kSlack);
    EXPECT_THAT(answer, HasSubstr(" masked " + std::to_string(1u << (world - 1)) + " "));
    EXPECT_THAT(answer, ::testing::Not(HasSubstr(" whole 0 ")))
        << "it was not killed in the middle";
  }
  EXPECT_THAT(ask_all(workers_, "step 2000"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "destroy"), Each("ok"));
}
INSTANTIATE_TEST_SUITE_P(Path, EpKilledNotUnderSanitizer, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "few" : "many"; });

// The members go on without a rank that was killed, then with a process that takes its seat.
class EpElasticNotUnderSanitizer : public EpProcessesNotUnderSanitizer {
 protected:
  void begin() {
    world_ = num_processes(3);
    ASSERT_NO_FATAL_FAILURE(create(world_, [this](EpWorkerOptions& o) { o = elastic(o.rank); }));
    EXPECT_THAT(ask_all(workers_, "step 1"), Each("ok"));
    kill(world_ - 1);
    workers_.pop_back();
    ASSERT_THAT(ask_all(workers_, "reform 60000"), Each("ok"));
    EXPECT_THAT(ask_all(workers_, "vacant"), Each("vacant " + std::to_string(world_ - 1)));
    EXPECT_THAT(ask_all(workers_, "step 2"), Each("ok"));
  }
  [[nodiscard]] EpWorkerOptions elastic(std::uint32_t rank) const {
    EpWorkerOptions o = options(rank, world_);
    o.tokens = 48;
    o.masks = o.elastic = true;
    o.fewest = world_ - 1;
    o.settle_ms = 3000;
    return o;
  }
  // A process comes for the vacant seat and the members let it in: what each of them says.
  std::vector<std::string> join(const EpWorkerOptions& o) {
    workers_.push_back(std::make_unique<EpWorker>(o));
    workers_.back()->say("create");
    // Starting it takes longer than the members wait for a seat.
    const std::string seat = "waiting " + std::to_string(world_ - 1);
    for (int turn = 0; turn < 600 && workers_[0]->ask("waiting") != seat; ++turn)
      std::this_thread::sleep_for(100ms);
    for (std::size_t i = 0; i + 1 < workers_.size(); ++i)
      workers_[i]->say("reform 60000");
    std::vector<std::string> answers;
    for (const auto& worker : workers_)
      answers.push_back(worker->hear());
    return answers;
  }
  std::uint32_t world_ = 0;
};

TEST_F(EpElasticNotUnderSanitizer, AProcessTakesTheSeatOfAKilledOne) {
  ASSERT_NO_FATAL_FAILURE(begin());
  ASSERT_THAT(join(elastic(world_ - 1)), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "vacant"), Each("vacant"));
  for (int seed = 3; seed < 6; ++seed)
    ASSERT_THAT(ask_all(workers_, "step " + std::to_string(seed)), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "destroy"), Each("ok"));
}
TEST_F(EpElasticNotUnderSanitizer, ANewcomerWithOtherSizesIsRefusedAndTheOthersGoOn) {
  ASSERT_NO_FATAL_FAILURE(begin());
  EpWorkerOptions other = elastic(world_ - 1);
  other.tokens = 96;
  EXPECT_THAT(join(other),
              Each(AllOf(StartsWith("error incompatible"),
                         HasSubstr("rank " + std::to_string(world_ - 1) + " asks for a window of"),
                         HasSubstr("rank 0 for"))));
  workers_.pop_back();
  EXPECT_THAT(workers_[0]->ask("step 3"), StartsWith("error closed"));
  ASSERT_THAT(ask_all(workers_, "reform 60000"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "vacant"), Each("vacant " + std::to_string(world_ - 1)));
  EXPECT_THAT(ask_all(workers_, "step 4"), Each("ok"));
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
