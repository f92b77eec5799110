// TOML to flat text values. See the header.
// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdio>
#include <fmt/format.h>
#include <memory>

// toml++ asserts (and with clang and NDEBUG even assumes) what a malformed file can break, although
// its own error path follows right behind; found by the `config` fuzz target.
#pragma push_macro("NDEBUG")
#undef NDEBUG
#define TOML_ASSERT(expr) static_assert(true)
#define TOML_EXCEPTIONS 0
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>
#pragma pop_macro("NDEBUG")

#include "base/config_file.hpp"

namespace crossdock::base {
namespace {

using Values = std::vector<ConfigFileValue>;
constexpr std::size_t kMaxFileBytes = 1 << 20;

Result<std::string> read_text(const std::string& path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "re"), &std::fclose);
  if (!file) return errno_error(errno, fmt::format("open the settings file {}", path));
  std::string text(kMaxFileBytes + 1, '\0');
  errno = 0;
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0)
    return errno_error(errno, fmt::format("read the settings file {}", path));
  if (text.size() > kMaxFileBytes)
    return invalid_argument(fmt::format("settings file {} is larger than 1 MiB", path));
  return text;
}

Result<std::string> text_of(const toml::node& node) {
  if (const auto text = node.value_exact<std::string>()) return *text;
  if (const auto number = node.value_exact<std::int64_t>()) return fmt::format("{}", *number);
  if (const auto flag = node.value_exact<bool>()) return std::string(*flag ? "true" : "false");
  if (const auto* list = node.as_array()) {
    std::string joined;
    for (const toml::node& one : *list) {
      const auto text = one.value_exact<std::string>();
      if (!text) return invalid_argument("a list may hold strings only");
      joined += (joined.empty() ? "" : ",") + *text;
    }
    return joined;
  }
  return invalid_argument("expected a string, whole number, boolean or list of strings");
}

Result<> flatten(const toml::table& table, const std::string& prefix, const std::string& path,
                 Values& out) {
  for (const auto& [key, node] : table) {
    const std::string name = prefix + std::string(key.str());
    if (const auto* inner = node.as_table()) {
      CROSSDOCK_CHECK_OK(flatten(*inner, name + ".", path, out));
      continue;
    }
    const auto line = static_cast<unsigned>(node.source().begin.line);
    auto text = text_of(node);
    if (!text.ok())
      return invalid_argument(
          fmt::format("{}:{}: setting {}: {}", path, line, name, text.error().message));
    out.push_back({name, std::move(text).value(), line});
  }
  return {};
}

}  // namespace

Result<Values> read_config_file(const std::string& path) {
  CROSSDOCK_TRY(text, read_text(path));
  const toml::parse_result parsed = toml::parse(text, path);
  if (!parsed)
    return invalid_argument(fmt::format("{}:{}: {}", path, parsed.error().source().begin.line,
                                        parsed.error().description()));
  Values values;
  CROSSDOCK_CHECK_OK(flatten(parsed.table(), "", path, values));
  return values;
}

}  // namespace crossdock::base
