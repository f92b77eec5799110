// Reading of a TOML settings file into flat (name, text) pairs. The only user of toml++, which is
// slow to compile and therefore kept to one .cpp. Runs inside Config::load().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <crossdock/core/result.hpp>

namespace crossdock::base {

struct ConfigFileValue {
  std::string name;  // dotted: [transfer] slice_bytes -> transfer.slice_bytes
  std::string text;  // as a person would type it in the environment
  unsigned line = 0;
};

Result<std::vector<ConfigFileValue>> read_config_file(const std::string& path);

}  // namespace crossdock::base
