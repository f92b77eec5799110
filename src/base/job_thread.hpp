// A thread for short blocking jobs (dialling a peer again, hashing memory), so that the control
// loop never waits. Started by the first job; asleep at rest. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace crossdock::base {

class JobThread {
 public:
  explicit JobThread(std::string name) : name_(std::move(name)) {}
  ~JobThread() { stop(); }
  // Jobs run one after the other; each must be bounded by a deadline of its own. False when it will
  // never run: after stop(), or when the system gives no thread.
  bool post(std::function<void()> job);
  // Waits for the running job, drops the rest.
  void stop();

 private:
  void loop();

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace crossdock::base
