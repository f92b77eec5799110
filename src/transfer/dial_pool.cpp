// See dial_pool.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/dial_pool.hpp"

#include <algorithm>
#include <utility>

#include "base/worker_thread.hpp"

namespace crossdock::transfer::detail {

bool DialPool::post(const void* peer, Job job) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return false;
  // One more thread when all are at work, if the system gives one; the first is a must.
  const bool wanted = idle_ <= jobs_.size() && threads_.size() < kMaxThreads;
  if (wanted && !start_thread() && threads_.empty()) return false;
  jobs_.push_back({peer, std::move(job)});
  changed_.notify_one();
  return true;
}

bool DialPool::start_thread() {
  auto started = base::start_worker("xd-dial", [this] { serve(); });
  if (!started.ok()) return false;
  threads_.push_back(std::move(*started));
  return true;
}

std::deque<DialPool::Entry>::iterator DialPool::next() {
  return std::ranges::find_if(jobs_,
                              [this](const Entry& entry) { return !busy_.contains(entry.peer); });
}

void DialPool::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    changed_.wait(lock, [this] { return stopping_ || next() != jobs_.end(); });
    --idle_;
    if (stopping_) return;
    const auto found = next();
    Entry entry = std::move(*found);
    jobs_.erase(found);
    busy_.insert(entry.peer);
    lock.unlock();
    entry.job(true);
    entry.job = nullptr;
    lock.lock();
    busy_.erase(entry.peer);
    // What waited for this peer may go to any thread that sleeps.
    changed_.notify_all();
  }
}

void DialPool::stop() {
  std::vector<std::thread> threads;
  std::deque<Entry> left;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
    left.swap(jobs_);
  }
  changed_.notify_all();
  for (auto& entry : left)
    entry.job(false);
  for (auto& thread : threads)
    thread.join();
}

}  // namespace crossdock::transfer::detail
