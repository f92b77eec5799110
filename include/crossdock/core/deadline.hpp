// Deadline: the moment by which a wait ends. Every blocking call of Crossdock takes one; there is
// no "for ever". Immutable value, thread-safe. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

namespace crossdock {
inline namespace v1 {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `duration` from now. Negative durations are already past. Nothing lies further away than ten
  // years, whatever is asked for, so that no arithmetic overflows.
  template <class Rep, class Period>
  static Deadline in(std::chrono::duration<Rep, Period> duration) {
    return Deadline(Clock::now() + cut(duration));
  }
  static Deadline at(Clock::time_point when) {
    const auto now = Clock::now();
    return Deadline(std::clamp(when, now - kFurthest, now + kFurthest));
  }
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
  // That much later, or earlier.
  template <class Rep, class Period>
  [[nodiscard]] Deadline after(std::chrono::duration<Rep, Period> duration) const {
    return at(when_ + cut(duration));
  }
  friend auto operator<=>(const Deadline&, const Deadline&) = default;

 private:
  static constexpr Clock::duration kFurthest = std::chrono::hours{24 * 3650};
  template <class Rep, class Period>
  static Clock::duration cut(std::chrono::duration<Rep, Period> duration) {
    using Seconds = std::chrono::duration<double>;
    const auto seconds = std::chrono::duration_cast<Seconds>(duration);
    if (seconds > Seconds(kFurthest)) return kFurthest;
    if (seconds < -Seconds(kFurthest)) return -kFurthest;
    return std::chrono::duration_cast<Clock::duration>(duration);
  }
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

[[nodiscard]] inline Deadline earlier(Deadline a, Deadline b) {
  return a < b ? a : b;
}

}  // namespace v1
}  // namespace crossdock
