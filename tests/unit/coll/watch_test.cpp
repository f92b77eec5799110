// The watch alone, over one rank of the CPU whose peer never says a word: waits that are ended
// before their time, and what is asked of the watch while a read of a word takes long.
// SPDX-License-Identifier: Apache-2.0
#include "coll/watch.hpp"

#include <atomic>
#include <chrono>
#include <future>
#include <gmock/gmock.h>

#include "support/coll_cases.hpp"

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

class CollWatch : public ::testing::Test {
 protected:
  void start(std::chrono::nanoseconds wait, SlowWords::Gate* gate = nullptr) {
    window_ = coll::make_window(coll_options(), 2).value();
    group_ =
        symm::Group::create({.world = 2, .backend = symm::Backend::kCpu}, window_.layout).value();
    marks_ = rank().allocate_host(coll::num_sites(2) * sizeof(coll::Mark)).value();
    lane_ = coll::CpuLane::create(0).value();
    auto words = coll::make_words(rank()).value();
    if (gate != nullptr) words = std::make_unique<SlowWords>(std::move(words), *gate);
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
  start(1ms, &gate);
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
  start(1ms, &gate);
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

}  // namespace
}  // namespace crossdock::testing
