// Workers of the tcp transport: what happens while a pool ends.
// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include "transport/tcp/worker.hpp"

namespace crossdock::transport::tcp {
namespace {

// A lane that says when it is dropped.
class Told final : public Pollable {
 public:
  explicit Told(std::atomic<bool>& gone) : gone_(gone) {}
  ~Told() override {
    gone_.store(true);
    gone_.notify_all();
  }
  Turn on_ready() noexcept override { return Turn::kIdle; }

 private:
  std::atomic<bool>& gone_;
};

class Acting final : public Pollable {
 public:
  explicit Acting(std::function<void()> act) : act_(std::move(act)) {}
  Turn on_ready() noexcept override {
    if (act_) std::exchange(act_, {})();
    return Turn::kIdle;
  }

 private:
  std::function<void()> act_;
};

struct Event {
  base::UniqueFd fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
};

// The turn of one worker ends a transfer, and with it lanes of another worker that has come to its
// end already: the first one has to be there still. AddressSanitizer sees it where it is not.
TEST(TcpWorkers, ATurnMayReachAWorkerThatHasEnded) {
  std::atomic<bool> first_ended{false}, turn_begun{false}, reached{false};
  Event first_event, second_event;
  WorkerPool pool(2);
  Worker* const first = pool.next().value();
  Worker* const second = pool.next().value();
  ASSERT_NE(first, second);
  const auto token = first->add(std::make_shared<Told>(first_ended), first_event.fd.get()).value();
  const auto act = [&] {
    turn_begun.store(true);
    turn_begun.notify_all();
    first_ended.wait(false);
    first->kick(token);
    first->remove(token);
    reached.store(true);
  };
  const auto lane = second->add(std::make_shared<Acting>(act), second_event.fd.get()).value();
  second->kick(lane);
  turn_begun.wait(false);
  pool.stop();
  EXPECT_TRUE(reached.load());
}

}  // namespace
}  // namespace crossdock::transport::tcp
