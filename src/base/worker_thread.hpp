// Starts a thread: named, with the signals blocked that are for the host process, and without
// throwing. The caller joins or detaches it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <functional>
#include <string>
#include <thread>

#include <crossdock/core/result.hpp>

namespace crossdock::base {

// While it lives, the calling thread takes no signal but those of its own faults, and so do threads
// that it starts for all their life. A fault of a blocked signal would end the process without the
// host's handler: crash reporters and Python's faulthandler would be silent.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept;
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

// `name` is cut to 15 characters. kNoMemory when the system gives no more threads.
Result<std::thread> start_worker(const std::string& name, std::function<void()> body);

}  // namespace crossdock::base
