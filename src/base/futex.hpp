// Timed wait on a 32-bit atomic, the one thing std::atomic::wait lacks. Process-private,
// thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <crossdock/core/deadline.hpp>

namespace crossdock::base {

// Sleeps while `word` holds `value`, until woken or until `deadline`; may return early. Callers
// loop.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                       Deadline deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.remaining()).count();
  timespec timeout{};
  timeout.tv_sec = left / 1'000'000'000;
  timeout.tv_nsec = left % 1'000'000'000;
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &timeout, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace crossdock::base
