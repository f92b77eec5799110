// Runs a child process to its end or to a deadline, and collects what it printed. Blocking; any
// thread. The child gets a process group of its own, so that nothing of it is left behind, and none
// of this process's signals.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock::jit {

struct ProcessOutcome {
  int exit_code = 0;   // 128 + signal when a signal ended it
  std::string output;  // stdout and stderr together, at most 1 MiB
};

// `arguments[0]` is the program, with a path or looked up in PATH. kNotFound when there is none;
// kDeadline after it was killed.
Result<ProcessOutcome> run_process(const std::vector<std::string>& arguments, Deadline deadline);

}  // namespace crossdock::jit
