// `crossdock info`: what this build is and, with --config, every setting with its value and where
// the value comes from. Reads the settings as an engine would; changes nothing.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include <crossdock/core/version.hpp>

#include "base/config.hpp"
#include "cli.hpp"
#include "commands.hpp"

namespace crossdock::tools {
namespace {

using base::Config;
using base::Setting;
using Json = nlohmann::ordered_json;

struct InfoOptions {
  bool config = false;
  bool json = false;
};

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::string_view build_type() {
  constexpr std::string_view kType = CROSSDOCK_BUILD_TYPE;
  return kType.empty() ? "none" : kType;
}

std::string_view sanitizers() {
  constexpr std::string_view kNames = CROSSDOCK_SANITIZERS;
  return kNames.empty() ? "none" : kNames;
}

Json setting_json(const Setting& setting, const Config& config) {
  Json out = {{"name", setting.name},
              {"value", config.text(setting.name)},
              {"source", config.origin(setting.name).describe()},
              {"default", setting.default_text},
              {"type", base::to_string(setting.type)},
              {"allowed", setting.allowed},
              {"environment", base::environment_name(setting)},
              {"help", setting.help}};
  if (!setting.alias.empty()) out["alias"] = setting.alias;
  return out;
}

void print_setting(const Setting& setting, const Config& config) {
  const std::string value = config.text(setting.name);
  fmt::print("{} = {}\n", setting.name, value.empty() ? "(empty)" : value);
  fmt::print("    {}\n", setting.help);
  fmt::print("    from {}; default {}; {}{}{}\n", config.origin(setting.name).describe(),
             setting.default_text.empty() ? "(empty)" : setting.default_text,
             base::to_string(setting.type), setting.allowed.empty() ? "" : " ", setting.allowed);
  fmt::print("    {}{}{}\n", base::environment_name(setting), setting.alias.empty() ? "" : ", ",
             setting.alias);
}

void print_build() {
  fmt::print("crossdock {}\nwire protocol {}\nbuilt by {}\nbuild type {}\nsanitizers {}\n",
             kVersion, kWireVersion, compiler(), build_type(), sanitizers());
}

Json build_json() {
  return {{"version", kVersion},
          {"wire_version", kWireVersion},
          {"compiler", compiler()},
          {"build_type", build_type()},
          {"sanitizers", sanitizers()}};
}

int info(const InfoOptions& options) {
  const auto config = Config::load();
  if (!config.ok()) return report(config.error());
  for (const auto& warning : config->warnings())
    fmt::print(stderr, "crossdock: {}\n", warning);
  if (options.json) {
    Json out = build_json();
    if (options.config)
      for (const Setting& setting : base::settings())
        out["settings"].push_back(setting_json(setting, *config));
    fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
  } else if (options.config) {
    for (const Setting& setting : base::settings())
      print_setting(setting, *config);
  } else {
    print_build();
  }
  return kDone;
}

}  // namespace

void add_info(CLI::App& app) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* sub = app.add_subcommand("info", "Show the version, the build and the settings");
  sub->add_flag("--config", options->config, "Show every setting, its value and its source");
  sub->add_flag("--json", options->json, "Print JSON");
  sub->callback(run(options, info));
}

}  // namespace crossdock::tools
