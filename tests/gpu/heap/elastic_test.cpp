// Elastic groups of processes with real GPUs, shared where there are fewer: one is killed, the
// other goes on with a vacant seat, a new process takes it, and barriers between all of them work
// with the kernels from before.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
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
class ElasticGpuNotUnderSanitizer : public GpuTest {
 protected:
  std::unique_ptr<SymmWorker> worker(std::uint32_t rank, std::uint32_t world,
                                     std::uint64_t bytes) const {
    return std::make_unique<SymmWorker>(SymmWorkerOptions{
        .store = "file://" + folder_.path(),
        .name = "elastic",
        .world = world,
        .rank = rank,
        .backend = "gpu",
        .device = device_of(rank),
        .bytes = bytes,
        .timeout_ms = 90'000,
        .share_gpus = share(world) ? "true" : "false",
        .cache =
            std::getenv("CROSSDOCK_JIT_CACHE_DIR") != nullptr ? "" : folder_.path() + "/kernels",
        .elastic = 1,
        .fewest = 1,
        .settle_ms = 2000});
  }
  void start(std::uint32_t world, std::uint64_t bytes) {
    for (std::uint32_t r = 0; r < world; ++r)
      workers_.push_back(worker(r, world, bytes));
    ASSERT_THAT(ask_all(workers_, "create"), Each("ok"));
    ASSERT_NO_FATAL_FAILURE(expect_all_meet());
  }
  void expect_all_meet() {
    ASSERT_THAT(ask_all(workers_, "prepare"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "write"), Each("ok"));
    ASSERT_THAT(ask_all(workers_, "check"), Each("ok"));
    const bool by_turns = share(static_cast<std::uint32_t>(workers_.size()));
    ASSERT_THAT(ask_all(workers_, by_turns ? "barrier 50" : "barrier 1000"), Each("ok"));
  }
  // The survivors reform, a new process takes the seat `rank`.
  void replace(std::uint32_t rank, std::uint32_t world, std::uint64_t bytes) {
    workers_.push_back(worker(rank, world, bytes));
    const auto begin = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i + 1 < workers_.size(); ++i)
      workers_[i]->say("reform 60000");
    workers_.back()->say("create");
    for (const auto& w : workers_)
      ASSERT_EQ(w->hear(), "ok");
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    std::printf("a new process in the seat of rank %u, its start included: %.0f ms\n", rank,
                took.count());
  }

  support::TempDir folder_;
  std::vector<std::unique_ptr<SymmWorker>> workers_;
};

TEST_F(ElasticGpuNotUnderSanitizer, AKilledProcessIsReplacedAgainAndAgain) {
  const std::uint32_t world = num_processes();
  constexpr std::uint64_t kBytes = std::uint64_t{4} << 30;
  ASSERT_NO_FATAL_FAILURE(start(world, kBytes));
  for (int round = 0; round < 3; ++round) {
    // The others wait at a barrier meanwhile.
    for (std::size_t i = 0; i + 1 < workers_.size(); ++i)
      workers_[i]->say("barrier 1");
    workers_.back()->kill();
    workers_.pop_back();
    for (const auto& w : workers_)
      EXPECT_THAT(w->hear(), StartsWith("error peer lost"));
    ASSERT_NO_FATAL_FAILURE(replace(world - 1, world, kBytes));
    ASSERT_NO_FATAL_FAILURE(expect_all_meet());
  }
  EXPECT_THAT(ask_all(workers_, "destroy"), Each("ok"));
}

TEST_F(ElasticGpuNotUnderSanitizer, AVacantSeatHarmsNobodyUntilItIsTaken) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 30;
  ASSERT_NO_FATAL_FAILURE(start(2, kBytes));
  workers_.back()->kill();
  workers_.pop_back();
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(workers_[0]->ask("reform 30000"), "ok");
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  std::printf("on with a vacant seat, 2000 ms of waiting for it included: %.0f ms\n", took.count());
  EXPECT_EQ(workers_[0]->ask("vacant"), "vacant 1");
  EXPECT_EQ(workers_[0]->ask("write"), "ok");
  // A kernel that does not leave the vacant rank alone waits in vain, and no more than that.
  EXPECT_THAT(workers_[0]->ask("barrier 1"),
              AllOf(StartsWith("error peer lost"), HasSubstr("for rank 1")));
  ASSERT_NO_FATAL_FAILURE(replace(1, 2, kBytes));
  ASSERT_NO_FATAL_FAILURE(expect_all_meet());
}

// It runs on, late, with what it has mapped from before: no word of it and no signal of its barrier
// may reach the window that the other uses now, alone or with a new process.
TEST_F(ElasticGpuNotUnderSanitizer, WhatOneThatWasLeftOutWritesReachesNobody) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 30;
  ASSERT_NO_FATAL_FAILURE(start(2, kBytes));
  const auto late = std::move(workers_.back());
  workers_.pop_back();
  ASSERT_EQ(workers_[0]->ask("reform 30000"), "ok");
  ASSERT_EQ(workers_[0]->ask("vacant"), "vacant 1");
  const auto expect_no_word = [&] {
    EXPECT_EQ(late->ask("write"), "ok");
    EXPECT_THAT(late->ask("barrier 1"), AllOf(StartsWith("error"), HasSubstr("for rank 0")));
    EXPECT_EQ(workers_[0]->ask("word 1"), "word 0");
  };
  ASSERT_NO_FATAL_FAILURE(expect_no_word());
  ASSERT_NO_FATAL_FAILURE(replace(1, 2, kBytes));
  EXPECT_EQ(late->ask("write"), "ok");
  EXPECT_THAT(ask_all(workers_, "word 1"), Each("word 0"));
  ASSERT_NO_FATAL_FAILURE(expect_all_meet());
}

}  // namespace
}  // namespace crossdock::testing
