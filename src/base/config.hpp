// Config: the settings of one engine as one value. The table of all settings is config_table.cpp;
// adding one is a row there. Values come from defaults < file (TOML) < environment < code, and each
// remembers where it came from. Immutable after load(), cheap to copy, thread-safe to read. Nothing
// here is global, and the environment is read only inside load().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <crossdock/core/result.hpp>

namespace crossdock::base {

enum class SettingType : std::uint8_t { kInt, kSize, kDuration, kBool, kString, kEnum };
std::string_view to_string(SettingType type) noexcept;

// One row of the table. All fields are text, so that the table reads like the manual.
struct Setting {
  std::string_view name;  // "transfer.slice_bytes"
  SettingType type = SettingType::kString;
  std::string_view default_text;  // "64KiB"
  std::string_view allowed;       // "4KiB..64MiB" for numbers, "auto|map|vm" for enums
  std::string_view help;          // one sentence
  std::string_view alias = {};    // a second environment name, as CROSSDOCK_TRACE
  bool secret = false;            // printed as "(set)"
};

// Every setting, sorted by name.
std::span<const Setting> settings() noexcept;
// "transfer.slice_bytes" -> "CROSSDOCK_TRANSFER_SLICE_BYTES"
std::string environment_name(const Setting& setting);

enum class ConfigSource : std::uint8_t { kDefault, kFile, kEnvironment, kCode };

struct ConfigOrigin {
  ConfigSource source = ConfigSource::kDefault;
  std::string detail;                          // "/etc/crossdock.toml:3" or the environment name
  [[nodiscard]] std::string describe() const;  // "default", "file /etc/crossdock.toml:3", ...
};

// Settings made in code: name and text, as in {{"transfer.slice_bytes", "128KiB"}}.
using ConfigOverrides = std::vector<std::pair<std::string, std::string>>;

struct ConfigInputs {
  // "NAME=value" strings ended by a null pointer; null means the environment of this process.
  const char* const* environment = nullptr;
  // A TOML file; empty means the one that CROSSDOCK_CONFIG names, if any.
  std::string file = {};
};

class Config {
 public:
  // Unknown names in code or file, and wrong values anywhere, are kInvalidArgument naming rule,
  // value and fix. Unknown CROSSDOCK_* variables only give a warning: others may own them.
  static Result<Config> load(const ConfigOverrides& overrides = {},
                             const ConfigInputs& inputs = {});
  // All defaults; reads neither file nor environment.
  static Config defaults();

  // The value of a setting. A name that is not in the table, or of another type, is a library bug.
  [[nodiscard]] std::int64_t integer(std::string_view name) const;
  [[nodiscard]] std::uint64_t size(std::string_view name) const;
  [[nodiscard]] std::chrono::nanoseconds duration(std::string_view name) const;
  [[nodiscard]] bool boolean(std::string_view name) const;
  [[nodiscard]] const std::string& string(std::string_view name) const;  // also of enums
  // A string setting cut at commas, trimmed; empty parts are dropped.
  [[nodiscard]] std::vector<std::string> list(std::string_view name) const;

  [[nodiscard]] const ConfigOrigin& origin(std::string_view name) const;
  // For people: "64KiB", "30s", "true"; a secret that is set reads "(set)".
  [[nodiscard]] std::string text(std::string_view name) const;
  // Sentences the owner should log: unknown CROSSDOCK_* variables.
  [[nodiscard]] const std::vector<std::string>& warnings() const;

 private:
  friend class ConfigBuilder;
  using Value =
      std::variant<std::int64_t, std::uint64_t, std::chrono::nanoseconds, bool, std::string>;
  struct Entry {
    Value value;
    ConfigOrigin origin;
  };
  struct State {
    std::vector<Entry> entries;  // parallel to settings()
    std::vector<std::string> warnings;
  };
  explicit Config(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  [[nodiscard]] const Entry& entry(std::string_view name) const;
  template <class T>
  [[nodiscard]] const T& get(std::string_view name) const;

  std::shared_ptr<const State> state_;
};

}  // namespace crossdock::base
