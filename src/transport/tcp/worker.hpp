// Worker: one thread with an epoll set that runs the lanes given to it, and WorkerPool, which
// starts the workers with the first connection. A lane stays with one worker for life. At rest a
// worker sleeps in epoll_wait(); it polls for a short while only when a lane asked for it.
//
// add(), remove(), kick() may be called by any thread. Lanes are held by shared pointers here, so a
// lane that is removed while its turn runs lives to the end of that turn.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <crossdock/core/result.hpp>

#include "base/fd.hpp"

namespace crossdock::transport::tcp {

enum class Turn : std::uint8_t { kIdle, kMore };

// Something with a descriptor that a worker runs.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // The descriptor became ready, or kick() was called. Does a bounded amount of work; kMore asks
  // for another turn at once (readiness is reported by edges).
  virtual Turn on_ready() noexcept = 0;
};

class Worker {
 public:
  static Result<std::unique_ptr<Worker>> start(unsigned index);
  ~Worker();
  // Joins the thread and drops its lanes. The other calls stay possible and do nothing more, but
  // for add(), which must not be made.
  void stop();

  using Token = std::uint64_t;  // slot and generation; never 0
  Result<Token> add(std::shared_ptr<Pollable> lane, int fd);
  // No turn starts after this, except one that has been picked already. Unknown tokens are ignored.
  void remove(Token token);
  // Gives the lane a turn soon.
  void kick(Token token);
  // Polls until `ns` from now instead of sleeping. Only from within on_ready().
  void spin_for(std::chrono::nanoseconds ns) noexcept;

 private:
  struct Slot {
    std::shared_ptr<Pollable> lane;
    std::uint32_t generation = 1;
    bool kicked = false;
  };
  Worker() = default;
  void run();
  int prepare_sleep();
  void pick(int events);
  Slot* find(Token token) noexcept;  // mutex_ held

  static constexpr int kMaxEvents = 64;
  base::UniqueFd epoll_;
  base::UniqueFd wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<Token> kicked_;
  bool sleeping_ = false;

  // Of the thread.
  std::vector<std::shared_ptr<Pollable>> turn_;
  std::vector<std::shared_ptr<Pollable>> again_;
  std::uint64_t spin_until_ns_ = 0;
  struct Events;
  std::unique_ptr<Events> events_;
};

class WorkerPool {
 public:
  explicit WorkerPool(unsigned threads) : threads_(threads) {}
  // The next worker in turn; starts it when it does not run yet.
  Result<Worker*> next();
  void stop();  // joins all

 private:
  std::mutex mutex_;
  unsigned threads_;
  unsigned next_ = 0;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace crossdock::transport::tcp
