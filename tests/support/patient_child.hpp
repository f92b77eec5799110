// What a child process of a test says next, with patience for its start.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <sys/wait.h>

#include "base/child_process.hpp"

namespace crossdock::testing {

// "silent" when it died or said nothing in two minutes. Each turn waits ten seconds; starting CUDA
// and compiling kernels may take longer than one.
inline std::string hear_patiently(base::ChildProcess& child) {
  for (int turn = 0; turn < 12; ++turn) {
    std::string answer = child.hear();
    if (!answer.empty()) return answer;
    siginfo_t info{};
    const bool asked =
        ::waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOHANG | WNOWAIT) == 0;
    if (!asked || info.si_pid != 0) break;
  }
  return "silent";
}

}  // namespace crossdock::testing
