// Entry of the `crossdock` command: builds the command line and runs the chosen subcommand on the
// main thread. Holds no state of its own.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/version.hpp>

#include "base/strings.hpp"
#include "cli.hpp"
#include "commands.hpp"

namespace crossdock::tools {
namespace {

// CLI11 only says that a subcommand is required; a typo deserves a suggestion.
bool refuse_unknown_subcommand(const CLI::App& app, std::string_view first) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands({}))
    names.push_back(sub->get_name());
  if (std::find(names.begin(), names.end(), first) != names.end()) return false;
  const std::vector<std::string_view> views(names.begin(), names.end());
  const std::string hint = base::did_you_mean(first, views);
  std::fprintf(stderr, "crossdock: there is no subcommand '%.*s'%s; see crossdock --help\n",
               static_cast<int>(first.size()), first.data(), hint.c_str());
  return true;
}

int run_command_line(int argc, char** argv) {
  CLI::App app("The data plane of LLM serving: KV transfer, expert parallelism, expert layer.",
               "crossdock");
  app.set_version_flag("--version", "crossdock " + std::string(kVersion));
  app.require_subcommand(1);
  add_info(app);
  add_topo(app);
  add_doctor(app);
  add_store(app);
  add_bench(app);
  add_demo(app);
  add_trace(app);
  add_jit(app);
  if (argc > 1 && argv[1][0] != '-' && refuse_unknown_subcommand(app, argv[1])) return kWrongUsage;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    const int code = app.exit(problem);
    const bool usage = code != 0 && problem.get_name() != "RuntimeError";
    return usage ? kWrongUsage : code;
  }
  return kDone;
}

}  // namespace
}  // namespace crossdock::tools

int main(int argc, char** argv) {
  try {
    return crossdock::tools::run_command_line(argc, argv);
  } catch (const std::exception& problem) {  // out of memory; the library itself throws nothing
    std::fprintf(stderr, "crossdock: %s\n", problem.what());
    return crossdock::tools::kFailed;
  }
}
