// One thread that waits for descriptors, timers and posted work: the control loop of an engine.
// It sleeps in epoll_wait without a tick, so at rest it uses no CPU. post(), stop() and
// on_loop_thread() are thread-safe; the rest is for the loop's own thread. Callbacks must not
// block. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "base/fd.hpp"

namespace crossdock::base {

class EventLoop {
 public:
  using Task = std::function<void()>;
  using FdCallback = std::function<void(std::uint32_t epoll_events)>;
  using TimerId = std::pair<Deadline, std::uint64_t>;

  // Starts the thread; `name` is its name in the system, at most 15 characters. kNoMemory when the
  // system gives no descriptor or thread.
  static Result<std::unique_ptr<EventLoop>> create(const std::string& name);
  // Stops and joins. Tasks that were not run are destroyed, not run.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs `task` on the loop soon, in order of posting. False when the loop has stopped.
  bool post(Task task);
  // Runs `task` on the loop and returns when it has run: at once when called on the loop. False
  // when the loop has stopped. The task must be short: the wait has no other bound.
  bool run(const Task& task);
  void stop();
  // Not from the loop itself.
  void stop_and_join();
  [[nodiscard]] bool on_loop_thread() const noexcept;

  // Loop thread only. `events` as for epoll (level triggered).
  Result<> watch(int fd, std::uint32_t events, FdCallback callback);
  void change(int fd, std::uint32_t events);
  void unwatch(int fd);
  TimerId call_at(Deadline when, Task task);
  void cancel(TimerId timer);

 private:
  struct Watch {
    std::uint32_t generation = 0;
    FdCallback callback;
  };
  EventLoop() = default;
  void loop();
  void wake();
  void run_posted();
  void run_due_timers();
  void dispatch(std::uint64_t tag, std::uint32_t events);
  [[nodiscard]] int wait_ms() const;

  UniqueFd epoll_;
  UniqueFd wakeup_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // guards posted_ and accepting_
  std::vector<Task> posted_;
  bool accepting_ = true;
  std::unordered_map<int, std::shared_ptr<Watch>> watches_;
  std::map<TimerId, Task> timers_;
  std::uint32_t next_generation_ = 1;
  std::uint64_t next_timer_ = 1;
};

}  // namespace crossdock::base
