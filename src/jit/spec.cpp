// Texts and checks of a kernel specification. See spec.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "jit/spec.hpp"

#include <algorithm>
#include <cctype>
#include <fmt/format.h>

namespace crossdock::jit {
namespace {

bool word_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

bool is_word(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), word_char);
}

// Words joined by "::".
bool is_qualified(std::string_view text) {
  for (;;) {
    const auto end = text.find("::");
    if (!is_word(text.substr(0, end))) return false;
    if (end == std::string_view::npos) return true;
    text = text.substr(end + 2);
  }
}

bool is_config(std::string_view text) {
  const auto plain = [](char c) {
    return word_char(c) || std::string_view(" .=,{}-:").find(c) != std::string_view::npos;
  };
  return text.starts_with('{') && text.ends_with('}') &&
         std::all_of(text.begin(), text.end(), plain);
}

}  // namespace

ConfigText& ConfigText::add(std::string_view name, std::string_view value) {
  fields_ += fmt::format("{}.{} = {}", fields_.empty() ? "" : ", ", name, value);
  return *this;
}

std::string KernelSpec::expression() const {
  return config_type.empty() ? entry : fmt::format("{}<{}{}>", entry, config_type, config);
}

std::string KernelSpec::arch() const {
  return fmt::format("sm_{}{}", sm, sm >= 90 ? "a" : "");
}

std::string KernelSpec::title() const {
  return fmt::format("{}{} for {}", name, config, arch());
}

Result<void> validate(const KernelSpec& spec) {
  if (!is_word(spec.name))
    return invalid_argument(fmt::format("kernel name '{}': letters, digits and _ only", spec.name));
  if (!is_qualified(spec.entry))
    return invalid_argument(
        fmt::format("entry '{}' of kernel {}: a C++ name such as crossdock::device::{}", spec.entry,
                    spec.name, spec.name));
  if (spec.config_type.empty() != spec.config.empty())
    return invalid_argument(
        fmt::format("kernel {}: give both a configuration and its type, or neither", spec.name));
  if (!spec.config_type.empty() && (!is_qualified(spec.config_type) || !is_config(spec.config)))
    return invalid_argument(
        fmt::format("configuration {}{} of kernel {}: a type name and {{.member = value, ...}}",
                    spec.config_type, spec.config, spec.name));
  if (spec.sm < kOldestSm || spec.sm > 999)
    return make_error(
        Code::kUnsupported,
        fmt::format("kernel {} cannot be compiled for architecture {}: Crossdock's kernels need "
                    "sm_{} or newer; use a newer GPU, or the twin on the CPU",
                    spec.name, spec.sm, kOldestSm));
  return {};
}

}  // namespace crossdock::jit
