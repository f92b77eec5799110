// ForkCheck: whether this process is a child that was forked since the check was made. Threads are
// the parent's then, and locks may be held for ever by them: what has any of the two is left as it
// is instead of being taken apart. A question is one load, no system call. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace crossdock::base {

class ForkCheck {
 public:
  ForkCheck() noexcept;
  [[nodiscard]] bool forked() const noexcept {
    return process_ != nullptr && process_->load(std::memory_order_relaxed) != made_in_;
  }

 private:
  // The number of this process; the kernel makes it zero in a child. Null on kernels before 4.14,
  // which cannot do that.
  static std::atomic<std::uint64_t>* process() noexcept;

  const std::atomic<std::uint64_t>* process_;
  std::uint64_t made_in_ = 0;
};

// For objects that answer forked(): there their destructors would wait for the parent's threads and
// speak on its connections.
struct DeleteUnlessForked {
  template <class T>
  void operator()(T* object) const noexcept {
    if (!object->forked()) delete object;
  }
};

}  // namespace crossdock::base
