// The watch alone, over one rank of the CPU whose peer never says a word: waits that are ended
// before their time, what is asked of the watch while a read of a word takes long, and words that a
// GPU, which the fake driver plays, reads and writes late.
// SPDX-License-Identifier: Apache-2.0
#include "coll/watch.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <gmock/gmock.h>

#include "support/coll_cases.hpp"
#include "support/fake_cuda/fixture.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

// Words whose reads stand still until they are let go, as on a GPU that does not answer.
class SlowWords final : public coll::Words {
 public:
  struct Gate {
    std::promise<void> reached, open;
    std::shared_future<void> opened{open.get_future()};
    std::atomic<bool> seen{false};
  };
  SlowWords(std::unique_ptr<coll::Words> words, Gate& gate)
      : words_(std::move(words)), gate_(gate) {}
  Result<> read(void* to, const void* from, u64 bytes) override {
    if (!gate_.seen.exchange(true)) gate_.reached.set_value();
    (void)gate_.opened.wait_for(60s);
    return words_->read(to, from, bytes);
  }
  Result<> write(void* to, const void* from, u64 bytes) override {
    return words_->write(to, from, bytes);
  }

 private:
  std::unique_ptr<coll::Words> words_;
  Gate& gate_;
};

// The first writes end at their deadline, and so does waiting for what they left.
class LateWords final : public coll::Words {
 public:
  LateWords(std::unique_ptr<coll::Words> words, int late) : words_(std::move(words)), late_(late) {}
  Result<> read(void* to, const void* from, u64 bytes) override {
    return words_->read(to, from, bytes);
  }
  Result<> write(void* to, const void* from, u64 bytes) override {
    if (late_ > 0 && late_-- > 0) return make_error(Code::kDeadline, "late");
    return words_->write(to, from, bytes);
  }
  Result<> finish(Deadline) override {
    if (std::exchange(finished_, true)) return {};
    return make_error(Code::kDeadline, "still late");
  }

 private:
  std::unique_ptr<coll::Words> words_;
  int late_;
  bool finished_ = false;
};

class CollWatch : public ::testing::Test {
 protected:
  using Wrap = std::function<std::unique_ptr<coll::Words>(std::unique_ptr<coll::Words>)>;
  void start(std::chrono::nanoseconds wait, SlowWords::Gate& gate) {
    start(wait, [&](auto words) { return std::make_unique<SlowWords>(std::move(words), gate); });
  }
  void start(std::chrono::nanoseconds wait, const Wrap& wrap = {}) {
    window_ = coll::make_window(coll_options(), 2).value();
    group_ =
        symm::Group::create({.world = 2, .backend = symm::Backend::kCpu}, window_.layout).value();
    marks_ = rank().allocate_host(coll::num_sites(2) * sizeof(coll::Mark)).value();
    lane_ = coll::CpuLane::create(0).value();
    auto words = coll::make_words(rank()).value();
    if (wrap) words = wrap(std::move(words));
    std::vector<coll::Watch::Watched> watched;
    watched.push_back({&rank(), marks_.host<coll::Mark>(), std::move(words)});
    watch_ = coll::Watch::start(window_, std::move(watched), wait).value();
  }
  // Ends its lane before what the lane waits for.
  void TearDown() override { lane_.reset(); }

  symm::Rank& rank() { return group_->rank(0); }
  // The lane waits for rank 1 at the barrier.
  void wait_for_the_peer() {
    coll::Steps steps(rank(), window_, marks_.device<coll::Mark>());
    EXPECT_OK(coll::Lane(lane_.get())
                  .words(steps.await(coll::kBarrierSite, {.what = coll::What::kHere}).take()));
  }

  coll::Window window_;
  std::unique_ptr<symm::Group> group_;
  symm::HostMemory marks_;
  std::unique_ptr<coll::CpuLane> lane_;
  std::unique_ptr<coll::Watch> watch_;
};

TEST_F(CollWatch, WaitsEndBeforeTheirTimeWhenAllAreEnded) {
  start(1h);
  wait_for_the_peer();
  EXPECT_EQ(lane_->drain(Deadline::in(50ms)).code(), Code::kDeadline);
  EXPECT_OK(watch_->check(0));
  watch_->end_waits();
  EXPECT_OK(lane_->drain(Deadline::in(20s)));
  wait_for_the_peer();  // what comes later too
  EXPECT_OK(lane_->drain(Deadline::in(20s)));
  EXPECT_EQ(watch_->check(0).code(), Code::kPeerLost);
  EXPECT_EQ(*rank().at<u64>(window_.failed, 1), 1u) << "the peer is told that rank 0 is gone";
}

TEST_F(CollWatch, NobodyWaitsForAReadOfAWord) {
  SlowWords::Gate gate;
  start(1ms, gate);
  wait_for_the_peer();
  ASSERT_EQ(gate.reached.get_future().wait_for(20s), std::future_status::ready);
  auto checked = std::async(std::launch::async, [&] { return watch_->check(0); });
  auto failed = std::async(std::launch::async, [&] {
    watch_->fail(0, make_error(Code::kInternal, "a kernel has failed"));
  });
  EXPECT_EQ(checked.wait_for(10s), std::future_status::ready);
  EXPECT_EQ(failed.wait_for(10s), std::future_status::ready);
  gate.open.set_value();
  EXPECT_OK(lane_->drain(Deadline::in(20s)));
  EXPECT_EQ(watch_->check(0).code(), Code::kInternal) << "the first failure stays";
}

TEST_F(CollWatch, APauseWaitsForTheLookAndThenNothingIsTouched) {
  SlowWords::Gate gate;
  start(1ms, gate);
  wait_for_the_peer();
  ASSERT_EQ(gate.reached.get_future().wait_for(20s), std::future_status::ready);
  const auto early = watch_->pause(Deadline::in(20ms));
  ASSERT_EQ(early.code(), Code::kDeadline) << "it is still reading";
  EXPECT_THAT(early.error().message, HasSubstr("does not answer"));
  gate.open.set_value();
  EXPECT_OK(lane_->drain(Deadline::in(20s)));
  EXPECT_OK(watch_->pause(soon()));
  watch_->forget();
  EXPECT_OK(watch_->check(0));
  wait_for_the_peer();
  EXPECT_EQ(lane_->drain(Deadline::in(200ms)).code(), Code::kDeadline) << "nobody ends the wait";
  watch_->resume();
  EXPECT_OK(lane_->drain(Deadline::in(20s)));
  EXPECT_EQ(watch_->check(0).code(), Code::kPeerLost);
}

// Else the peer would read what the released stream overwrites, and take it for good.
TEST_F(CollWatch, NoWaitEndsBeforeThePeersHaveBeenTold) {
  start(1ms, [](auto words) { return std::make_unique<LateWords>(std::move(words), 1); });
  wait_for_the_peer();
  EXPECT_OK(lane_->drain(Deadline::in(20s)));
  EXPECT_EQ(*rank().at<u64>(window_.failed, 1), 1u);
  EXPECT_NE(rank().control()->abort.value, 0u);
}

TEST_F(CollWatch, APauseWaitsForAccessesThatEndedAtTheirDeadline) {
  start(1h, [](auto words) { return std::make_unique<LateWords>(std::move(words), 0); });
  EXPECT_EQ(watch_->pause(soon()).code(), Code::kDeadline) << "words may still be written";
  EXPECT_OK(watch_->pause(soon()));
  watch_->resume();
}

class CollWords : public FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    device::SymmetricLayout layout;
    (void)layout.add("data", 4096);
    group_ = symm::Group::create({.world = 1}, layout, driver_).value();
    words_ = coll::make_words(group_->rank(0), 20ms).value();
  }
  void TearDown() override {
    words_.reset();
    group_.reset();
    FakeCudaTest::TearDown();
  }
  [[nodiscard]] u64* word(u64 i) { return group_->rank(0).at<u64>(8 * i); }
  Result<> write(u64 i, u64 value) { return words_->write(word(i), &value, sizeof value); }

  std::unique_ptr<symm::Group> group_;
  std::unique_ptr<coll::Words> words_;
};

TEST_F(CollWords, AWriteDoesNotSendWhatALateReadBrings) {
  EXPECT_OK(write(0, 1));
  fake_->hold_work(true);
  u64 seen = 0;
  EXPECT_EQ(words_->read(&seen, word(0), sizeof seen).code(), Code::kDeadline);
  EXPECT_EQ(write(1, 7).code(), Code::kDeadline);
  fake_->hold_work(false);
  EXPECT_EQ(*word(1), 0u) << "what was refused is written by nobody";
  EXPECT_OK(write(1, 7));
  EXPECT_OK(words_->read(&seen, word(1), sizeof seen));
  EXPECT_EQ(seen, 7u);
}

TEST_F(CollWords, ALateWriteKeepsItsValue) {
  fake_->hold_work(true);
  EXPECT_EQ(write(0, 5).code(), Code::kDeadline);
  EXPECT_EQ(write(1, 9).code(), Code::kDeadline);
  EXPECT_EQ(words_->finish(Deadline::in(20ms)).code(), Code::kDeadline);
  fake_->hold_work(false);
  EXPECT_EQ(*word(0), 5u);
  EXPECT_EQ(*word(1), 0u);
  EXPECT_OK(words_->finish(Deadline::in(20s)));
}

}  // namespace
}  // namespace crossdock::testing
