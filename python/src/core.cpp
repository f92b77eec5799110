// Versions, and the settings as `crossdock info --config` shows them.
// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <string>
#include <tuple>
#include <vector>

#include <crossdock/core/version.hpp>

#include "base/config.hpp"
#include "bind.hpp"
#include "errors.hpp"

namespace crossdock::python {
namespace {

using SettingRow = std::tuple<std::string, std::string, std::string, std::string>;

std::vector<SettingRow> settings() {
  const base::Config config = value_or_raise(base::Config::load());
  std::vector<SettingRow> rows;
  for (const base::Setting& setting : base::settings())
    rows.emplace_back(setting.name, config.text(setting.name),
                      config.origin(setting.name).describe(), setting.help);
  return rows;
}

}  // namespace

void add_core(nb::module_& m) {
  m.attr("version") = std::string(kVersion).c_str();
  m.attr("wire_version") = static_cast<int>(kWireVersion);
  m.def("settings", &settings, "Name, value, source and meaning of every setting.");
}

}  // namespace crossdock::python
