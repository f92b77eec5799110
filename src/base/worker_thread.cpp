// See worker_thread.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "base/worker_thread.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <system_error>

namespace crossdock::base {

SignalsBlocked::SignalsBlocked() noexcept {
  sigset_t blocked;
  ::sigfillset(&blocked);
  // Not SIGABRT: abort() unblocks it, and one that another process sends is for the host.
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS})
    ::sigdelset(&blocked, fault);
  ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
}

SignalsBlocked::~SignalsBlocked() {
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

Result<std::thread> start_worker(const std::string& name, std::function<void()> body) {
  const SignalsBlocked blocked;
  std::thread thread;
  int failure = 0;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& e) {
    failure = e.code().value();
  }
  if (failure != 0) {
    Error error = errno_error(failure, fmt::format("start thread '{}'", name));
    error.code = Code::kNoMemory;
    return error;
  }
  ::pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

}  // namespace crossdock::base
