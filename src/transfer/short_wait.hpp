// Looking at a word for some microseconds before sleeping on it: a wake-up can take as long as a
// small transfer (docs/design/tcp.md). A thread that looks keeps a CPU from the threads that do the
// work, so of an engine at most half as many look as there are CPUs. Thread-safe.
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
      // Pairs with the store of done_ in TransferCore::finish().
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
