// Counts the calls inside an object that other threads may take apart: whoever takes it apart
// closes the gate, after which nobody enters, and waits until those inside have left.
//
//   call:   const Gate::Pass pass(gate); if (!pass) return closed;   ... leaves with the scope
//   owner:  gate.close(); gate.wait_idle(deadline);
//
// Entering and leaving is one atomic addition each. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include <crossdock/core/deadline.hpp>

#include "base/futex.hpp"

namespace crossdock::base {

class Gate {
 public:
  // Lives on the stack of the call. False: the gate is closed, and the call must not go on.
  class Pass {
   public:
    explicit Pass(Gate& gate) noexcept
        : gate_(gate.enter() ? &gate : nullptr), outer_(std::exchange(innermost, this)) {}
    ~Pass() {
      innermost = outer_;
      if (gate_ != nullptr) gate_->leave();
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    explicit operator bool() const noexcept { return gate_ != nullptr; }

   private:
    friend class Gate;
    static inline thread_local const Pass* innermost = nullptr;
    Gate* const gate_;
    const Pass* const outer_;
  };

  void close() noexcept { state_.fetch_or(kClosed); }
  // Precondition: closed. False when the deadline passed first.
  bool wait_idle(Deadline deadline) noexcept {
    while (true) {
      const auto state = state_.load();
      if (state == kClosed) return true;
      if (deadline.passed()) return false;
      futex_wait(state_, state, deadline);
    }
  }
  // Whether the calling thread is inside: then waiting would wait for itself.
  [[nodiscard]] bool entered_here() const noexcept {
    for (const Pass* pass = Pass::innermost; pass != nullptr; pass = pass->outer_)
      if (pass->gate_ == this) return true;
    return false;
  }

 private:
  static constexpr std::uint32_t kClosed = 1u << 31;

  bool enter() noexcept {
    if ((state_.fetch_add(1) & kClosed) == 0) return true;
    leave();
    return false;
  }
  void leave() noexcept {
    if (state_.fetch_sub(1) == kClosed + 1) futex_wake_all(state_);
  }

  // How many are inside, and whether it is closed. Sequentially consistent: a call that enters
  // before close() is counted by wait_idle(), one that enters after sees the bit.
  std::atomic<std::uint32_t> state_{0};
};

}  // namespace crossdock::base
