// See job_thread.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "base/job_thread.hpp"

#include "base/worker_thread.hpp"

namespace crossdock::base {

bool JobThread::post(std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return false;
  if (!thread_.joinable()) {
    auto started = start_worker(name_, [this] { loop(); });
    if (!started.ok()) return false;
    thread_ = std::move(*started);
  }
  jobs_.push_back(std::move(job));
  changed_.notify_one();
  return true;
}

void JobThread::stop() {
  std::deque<std::function<void()>> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(jobs_);
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void JobThread::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

}  // namespace crossdock::base
