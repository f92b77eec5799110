// ForkCheck: whether this process is a child that was forked since the check was made. Threads are
// the parent's then, and locks may be held for ever by them: what has any of the two is left as it
// is instead of being taken apart. One system call a question. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

namespace crossdock::base {

class ForkCheck {
 public:
  [[nodiscard]] bool forked() const noexcept { return ::getpid() != made_in_; }

 private:
  const pid_t made_in_ = ::getpid();
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
