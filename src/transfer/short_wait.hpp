// Looking at a word for some microseconds before sleeping on it. A wake-up costs 5 to 25 us on a
// virtual machine, as much as a small transfer takes; but a thread that looks keeps a CPU from the
// threads that do the work, so never more of them look than there are CPUs to spare. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include <crossdock/core/deadline.hpp>

namespace crossdock::transfer {

class ShortWait {
 public:
  explicit ShortWait(unsigned cpus = std::thread::hardware_concurrency())
      : places_(static_cast<int>(cpus) / 2) {}

  // Until `word` is not 0, `longest` or `until` has passed. False, at once: all places are taken.
  bool look(const std::atomic<std::uint32_t>& word, std::chrono::nanoseconds longest,
            Deadline until) noexcept {
    if (longest.count() == 0) return false;
    const bool placed = places_.fetch_sub(1, std::memory_order_relaxed) > 0;
    if (placed) {
      const Deadline end = earlier(until, Deadline::in(longest));
      while (word.load(std::memory_order_acquire) == 0 && !end.passed())
        relax();
    }
    places_.fetch_add(1, std::memory_order_relaxed);
    return placed;
  }

 private:
  static void relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  std::atomic<int> places_;
};

}  // namespace crossdock::transfer
