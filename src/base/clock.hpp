// Clocks in integer nanoseconds: steady time and CPU time used. Stateless and thread-safe; no call
// blocks. Deadlines of waits are crossdock::Deadline, not these.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <sys/types.h>
#include <time.h>

namespace crossdock::base {

namespace detail {
inline std::uint64_t read_clock_ns(clockid_t id) noexcept {
  timespec t{};
  ::clock_gettime(id, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(t.tv_nsec);
}
}  // namespace detail

// CLOCK_MONOTONIC, the clock under std::chrono::steady_clock: comparable between the processes of
// one host, which is what makes traces of two processes line up.
inline std::uint64_t now_ns() noexcept {
  return detail::read_clock_ns(CLOCK_MONOTONIC);
}

// Time since 1970. Only for showing to people.
inline std::uint64_t wall_ns() noexcept {
  return detail::read_clock_ns(CLOCK_REALTIME);
}

// CPU time used by the calling thread, and by all threads of this process.
inline std::uint64_t thread_cpu_ns() noexcept {
  return detail::read_clock_ns(CLOCK_THREAD_CPUTIME_ID);
}
inline std::uint64_t process_cpu_ns() noexcept {
  return detail::read_clock_ns(CLOCK_PROCESS_CPUTIME_ID);
}

// CPU time of another process; 0 when it is gone or not ours to ask.
inline std::uint64_t process_cpu_ns(pid_t pid) noexcept {
  clockid_t id{};
  return ::clock_getcpuclockid(pid, &id) == 0 ? detail::read_clock_ns(id) : 0;
}

}  // namespace crossdock::base
