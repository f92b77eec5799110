// `crossdock doctor`: prints the findings of doctor_checks.cpp, cause and fix beside each. Ends
// with 1 when something is broken that everybody needs.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli.hpp"
#include "commands.hpp"
#include "doctor_checks.hpp"

namespace crossdock::tools {
namespace {

using Json = nlohmann::ordered_json;

struct DoctorOptions {
  bool json = false;
  std::string root = "/";
};

void print_text(const std::vector<Finding>& findings) {
  for (const Finding& finding : findings) {
    fmt::print("{:<7} {:<21} {}\n", to_string(finding.health), finding.name, finding.found);
    if (!finding.cause.empty()) fmt::print("        so:  {}\n", finding.cause);
    if (!finding.fix.empty()) fmt::print("        fix: {}\n", finding.fix);
  }
}

void print_json(const std::vector<Finding>& findings) {
  Json out = Json::array();
  for (const Finding& finding : findings)
    out.push_back({{"name", finding.name},
                   {"health", to_string(finding.health)},
                   {"found", finding.found},
                   {"cause", finding.cause},
                   {"fix", finding.fix}});
  fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
}

int diagnose(const DoctorOptions& options) {
  const auto findings = examine(options.root);
  if (options.json)
    print_json(findings);
  else
    print_text(findings);
  const bool broken = std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.health == Health::kBroken;
  });
  return broken ? kFailed : kDone;
}

}  // namespace

void add_doctor(CLI::App& app) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* sub = app.add_subcommand("doctor", "Look for what would make Crossdock slow or fail");
  sub->add_flag("--json", options->json, "Print JSON");
  sub->add_option("--root", options->root,
                  "Look at another tree instead of /, as for a bug report");
  sub->callback(run(options, diagnose));
}

}  // namespace crossdock::tools
