// Elastic groups of real processes, in host memory and on fake GPUs: a member is killed, the others
// go on without it or with a new process in its seat, several times; newcomers that do not fit,
// that die at the meeting, that come too late. All of them end with an error or a group, none waits
// for ever.
// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <gmock/gmock.h>

#include "rendezvous/store.hpp"
#include "support/symm_worker.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ElasticProcesses : public ::testing::TestWithParam<std::string> {
 protected:
  void TearDown() override { workers_.clear(); }
  SymmWorkerOptions options(std::uint32_t rank, std::uint32_t world) const {
    SymmWorkerOptions o{.store = "file://" + folder_.path(),
                        .name = "elastic",
                        .world = world,
                        .rank = rank,
                        .backend = GetParam(),
                        .elastic = 1};
    if (GetParam() == "gpu") {
      o.device = static_cast<int>(rank);
      o.cuda = CROSSDOCK_FAKE_CUDA;
    }
    return o;
  }
  void start(std::uint32_t world, std::uint32_t fewest) {
    fewest_ = fewest;
    for (std::uint32_t r = 0; r < world; ++r)
      workers_.push_back(worker(r, world));
  }
  std::unique_ptr<SymmWorker> worker(std::uint32_t rank, std::uint32_t world,
                                     std::uint64_t bytes = 4096) const {
    SymmWorkerOptions o = options(rank, world);
    o.fewest = fewest_;
    o.bytes = bytes;
    return std::make_unique<SymmWorker>(o);
  }
  // Everybody writes into every window and finds what the others have written.
  void expect_all_talk() {
    ASSERT_THAT(ask_all(workers_, "write"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "check"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "reset 30000"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "write"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "check"), Each("ok"));
  }
  // A process that wants to join has taken its seat when this returns.
  void wait_for_seat(std::uint32_t generation, std::uint32_t rank) const {
    const auto store =
        rendezvous::open_store("file://" + folder_.path(), Deadline::in(10s)).value();
    const auto seat =
        store->wait("elastic/meet/" + std::to_string(generation) + "/seat/" + std::to_string(rank),
                    Deadline::in(30s));
    ASSERT_TRUE(seat.ok()) << seat.error().describe();
  }

  support::TempDir folder_;
  std::uint32_t fewest_ = 0;
  std::vector<std::unique_ptr<SymmWorker>> workers_;
};

TEST_P(ElasticProcesses, ANewProcessTakesTheSeatOfAKilledOne) {
  start(3, 0);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
  for (const std::size_t victim : {1u, 2u, 0u}) {
    SCOPED_TRACE(victim);
    workers_[victim]->kill();
    workers_[victim] = worker(static_cast<std::uint32_t>(victim), 3);
    for (std::size_t i = 0; i < workers_.size(); ++i)
      workers_[i]->say(i == victim ? "create" : "reform 30000");
    for (const auto& w : workers_)
      ASSERT_EQ(w->hear(), "ok");
    ASSERT_THAT(ask_all(workers_, "vacant"), Each("vacant"));
    ASSERT_NO_FATAL_FAILURE(expect_all_talk());
  }
  ASSERT_THAT(ask_all(workers_, "destroy"), Each("ok"));
}

TEST_P(ElasticProcesses, TheOthersGoOnWithAVacantSeatUntilSomebodyTakesIt) {
  start(3, 2);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  workers_[1]->kill();
  workers_.erase(workers_.begin() + 1);
  // The seat of the killed one harms nobody who writes into it.
  ASSERT_THAT(ask_all(workers_, "reform 30000"), Each("ok"));
  ASSERT_THAT(ask_all(workers_, "vacant"), Each("vacant 1"));
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
  ASSERT_THAT(ask_all(workers_, "reform 30000"), Each("ok")) << "still vacant";
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
  // Somebody comes; the members see it, and let it in.
  auto newcomer = worker(1, 3);
  newcomer->say("create");
  ASSERT_NO_FATAL_FAILURE(wait_for_seat(4, 1));
  EXPECT_THAT(ask_all(workers_, "waiting"), Each("waiting 1"));
  ASSERT_THAT(ask_all(workers_, "reform 30000"), Each("ok"));
  ASSERT_EQ(newcomer->hear(), "ok");
  workers_.push_back(std::move(newcomer));
  ASSERT_THAT(ask_all(workers_, "vacant"), Each("vacant"));
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
}

// A newcomer maps a seat that was vacant before it came, as the others do.
TEST_P(ElasticProcesses, OneOfTwoVacantSeatsIsTaken) {
  start(4, 2);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  workers_[1]->kill();
  workers_[3]->kill();
  workers_.erase(workers_.begin() + 3);
  workers_[1] = worker(1, 4);
  for (std::size_t i = 0; i < workers_.size(); ++i)
    workers_[i]->say(i == 1 ? "create" : "reform 30000");
  for (const auto& w : workers_)
    ASSERT_EQ(w->hear(), "ok");
  ASSERT_THAT(ask_all(workers_, "vacant"), Each("vacant 3"));
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
}

TEST_P(ElasticProcesses, ANewcomerWithOtherSizesIsRefusedNamingBoth) {
  start(2, 0);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  workers_[1]->kill();
  workers_[1] = worker(1, 2, 1 << 20);
  workers_[0]->say("reform 30000");
  workers_[1]->say("create");
  for (const auto& w : workers_)
    EXPECT_THAT(w->hear(), AllOf(StartsWith("error incompatible"),
                                 HasSubstr("rank 1 asks for a window"), HasSubstr("rank 0 for")));
  EXPECT_THAT(workers_[0]->ask("faults"), AllOf(StartsWith("error closed"), HasSubstr("reform()")));
  EXPECT_THAT(workers_[0]->ask("reset 1000"), StartsWith("error closed"));
  // One that fits heals the group.
  workers_[1] = worker(1, 2);
  workers_[0]->say("reform 30000");
  workers_[1]->say("create");
  for (const auto& w : workers_)
    ASSERT_EQ(w->hear(), "ok");
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
}

TEST_P(ElasticProcesses, ANewcomerThatDiesAtTheMeetingIsNamedAndTheNextOneIsLetIn) {
  start(3, 0);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  workers_[2]->kill();
  auto doomed = worker(2, 3);
  doomed->say("create");
  ASSERT_NO_FATAL_FAILURE(wait_for_seat(2, 2));
  doomed->kill();
  workers_.pop_back();
  EXPECT_THAT(ask_all(workers_, "reform 3000"),
              Each(AllOf(StartsWith("error deadline"), HasSubstr("did not come in time: 2"))));
  workers_.push_back(worker(2, 3));
  for (std::size_t i = 0; i < workers_.size(); ++i)
    workers_[i]->say(i == 2 ? "create" : "reform 30000");
  for (const auto& w : workers_)
    ASSERT_EQ(w->hear(), "ok");
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
}

TEST_P(ElasticProcesses, NobodyWaitsForEverForASeatThatNobodyTakes) {
  start(3, 0);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  workers_[1]->kill();
  workers_.erase(workers_.begin() + 1);
  EXPECT_THAT(ask_all(workers_, "reform 1500"),
              Each(AllOf(StartsWith("error deadline"), HasSubstr("the seats of ranks 1 of 3"),
                         HasSubstr("no fewer than 3"))));
}

TEST_P(ElasticProcesses, TwoProcessesCannotHaveOneSeat) {
  start(2, 0);
  workers_[0]->say("create");
  ASSERT_NO_FATAL_FAILURE(wait_for_seat(1, 0));
  auto other = worker(0, 2);
  EXPECT_THAT(other->ask("create"),
              AllOf(StartsWith("error invalid argument"), HasSubstr("the seat of rank 0"),
                    HasSubstr("taken by another process")));
  EXPECT_EQ(workers_[1]->ask("create"), "ok");
  EXPECT_EQ(workers_[0]->hear(), "ok");
}

// The others have waited long enough and gone on; who comes later waits for their next meeting.
TEST_P(ElasticProcesses, WhoComesTooLateWaitsForTheNextMeeting) {
  start(3, 2);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  workers_[0]->say("reform 30000");
  workers_[1]->say("reform 30000");
  ASSERT_EQ(workers_[0]->hear(), "ok");
  ASSERT_EQ(workers_[1]->hear(), "ok");
  EXPECT_EQ(workers_[0]->ask("vacant"), "vacant 2");
  // Its own reform goes to the next meeting, where the others come again.
  workers_[2]->say("reform 30000");
  ASSERT_NO_FATAL_FAILURE(wait_for_seat(3, 2));
  workers_[0]->say("reform 30000");
  workers_[1]->say("reform 30000");
  for (const auto& w : workers_)
    ASSERT_EQ(w->hear(), "ok");
  ASSERT_THAT(ask_all(workers_, "vacant"), Each("vacant"));
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
}

// It is alive and has mapped what the others had: what it still writes must reach none of the
// windows that they use now, nor that of the process that has its seat.
TEST_P(ElasticProcesses, WhatOneThatWasLeftOutWritesReachesNobody) {
  start(3, 2);
  ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
  const auto late = std::move(workers_[2]);
  workers_.pop_back();
  ASSERT_THAT(ask_all(workers_, "reform 30000"), Each("ok"));
  ASSERT_THAT(ask_all(workers_, "vacant"), Each("vacant 2"));
  ASSERT_EQ(late->ask("write"), "ok");
  EXPECT_THAT(ask_all(workers_, "word 2"), Each("word 0"));
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
  EXPECT_EQ(late->ask("word 0"), "word 0");
  workers_.push_back(worker(2, 3));
  for (std::size_t i = 0; i < workers_.size(); ++i)
    workers_[i]->say(i == 2 ? "create" : "reform 30000");
  for (const auto& w : workers_)
    ASSERT_EQ(w->hear(), "ok");
  ASSERT_EQ(late->ask("write"), "ok");
  EXPECT_THAT(ask_all(workers_, "word 2"), Each("word 0"));
  ASSERT_NO_FATAL_FAILURE(expect_all_talk());
  EXPECT_EQ(late->ask("destroy"), "ok");
  EXPECT_THAT(ask_all(workers_, "check"), Each("ok"));
}

INSTANTIATE_TEST_SUITE_P(Backend, ElasticProcesses, ::testing::Values("cpu", "gpu"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace crossdock::testing
