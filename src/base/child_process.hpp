// A child process for tests: this executable again with arguments, started before it has threads,
// two pipes to talk over, and signals. The child never outlives the test.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <optional>
#include <poll.h>
#include <spawn.h>
#include <string>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <crossdock/core/deadline.hpp>

#include "base/fd.hpp"

namespace crossdock::base {

// Waits for the end of a child and reaps it: the status of waitpid(), or nothing when it still runs
// at `deadline`. Kernels before 5.3 cannot wait so; there a child that runs is not waited for.
inline std::optional<int> reap_child(pid_t pid, Deadline deadline) {
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pollfd ended{process.get(), POLLIN, 0};
  while (process && ::poll(&ended, 1, deadline.remaining_ms()) < 0 && errno == EINTR) {
  }
  int status = 0;
  pid_t reaped = 0;
  while ((reaped = ::waitpid(pid, &status, WNOHANG)) < 0 && errno == EINTR) {
  }
  return reaped == pid ? std::optional(status) : std::nullopt;
}

class ChildProcess {
 public:
  explicit ChildProcess(std::vector<std::string> arguments) {
    int down[2], up[2];
    if (::pipe2(down, O_CLOEXEC) != 0 || ::pipe2(up, O_CLOEXEC) != 0) std::abort();
    to_child_.reset(down[1]);
    from_child_.reset(up[0]);
    std::vector<char*> argv;
    static char self[] = "/proc/self/exe";
    argv.push_back(self);
    for (auto& argument : arguments)
      argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, down[0], STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, up[1], STDOUT_FILENO);
    if (::posix_spawn(&pid_, self, &actions, nullptr, argv.data(), environ) != 0) std::abort();
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(down[0]);
    ::close(up[1]);
  }
  ~ChildProcess() {
    signal(SIGKILL);
    (void)wait();
  }
  ChildProcess(const ChildProcess&) = delete;

  void signal(int number) const {
    if (pid_ > 0) ::kill(pid_, number);
  }
  // Stops the child and returns when it stands still: a stop signal alone takes effect later.
  void stop() const {
    signal(SIGSTOP);
    int status = 0;
    while (::waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
    }
  }
  // Ends its input, which a child may take as the word to end. False when it has not by `deadline`.
  bool finish(Deadline deadline) {
    to_child_.reset();
    if (pid_ > 0 && reap_child(pid_, deadline)) pid_ = -1;
    return pid_ <= 0;
  }
  // The status of waitpid(); 0 when it was taken before.
  int wait() {
    if (pid_ <= 0) return 0;
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }
  void say(const std::string& line) const {
    const std::string text = line + "\n";
    [[maybe_unused]] const auto n = ::write(to_child_.get(), text.data(), text.size());
  }
  // The child's next line of output; empty at its end or after so long a silence.
  std::string hear(std::chrono::milliseconds patience = std::chrono::seconds(10)) {
    std::string line;
    char c = 0;
    while (true) {
      pollfd ready{from_child_.get(), POLLIN, 0};
      if (::poll(&ready, 1, static_cast<int>(patience.count())) <= 0) return {};
      if (::read(from_child_.get(), &c, 1) != 1) return {};
      if (c == '\n') return line;
      line.push_back(c);
    }
  }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

 private:
  pid_t pid_ = -1;
  UniqueFd to_child_, from_child_;
};

// In the child: a line from the parent; false when the parent closed its end.
inline bool hear_parent(std::string& line) {
  line.clear();
  for (int c = std::getchar(); c != EOF; c = std::getchar()) {
    if (c == '\n') return true;
    line.push_back(static_cast<char>(c));
  }
  return false;
}

inline void say_parent(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

}  // namespace crossdock::base
