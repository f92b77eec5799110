// What is compiled: a kernel template, one configuration, one architecture. Values,
// thread-compatible. The configuration is text, the same text in the source that is compiled, in
// the cache's metadata and in the log.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <crossdock/core/result.hpp>

namespace crossdock::jit {

// The designated initialisers of a kernel's configuration struct, in the order of its members:
//   ConfigText().field("threads", 256).field("checked", true).text() == "{.threads = 256, .checked
//   = true}"
class ConfigText {
 public:
  template <class T>
    requires(std::integral<T>)
  ConfigText& field(std::string_view name, T value) {
    if constexpr (std::is_same_v<T, bool>) {
      return add(name, value ? "true" : "false");
    } else if constexpr (std::is_signed_v<T>) {
      return add(name, std::to_string(static_cast<std::int64_t>(value)));
    } else {
      const auto wide = static_cast<std::uint64_t>(value);
      return add(name, std::to_string(wide) + (wide > INT64_MAX ? "ull" : ""));
    }
  }
  [[nodiscard]] std::string text() const { return "{" + fields_ + "}"; }

 private:
  ConfigText& add(std::string_view name, std::string_view value);
  std::string fields_;
};

struct KernelSpec {
  std::string name = {};         // the header crossdock/kernel/<name>.cuh
  std::string entry = {};        // the kernel: "crossdock::device::fill"
  std::string config_type = {};  // its template parameter's type; empty: not a template
  std::string config = {};       // ConfigText::text()
  int sm = 0;                    // 90 for Hopper

  [[nodiscard]] std::string header() const { return "crossdock/kernel/" + name + ".cuh"; }
  // "crossdock::device::fill<crossdock::device::FillConfig{.threads = 256}>"
  [[nodiscard]] std::string expression() const;
  // "sm_90a": code for exactly this architecture, whose features have no successor.
  [[nodiscard]] std::string arch() const;
  // For people: "fill{.threads = 256} for sm_90a"
  [[nodiscard]] std::string title() const;
  friend bool operator==(const KernelSpec&, const KernelSpec&) = default;
};

// The oldest architecture that kernels are written for.
inline constexpr int kOldestSm = 80;

// Names are names, the configuration has the shape that ConfigText makes, the architecture is one
// that kernels exist for.
Result<void> validate(const KernelSpec& spec);

}  // namespace crossdock::jit
