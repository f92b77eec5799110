// Loading and reading of Config. load() runs on the caller's thread, once for each engine; the
// getters do a binary search over the table.
// SPDX-License-Identifier: Apache-2.0
#include "base/config.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <unistd.h>

#include "base/check.hpp"
#include "base/config_file.hpp"
#include "base/strings.hpp"

namespace crossdock::base {
namespace {

constexpr std::string_view kPrefix = "CROSSDOCK_";
// Not a setting: it says where settings are.
constexpr std::string_view kFileVariable = "CROSSDOCK_CONFIG";

const Setting* find_setting(std::string_view name) {
  const auto table = settings();
  const auto it = std::lower_bound(table.begin(), table.end(), name,
                                   [](const Setting& s, std::string_view n) { return s.name < n; });
  return it == table.end() || it->name != name ? nullptr : &*it;
}

std::vector<std::string_view> setting_names() {
  std::vector<std::string_view> names;
  for (const Setting& setting : settings())
    names.push_back(setting.name);
  return names;
}

template <class T>
Result<T> parse_as(std::string_view text) {
  if constexpr (std::is_same_v<T, std::int64_t>) return parse_int(text);
  if constexpr (std::is_same_v<T, std::uint64_t>) return parse_size(text);
  if constexpr (std::is_same_v<T, std::chrono::nanoseconds>) return parse_duration(text);
}

// Parses `text` and holds it against "low..high".
template <class T>
Result<T> parse_in_range(std::string_view text, std::string_view allowed) {
  CROSSDOCK_TRY(value, parse_as<T>(text));
  if (allowed.empty()) return value;
  const auto dots = allowed.find("..");
  const T low = parse_as<T>(allowed.substr(0, dots)).value();
  const T high = parse_as<T>(allowed.substr(dots + 2)).value();
  if (value < low || value > high)
    return invalid_argument(fmt::format("{} is outside {} to {}", text, allowed.substr(0, dots),
                                        allowed.substr(dots + 2)));
  return value;
}

Result<std::string> parse_choice(std::string_view text, std::string_view allowed) {
  const auto choices = split(allowed, '|');
  if (std::find(choices.begin(), choices.end(), text) != choices.end()) return std::string(text);
  return invalid_argument(fmt::format("'{}' is none of {}{}", text, fmt::join(choices, ", "),
                                      did_you_mean(text, choices)));
}

}  // namespace

// Collects values in order of rank, lowest first, so that a later set() wins.
class ConfigBuilder {
 public:
  ConfigBuilder() : state_(std::make_shared<Config::State>()) {
    for (const Setting& setting : settings()) {
      auto value = parse(setting, setting.default_text);
      CROSSDOCK_CHECK(value.ok(), setting.name);
      state_->entries.push_back({std::move(value).value(), {}});
    }
  }

  Result<> set(const Setting& setting, std::string_view text, ConfigOrigin origin) {
    auto value = parse(setting, text);
    if (!value.ok())
      return invalid_argument(fmt::format("setting {} (from {}): {}", setting.name,
                                          origin.describe(), value.error().message));
    const auto index = static_cast<std::size_t>(&setting - settings().data());
    state_->entries[index] = {std::move(value).value(), std::move(origin)};
    return {};
  }

  Result<> set_by_name(std::string_view name, std::string_view text, ConfigOrigin origin) {
    const Setting* setting = find_setting(name);
    if (setting != nullptr) return set(*setting, text, std::move(origin));
    return invalid_argument(
        fmt::format("there is no setting '{}' (from {}){}; `crossdock info --config` lists them",
                    name, origin.describe(), did_you_mean(name, setting_names())));
  }

  Result<> read_file(const std::string& path) {
    CROSSDOCK_TRY(values, read_config_file(path));
    for (const ConfigFileValue& value : values)
      CROSSDOCK_CHECK_OK(set_by_name(
          value.name, value.text, {ConfigSource::kFile, fmt::format("{}:{}", path, value.line)}));
    return {};
  }

  Result<> read_environment(const char* const* environment) {
    for (; *environment != nullptr; ++environment) {
      const std::string_view all = *environment;
      const auto equals = all.find('=');
      if (!all.starts_with(kPrefix) || equals == std::string_view::npos) continue;
      const auto name = all.substr(0, equals);
      if (name != kFileVariable) CROSSDOCK_CHECK_OK(set_from(name, all.substr(equals + 1)));
    }
    return {};
  }

  Config finish() { return Config(std::move(state_)); }

 private:
  static Result<Config::Value> parse(const Setting& setting, std::string_view text) {
    const auto wrap = [](auto result) -> Result<Config::Value> {
      if (!result.ok()) return std::move(result).error();
      return Config::Value(std::move(result).value());
    };
    switch (setting.type) {
      case SettingType::kInt:
        return wrap(parse_in_range<std::int64_t>(text, setting.allowed));
      case SettingType::kSize:
        return wrap(parse_in_range<std::uint64_t>(text, setting.allowed));
      case SettingType::kDuration:
        return wrap(parse_in_range<std::chrono::nanoseconds>(text, setting.allowed));
      case SettingType::kBool:
        return wrap(parse_bool(text));
      case SettingType::kEnum:
        return wrap(parse_choice(text, setting.allowed));
      case SettingType::kString:
        return Config::Value(std::string(text));
    }
    return invalid_argument("unknown type");
  }

  Result<> set_from(std::string_view variable, std::string_view text) {
    std::vector<std::string> names;
    for (const Setting& setting : settings()) {
      names.push_back(environment_name(setting));
      if (variable == names.back() || (!setting.alias.empty() && variable == setting.alias))
        return set(setting, text, {ConfigSource::kEnvironment, std::string(variable)});
    }
    const std::vector<std::string_view> views(names.begin(), names.end());
    state_->warnings.push_back(fmt::format("environment variable {} is no setting and is ignored{}",
                                           variable, did_you_mean(variable, views)));
    return {};
  }

  std::shared_ptr<Config::State> state_;
};

std::string_view to_string(SettingType type) noexcept {
  switch (type) {
    case SettingType::kInt:
      return "int";
    case SettingType::kSize:
      return "size";
    case SettingType::kDuration:
      return "duration";
    case SettingType::kBool:
      return "bool";
    case SettingType::kString:
      return "string";
    case SettingType::kEnum:
      return "enum";
  }
  return "unknown";
}

std::string environment_name(const Setting& setting) {
  std::string name(kPrefix);
  for (const char c : setting.name)
    name += c == '.' ? '_' : static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return name;
}

std::string ConfigOrigin::describe() const {
  switch (source) {
    case ConfigSource::kDefault:
      return "default";
    case ConfigSource::kFile:
      return "file " + detail;
    case ConfigSource::kEnvironment:
      return "environment " + detail;
    case ConfigSource::kCode:
      return "code";
  }
  return "unknown";
}

Result<Config> Config::load(const ConfigOverrides& overrides, const ConfigInputs& inputs) {
  const char* const* environment = inputs.environment != nullptr ? inputs.environment : environ;
  static constexpr const char* kNothing[] = {nullptr};
  if (environment == nullptr) environment = kNothing;
  std::string file = inputs.file;
  for (auto it = environment; file.empty() && *it != nullptr; ++it) {
    const std::string_view all = *it;
    if (all.starts_with(kFileVariable) && all.substr(kFileVariable.size()).starts_with('='))
      file = all.substr(kFileVariable.size() + 1);
  }
  ConfigBuilder builder;
  if (!file.empty()) CROSSDOCK_CHECK_OK(builder.read_file(file));
  CROSSDOCK_CHECK_OK(builder.read_environment(environment));
  for (const auto& [name, text] : overrides)
    CROSSDOCK_CHECK_OK(builder.set_by_name(name, text, {ConfigSource::kCode, {}}));
  return builder.finish();
}

Config Config::defaults() {
  return ConfigBuilder().finish();
}

const Config::Entry& Config::entry(std::string_view name) const {
  const Setting* setting = find_setting(name);
  CROSSDOCK_CHECK(setting != nullptr, name);
  return state_->entries[static_cast<std::size_t>(setting - settings().data())];
}

template <class T>
const T& Config::get(std::string_view name) const {
  const T* value = std::get_if<T>(&entry(name).value);
  CROSSDOCK_CHECK(value != nullptr, name);
  return *value;
}

std::int64_t Config::integer(std::string_view name) const {
  return get<std::int64_t>(name);
}
std::uint64_t Config::size(std::string_view name) const {
  return get<std::uint64_t>(name);
}
std::chrono::nanoseconds Config::duration(std::string_view name) const {
  return get<std::chrono::nanoseconds>(name);
}
bool Config::boolean(std::string_view name) const {
  return get<bool>(name);
}
const std::string& Config::string(std::string_view name) const {
  return get<std::string>(name);
}

std::vector<std::string> Config::list(std::string_view name) const {
  std::vector<std::string> parts;
  for (const auto part : split(string(name), ','))
    if (!part.empty()) parts.emplace_back(part);
  return parts;
}

const ConfigOrigin& Config::origin(std::string_view name) const {
  return entry(name).origin;
}

std::string Config::text(std::string_view name) const {
  const Setting* setting = find_setting(name);
  CROSSDOCK_CHECK(setting != nullptr, name);
  switch (setting->type) {
    case SettingType::kInt:
      return std::to_string(integer(name));
    case SettingType::kSize:
      return format_size(size(name));
    case SettingType::kDuration:
      return format_duration(duration(name));
    case SettingType::kBool:
      return boolean(name) ? "true" : "false";
    case SettingType::kString:
    case SettingType::kEnum:
      break;
  }
  const std::string& value = string(name);
  return setting->secret && !value.empty() ? "(set)" : value;
}

const std::vector<std::string>& Config::warnings() const {
  return state_->warnings;
}

}  // namespace crossdock::base
