// Deadline: the moment by which a wait ends. Every blocking call of Crossdock takes one; there is
// no "for ever". Immutable value, thread-safe. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

namespace crossdock {
inline namespace v1 {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `duration` from now. Negative durations are already past; durations beyond ten years are cut to
  // that, so that no arithmetic overflows.
  template <class Rep, class Period>
  static Deadline in(std::chrono::duration<Rep, Period> duration) {
    using Seconds = std::chrono::duration<double>;
    constexpr std::chrono::hours kLongest{24 * 3650};
    if (std::chrono::duration_cast<Seconds>(duration) >
        std::chrono::duration_cast<Seconds>(kLongest))
      return Deadline(Clock::now() + kLongest);
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(duration));
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }
  static Deadline now() { return Deadline(Clock::now()); }

  [[nodiscard]] Clock::time_point when() const noexcept { return when_; }
  [[nodiscard]] bool passed() const { return Clock::now() >= when_; }
  // Never negative.
  [[nodiscard]] Clock::duration remaining() const {
    const auto left = when_ - Clock::now();
    return left > Clock::duration::zero() ? left : Clock::duration::zero();
  }
  // For poll() and epoll_wait(): rounded up, at most `cap_ms`.
  [[nodiscard]] int remaining_ms(int cap_ms = 1 << 30) const {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
    return ms < cap_ms ? static_cast<int>(ms) : cap_ms;
  }
  friend auto operator<=>(const Deadline&, const Deadline&) = default;

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

[[nodiscard]] inline Deadline earlier(Deadline a, Deadline b) {
  return a < b ? a : b;
}

}  // namespace v1
}  // namespace crossdock
