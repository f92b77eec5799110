// Shared parts of the subcommands. See the header.
// SPDX-License-Identifier: Apache-2.0
#include "cli.hpp"

#include <cstdio>

#include "base/strings.hpp"

namespace crossdock::tools {
namespace {

// Parses with `parse` and hands its sentence to CLI11 when the text is wrong.
template <class T, class Parse>
CLI::Option* add_parsed(CLI::App& app, const std::string& flags, T& target, const std::string& help,
                        Parse parse) {
  return app.add_option_function<std::string>(
      flags,
      [&target, parse](const std::string& text) {
        auto value = parse(text);
        if (!value.ok()) throw CLI::ValidationError(value.error().message);
        target = *value;
      },
      help);
}

}  // namespace

int report(const Error& error) {
  std::fprintf(
      stderr, "crossdock: %s\n",
      error.code == Code::kInvalidArgument ? error.message.c_str() : error.describe().c_str());
  return error.code == Code::kInvalidArgument ? kWrongUsage : kFailed;
}

CLI::Option* add_size(CLI::App& app, const std::string& flags, std::uint64_t& target,
                      const std::string& help) {
  return add_parsed(app, flags, target, help, &base::parse_size)
      ->type_name("SIZE")
      ->default_str(base::format_size(target));
}

CLI::Option* add_duration(CLI::App& app, const std::string& flags, std::chrono::nanoseconds& target,
                          const std::string& help) {
  return add_parsed(app, flags, target, help, &base::parse_duration)
      ->type_name("DURATION")
      ->default_str(base::format_duration(target));
}

}  // namespace crossdock::tools
