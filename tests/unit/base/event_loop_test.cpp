// SPDX-License-Identifier: Apache-2.0
#include "base/event_loop.hpp"

#include <future>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.hpp"

namespace crossdock::base {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<EventLoop> make_loop() {
  return std::move(EventLoop::create("test-loop")).value();
}

TEST(EventLoop, RunsPostedTasksInOrderOnItsThread) {
  const auto loop = make_loop();
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i)
    ASSERT_TRUE(loop->post([&, i] { order.push_back(i); }));
  bool on_thread = false;
  ASSERT_TRUE(loop->run([&] { on_thread = loop->on_loop_thread(); }));
  EXPECT_TRUE(on_thread);
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i)
    EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(EventLoop, TimersFireInTimeOrderAndCanBeCancelled) {
  const auto loop = make_loop();
  std::vector<int> order;
  std::promise<void> done;
  loop->run([&] {
    loop->call_at(Deadline::in(20ms), [&] { order.push_back(2), done.set_value(); });
    loop->call_at(Deadline::in(1ms), [&] { order.push_back(1); });
    const auto dead = loop->call_at(Deadline::in(5ms), [&] { order.push_back(9); });
    loop->cancel(dead);
  });
  ASSERT_EQ(done.get_future().wait_for(10s), std::future_status::ready);
  loop->run([] {});
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(EventLoop, AnEventOfAClosedDescriptorIsNotGivenToItsSuccessor) {
  const auto loop = make_loop();
  int a[2], b[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, a), 0);
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, b), 0);
  // Both readable before the loop looks; the first callback closes the second descriptor and a new
  // watch takes its number.
  ASSERT_EQ(::write(a[1], "x", 1), 1);
  ASSERT_EQ(::write(b[1], "x", 1), 1);
  int first_calls = 0, stale_calls = 0;
  int fresh[2] = {-1, -1};
  loop->run([&] {
    auto close_other = [&](int self, int other) {
      return [&, self, other](std::uint32_t) {
        if (++first_calls > 1) return;
        loop->unwatch(self);
        loop->unwatch(other);
        ::close(other);
        ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fresh), 0);
        ASSERT_EQ(fresh[0], other) << "the lowest free number is reused";
        ASSERT_TRUE(loop->watch(fresh[0], EPOLLIN, [&](std::uint32_t) { ++stale_calls; }).ok());
      };
    };
    ASSERT_TRUE(loop->watch(a[0], EPOLLIN, close_other(a[0], b[0])).ok());
    ASSERT_TRUE(loop->watch(b[0], EPOLLIN, close_other(b[0], a[0])).ok());
  });
  loop->run([] {});
  loop->run([] {});
  EXPECT_EQ(first_calls, 1);
  EXPECT_EQ(stale_calls, 0);
  for (int fd : {a[1], b[1], fresh[0], fresh[1]})
    ::close(fd);
}

TEST(EventLoop, StopDropsWorkAndRefusesMore) {
  const auto loop = make_loop();
  loop->stop();
  EXPECT_FALSE(loop->post([] {}));
  EXPECT_FALSE(loop->run([] { FAIL(); }));
}

TEST(EventLoop, RunReturnsWhenTheLoopStopsUnderIt) {
  auto loop = make_loop();
  std::promise<void> entered, leave;
  loop->post([&] {
    entered.set_value();
    leave.get_future().wait();
  });
  entered.get_future().wait();
  std::thread runner([&] { EXPECT_FALSE(loop->run([] {})); });
  // The runner's task is queued behind the blocked one; stopping drops it.
  loop->stop();
  leave.set_value();
  runner.join();
}

TEST(EventLoop, UsesNoCpuAtRest) {
  const auto loop = make_loop();
  std::uint64_t before = 0, after = 0;
  loop->run([&] { before = thread_cpu_ns(); });
  std::promise<void> done;
  loop->run([&] { loop->call_at(Deadline::in(200ms), [&] { done.set_value(); }); });
  done.get_future().wait();
  loop->run([&] { after = thread_cpu_ns(); });
  EXPECT_LT(after - before, 5'000'000u) << "nanoseconds of CPU in 200 ms of rest";
}

}  // namespace
}  // namespace crossdock::base
