// Child processes with a deadline. See process.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "jit/process.hpp"

#include <cerrno>
#include <chrono>
#include <fcntl.h>
#include <fmt/format.h>
#include <optional>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "base/fd.hpp"
#include "base/socket.hpp"

extern char** environ;  // NOLINT: POSIX

namespace crossdock::jit {
namespace {

constexpr std::size_t kMaxOutput = std::size_t{1} << 20;

// The spawn attributes and file actions, destroyed at the end.
struct SpawnSettings {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  SpawnSettings() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  // Output to `out`, no input, a group of its own, no blocked or ignored signals.
  void prepare(int out) {
    ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, out, 1);
    ::posix_spawn_file_actions_adddup2(&actions, out, 2);
    sigset_t none;
    sigset_t defaults;
    ::sigemptyset(&none);
    ::sigfillset(&defaults);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setsigdefault(&attributes, &defaults);
    ::posix_spawnattr_setpgroup(&attributes, 0);
    ::posix_spawnattr_setflags(
        &attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
};

Result<pid_t> spawn(const std::vector<std::string>& arguments, int out) {
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (const auto& argument : arguments)
    argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  SpawnSettings settings;
  settings.prepare(out);
  pid_t pid = -1;
  const int problem =
      ::posix_spawnp(&pid, argv[0], &settings.actions, &settings.attributes, argv.data(), environ);
  if (problem != 0) return errno_error(problem, fmt::format("start {}", arguments[0]));
  return pid;
}

// True at the end of the output, false at the deadline.
Result<bool> read_output(int fd, std::string& output, Deadline deadline) {
  char buffer[8192];
  for (;;) {
    CROSSDOCK_TRY(ready, base::wait_ready(fd, POLLIN, deadline));
    if (!ready) return false;
    const ssize_t got = ::read(fd, buffer, sizeof buffer);
    if (got == 0) return true;
    if (got < 0 && errno != EINTR && errno != EAGAIN)
      return errno_error(errno, "read the output of a child process");
    // What is beyond the limit is read and dropped, so that the child does not block.
    if (got > 0 && output.size() < kMaxOutput) output.append(buffer, static_cast<std::size_t>(got));
  }
}

// The exit code; nothing while it runs. A host that ignores SIGCHLD takes the code away from us.
std::optional<int> reap(pid_t pid) {
  int status = 0;
  const pid_t done = ::waitpid(pid, &status, WNOHANG);
  if (done == 0 || (done < 0 && errno == EINTR)) return std::nullopt;
  if (done < 0) return 0;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Kills the whole group and waits for the child itself, which SIGKILL ends at once.
void kill_group(pid_t pid) {
  ::kill(-pid, SIGKILL);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace

Result<ProcessOutcome> run_process(const std::vector<std::string>& arguments, Deadline deadline) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return errno_error(errno, "create a pipe");
  const base::UniqueFd read_end(ends[0]);
  base::UniqueFd write_end(ends[1]);
  CROSSDOCK_TRY(pid, spawn(arguments, write_end.get()));
  write_end.reset();
  ProcessOutcome outcome;
  auto finished = read_output(read_end.get(), outcome.output, deadline);
  while (finished.ok() && *finished) {
    if (const auto code = reap(pid)) {
      outcome.exit_code = *code;
      return outcome;
    }
    if (deadline.passed()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kill_group(pid);
  if (!finished.ok()) return std::move(finished).error();
  return make_error(Code::kDeadline,
                    fmt::format("{} did not finish in time and was killed", arguments[0]));
}

}  // namespace crossdock::jit
