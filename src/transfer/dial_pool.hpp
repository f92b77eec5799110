// Threads for what waits for a peer: dialling it again, and what hangs on that. Jobs of one peer
// run one after the other; a peer that does not answer holds up no other one, as long as fewer than
// kMaxThreads do so at once. Threads start when they are needed and sleep at rest. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace crossdock::transfer::detail {

class DialPool {
 public:
  static constexpr std::size_t kMaxThreads = 16;

  // Called exactly once. False: the pool has ended, do not wait for anybody.
  using Job = std::function<void(bool go_on)>;

  DialPool() = default;
  ~DialPool() { stop(); }
  DialPool(const DialPool&) = delete;
  DialPool& operator=(const DialPool&) = delete;

  // `peer` is only compared. Each job must be bounded by a deadline of its own. False when the job
  // was not taken: after stop(), or when the system gives no first thread.
  bool post(const void* peer, Job job);
  // Waits for the running jobs and runs the others with false. Idempotent.
  void stop();

 private:
  struct Entry {
    const void* peer = nullptr;
    Job job;
  };
  void serve();
  // The first job whose peer no other thread serves. Lock held.
  std::deque<Entry>::iterator next();
  bool start_thread();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> jobs_;
  std::set<const void*> busy_;
  std::vector<std::thread> threads_;
  std::size_t idle_ = 0;
  bool stopping_ = false;
};

}  // namespace crossdock::transfer::detail
