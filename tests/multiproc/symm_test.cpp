// Symmetric groups of real processes, in host memory and on fake GPUs: they meet over a store, see
// each other's windows, disagree, run out of memory, and are killed at every step of the way.
// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <gmock/gmock.h>

#include "rendezvous/store_server.hpp"
#include "support/symm_members.hpp"
#include "support/symm_worker.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Workers = std::vector<std::unique_ptr<SymmWorker>>;

// The backend: "cpu", or "gpu" with the fake driver.
class SymmProcesses : public ::testing::TestWithParam<std::string> {
 protected:
  void TearDown() override { workers_.clear(); }
  SymmWorkerOptions options(std::uint32_t member, std::uint32_t members) const {
    SymmWorkerOptions o{.store = "file://" + folder_.path(),
                        .name = ::testing::UnitTest::GetInstance()->current_test_info()->name(),
                        .member = member,
                        .members = members,
                        .world = members,
                        .rank = member,
                        .backend = GetParam()};
    if (GetParam() == "gpu") {
      o.device = static_cast<int>(member);
      o.cuda = CROSSDOCK_FAKE_CUDA;
    }
    return o;
  }
  template <class Change>
  void start(std::uint32_t members, Change&& change) {
    for (std::uint32_t m = 0; m < members; ++m) {
      SymmWorkerOptions o = options(m, members);
      change(o);
      workers_.push_back(std::make_unique<SymmWorker>(o));
    }
    before_ = ask_all(workers_, "use");
  }
  void start(std::uint32_t members) {
    start(members, [](SymmWorkerOptions&) {});
  }
  // What a worker uses up when it has no group. A GPU's driver stays loaded.
  void expect_nothing_left(std::size_t worker) {
    const std::string now = workers_[worker]->ask("use");
    if (GetParam() == "gpu") {
      EXPECT_THAT(now, HasSubstr("live 0"));
    } else {
      EXPECT_EQ(now, before_[worker]);
    }
  }

  support::TempDir folder_;
  Workers workers_;
  std::vector<std::string> before_;
};

TEST_P(SymmProcesses, SeeEachOthersWindows) {
  start(4);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  for (int round = 0; round < 2; ++round) {
    ASSERT_THAT(ask_all(workers_, "check"), Each(HasSubstr("the word of rank 0 is 0")));
    ASSERT_THAT(ask_all(workers_, "write"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "check"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "reset 30000"), Each("ok"));
  }
  ASSERT_THAT(ask_all(workers_, "destroy"), Each("ok"));
  for (std::size_t i = 0; i < workers_.size(); ++i)
    expect_nothing_left(i);
}

TEST_P(SymmProcesses, MeetOverATcpStore) {
  const auto server = rendezvous::StoreServer::create({}, Deadline::in(30s)).value();
  start(2, [&](SymmWorkerOptions& o) {
    o.store = server->url();
    o.rank = 1 - o.member;  // ranks need not be numbered as the processes are
  });
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  ASSERT_THAT(ask_all(workers_, "write"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "check"), Each("ok"));
}

TEST_P(SymmProcesses, DisagreeOnTheSize) {
  start(3, [](SymmWorkerOptions& o) { o.bytes = o.member == 2 ? 1 << 20 : 4096; });
  EXPECT_THAT(ask_all(workers_, "create"),
              Each(AllOf(StartsWith("error incompatible"), HasSubstr("rank 2 asks for a window"),
                         HasSubstr("rank 0 for"))));
  expect_nothing_left(0);
  expect_nothing_left(2);
}

TEST_P(SymmProcesses, TwoProcessesWithOneRank) {
  start(3, [](SymmWorkerOptions& o) {
    if (o.member == 2) o.rank = 1;
  });
  EXPECT_THAT(ask_all(workers_, "create"),
              Each(HasSubstr("rank 1 is given twice: to process 1 and process 2 of 3")));
}

TEST_P(SymmProcesses, OneRunsOutOfMemory) {
  // A host process by its limit of addresses, a GPU by its size.
  const bool gpu = GetParam() == "gpu";
  if (!gpu && kUnderSanitizer)
    GTEST_SKIP() << "a sanitizer does not run under a limit of addresses";
  start(3, [&](SymmWorkerOptions& o) {
    o.bytes = std::uint64_t{16} << 30;
    if (gpu) o.bytes = 64 << 20;
    if (gpu && o.member == 1) o.fake_bytes = 32 << 20;
    if (!gpu && o.member == 1) o.address_space = std::uint64_t{4} << 30;
  });
  const auto answers = ask_all(workers_, "create");
  EXPECT_THAT(answers, Each(StartsWith("error out of memory")));
  EXPECT_THAT(answers[0], HasSubstr("rank 1 failed:"));
  EXPECT_THAT(answers[2], HasSubstr("rank 1 failed:"));
  for (std::size_t i = 0; i < workers_.size(); ++i)
    expect_nothing_left(i);
}

TEST_P(SymmProcesses, ANeverStartedProcessIsNamed) {
  start(3, [](SymmWorkerOptions& o) { o.timeout_ms = 2000; });
  workers_[1]->kill();
  for (const std::size_t survivor : {0u, 2u}) {
    workers_[survivor]->say("create");
  }
  for (const std::size_t survivor : {0u, 2u}) {
    EXPECT_THAT(workers_[survivor]->hear(),
                AllOf(StartsWith("error deadline"), HasSubstr("did not come in time: 1")));
    expect_nothing_left(survivor);
  }
}

// Killed before it proposes, before it tells that it has memory, and before it tells that it has
// mapped everything.
TEST_P(SymmProcesses, KilledDuringTheRendezvousIsNamed) {
  for (const int call : {0, 1, 2}) {
    SCOPED_TRACE(call);
    workers_.clear();
    start(3, [&](SymmWorkerOptions& o) {
      o.name += std::to_string(call);
      o.timeout_ms = o.member == 1 ? 60'000 : 4'000;
      if (o.member == 1) o.stop_before = call;
    });
    for (const auto& worker : workers_)
      worker->say("create");
    ASSERT_EQ(workers_[1]->hear(), "stopped");
    workers_[1]->kill();
    for (const std::size_t survivor : {0u, 2u}) {
      EXPECT_THAT(workers_[survivor]->hear(),
                  AllOf(StartsWith("error deadline"), HasSubstr("did not come in time: 1")));
      expect_nothing_left(survivor);
    }
  }
}

// Killed when it knows that all have memory and before it hands over its windows: the others see
// it at once, long before their time is over.
TEST_P(SymmProcesses, KilledWhileWindowsAreHandedOverIsNoticedAtOnce) {
  start(3, [](SymmWorkerOptions& o) {
    o.timeout_ms = 600'000;
    if (o.member == 1) o.stop_after = 1;
  });
  for (const auto& worker : workers_)
    worker->say("create");
  ASSERT_EQ(workers_[1]->hear(), "stopped");
  workers_[1]->kill();
  for (const std::size_t survivor : {0u, 2u}) {
    EXPECT_THAT(workers_[survivor]->hear(), AllOf(StartsWith("error peer lost"),
                                                  HasSubstr("the process of rank 1 ended while")));
    expect_nothing_left(survivor);
  }
}

TEST_P(SymmProcesses, KilledLaterLeavesItsWindowToTheOthers) {
  start(3);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  workers_[1]->kill();
  Workers survivors;
  survivors.push_back(std::move(workers_[0]));
  survivors.push_back(std::move(workers_[2]));
  // Its memory is still there: nobody crashes.
  EXPECT_THAT(ask_all(survivors, "write"), Each("ok"));
  EXPECT_THAT(ask_all(survivors, "faults"), Each("ok"));
  EXPECT_THAT(ask_all(survivors, "reset 3000"),
              Each(AllOf(StartsWith("error deadline"), HasSubstr("did not come in time: 1"))));
  EXPECT_THAT(ask_all(survivors, "faults"), Each(StartsWith("error closed")));
  EXPECT_THAT(ask_all(survivors, "destroy"), Each("ok"));
  workers_.clear();
}

INSTANTIATE_TEST_SUITE_P(Backend, SymmProcesses, ::testing::Values("cpu", "gpu"),
                         [](const auto& test) { return test.param; });

class SymmGpuProcesses : public SymmProcesses {};

TEST_P(SymmGpuProcesses, TheSameGpuTwiceIsToldToBoth) {
  start(2, [](SymmWorkerOptions& o) { o.device = 2; });
  EXPECT_THAT(ask_all(workers_, "create"),
              Each(HasSubstr("rank 0 and rank 1 are on the same GPU, GPU-fa000000")));
  expect_nothing_left(0);
}

TEST_P(SymmGpuProcesses, RanksShareAGpuIfAllProcessesSayTheSame) {
  start(2, [](SymmWorkerOptions& o) {
    o.device = 2;
    if (o.member == 1) o.share_gpus = "true";
  });
  EXPECT_THAT(ask_all(workers_, "create"),
              Each(HasSubstr("rank 1 has symm.share_gpus = true, rank 0 has false")));
  workers_.clear();
  start(2, [](SymmWorkerOptions& o) {
    o.device = 2;
    o.share_gpus = "true";
    o.name = "alike";
  });
  EXPECT_THAT(ask_all(workers_, "create"), Each("ok"));
  EXPECT_THAT(ask_all(workers_, "destroy"), Each("ok"));
}

TEST_P(SymmGpuProcesses, AGpuThatDoesNotExistIsToldToAll) {
  start(2, [](SymmWorkerOptions& o) {
    if (o.member == 1) o.device = 9;
  });
  const auto answers = ask_all(workers_, "create");
  EXPECT_THAT(answers[0], HasSubstr("rank 1 failed: GPU 9 does not exist"));
  EXPECT_THAT(answers[1], HasSubstr("GPU 9 does not exist"));
}

INSTANTIATE_TEST_SUITE_P(Backend, SymmGpuProcesses, ::testing::Values("gpu"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace crossdock::testing

int main(int argc, char** argv) {
  if (crossdock::testing::is_symm_worker(argc, argv))
    return crossdock::testing::symm_worker_main(argc, argv);
  std::signal(SIGPIPE, SIG_IGN);  // a killed child's stdin
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
