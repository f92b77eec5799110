// RunningCommand: a program that runs beside the test, with pipes to its input and from its output;
// killed, if it still runs, and reaped at the end of its scope. One thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <crossdock/core/deadline.hpp>

#include "base/fd.hpp"
#include "support/run_command.hpp"

namespace crossdock::support {

class RunningCommand {
 public:
  // `environment` replaces the caller's; detail::pass_on() says what is kept of that.
  explicit RunningCommand(std::vector<std::string> command,
                          std::vector<std::string> environment = {})
      : errors_(std::tmpfile()) {
    int down[2], up[2];
    if (errors_ == nullptr || ::pipe2(down, O_CLOEXEC) != 0 || ::pipe2(up, O_CLOEXEC) != 0)
      std::abort();
    const base::UniqueFd child_in(down[0]), child_out(up[1]);
    input_.reset(down[1]);
    output_.reset(up[0]);
    detail::pass_on(environment);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, child_in.get(), STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, child_out.get(), STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, ::fileno(errors_), STDERR_FILENO);
    if (::posix_spawn(&pid_, command.front().c_str(), &actions, nullptr,
                      detail::pointers(command).data(), detail::pointers(environment).data()) != 0)
      pid_ = -1;
    ::posix_spawn_file_actions_destroy(&actions);
  }
  ~RunningCommand() {
    if (pid_ > 0) (void)reap(Deadline::now());
    std::fclose(errors_);
  }
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  void signal(int number) const {
    if (pid_ > 0) ::kill(pid_, number);
  }
  void end_input() { input_.reset(); }

  // The next line of its output, without the end of line; what there is when it ends or `deadline`
  // passes before.
  std::string line(Deadline deadline) {
    while (text_.find('\n') == std::string::npos && read_more(deadline)) {
    }
    const auto end = text_.find('\n');
    std::string first = text_.substr(0, end);
    text_.erase(0, end == std::string::npos ? end : end + 1);
    return first;
  }
  // Its end, with the output that no line() has taken. What has not ended by `deadline` is killed,
  // and has the exit code of that: 128 + SIGKILL.
  CommandResult wait(Deadline deadline) {
    while (read_more(deadline)) {
    }
    CommandResult result;
    if (pid_ > 0) result.exit_code = reap(deadline);
    result.output = std::move(text_);
    result.errors = detail::text_of(errors_);
    return result;
  }

 private:
  // False at the end of the output, and when nothing came by `deadline`.
  bool read_more(Deadline deadline) {
    pollfd ready{output_.get(), POLLIN, 0};
    if (::poll(&ready, 1, deadline.remaining_ms()) <= 0) return false;
    char buffer[4096];
    const auto n = ::read(output_.get(), buffer, sizeof buffer);
    if (n > 0) text_.append(buffer, static_cast<std::size_t>(n));
    return n > 0;
  }
  int reap(Deadline deadline) {
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) == 0) {
      if (deadline.passed()) ::kill(pid_, SIGKILL);
      ::sched_yield();
    }
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  pid_t pid_ = -1;  // -1: not started, or reaped
  base::UniqueFd input_, output_;
  FILE* errors_;
  std::string text_;  // read, and not yet given
};

}  // namespace crossdock::support
