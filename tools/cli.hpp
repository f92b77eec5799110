// What subcommands share: CLI11 (slow to compile, so only files that add a subcommand include
// this), options for sizes and durations, and the way to end with an exit code.
//
// Exit codes: 0 done; 1 failed; 2 wrong command line, settings or arguments.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <string>

#include <crossdock/core/result.hpp>

namespace crossdock::tools {

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kWrongUsage = 2;

// Prints "crossdock: <what>" to stderr and gives the exit code that fits the error.
int report(const Error& error);

// Wraps the body of a subcommand: `sub->callback(run(opts, body))` with `int body(const Options&)`.
// `options` is kept alive by the callback.
template <class Options, class Body>
std::function<void()> run(std::shared_ptr<Options> options, Body body) {
  return [options, body] {
    const int code = body(*options);
    if (code != kDone) throw CLI::RuntimeError(code);  // CLI11 ends quietly with that code
  };
}

// `--block 64KiB`, `--timeout 250ms`: the target holds the default, which the help shows.
CLI::Option* add_size(CLI::App& app, const std::string& flags, std::uint64_t& target,
                      const std::string& help);
CLI::Option* add_duration(CLI::App& app, const std::string& flags, std::chrono::nanoseconds& target,
                          const std::string& help);

}  // namespace crossdock::tools
