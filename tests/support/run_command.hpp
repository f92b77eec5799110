// run_command(): starts a program with arguments and environment of its own, waits for its end and
// gives back exit code and output. No shell is between, so that arguments need no quoting.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace crossdock::support {

struct CommandResult {
  int exit_code = -1;  // -1: could not be started; 128 + n: ended by signal n
  std::string output;  // stdout
  std::string errors;  // stderr
};

namespace detail {
inline std::string text_of(FILE* file) {
  std::string text;
  char buffer[4096];
  std::rewind(file);
  for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;)
    text.append(buffer, n);
  return text;
}
inline std::string read_back(FILE* file) {
  std::string text = text_of(file);
  std::fclose(file);
  return text;
}
// As exec() wants them: of texts that live on, and null at the end.
inline std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (auto& text : texts)
    out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}
// What a program needs of the caller's environment, and what sanitizers are told, unless
// `environment` has its own.
inline void pass_on(std::vector<std::string>& environment) {
  for (const std::string name : {"PATH", "ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"}) {
    const char* value = std::getenv(name.c_str());
    const bool given = std::ranges::any_of(
        environment, [&](const auto& variable) { return variable.starts_with(name + "="); });
    if (value != nullptr && !given) environment.push_back(name + "=" + value);
  }
}
}  // namespace detail

// `environment` replaces the caller's; pass_on() says what is kept of that.
inline CommandResult run_command(std::vector<std::string> command,
                                 std::vector<std::string> environment = {}) {
  detail::pass_on(environment);
  FILE* output = std::tmpfile();
  FILE* errors = std::tmpfile();
  if (output == nullptr || errors == nullptr) std::abort();
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, ::fileno(output), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, ::fileno(errors), STDERR_FILENO);
  pid_t pid = 0;
  const int status =
      ::posix_spawn(&pid, command.front().c_str(), &actions, nullptr,
                    detail::pointers(command).data(), detail::pointers(environment).data());
  ::posix_spawn_file_actions_destroy(&actions);
  CommandResult result;
  int ended = 0;
  if (status == 0 && ::waitpid(pid, &ended, 0) == pid)
    result.exit_code = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
  result.output = detail::read_back(output);
  result.errors = detail::read_back(errors);
  return result;
}

}  // namespace crossdock::support
