// See worker_thread.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "base/worker_thread.hpp"

#include <csignal>
#include <fmt/format.h>
#include <pthread.h>
#include <system_error>

namespace crossdock::base {

Result<std::thread> start_worker(const std::string& name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  int failure = 0;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& e) {
    failure = e.code().value();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure != 0) {
    Error error = errno_error(failure, fmt::format("start thread '{}'", name));
    error.code = Code::kNoMemory;
    return error;
  }
  ::pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

}  // namespace crossdock::base
