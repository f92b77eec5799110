// Keys of compiled kernels: XXH3-128 over everything that decides the machine code, and nothing
// else (no path, no time, no machine). Values, thread-compatible.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "jit/bundle.hpp"
#include "jit/spec.hpp"

namespace crossdock::jit {

struct Key {
  std::array<std::uint8_t, 16> bytes{};
  [[nodiscard]] std::string hex() const;
  friend bool operator==(const Key&, const Key&) = default;
};

Key hash_bytes(std::span<const std::byte> bytes);

// Of the sources reached, the kernel, its configuration and the architecture.
Key source_key(const KernelSpec& spec, std::span<const SourceFile> files);
// Of that and the compiler: `compiler` tells kind, version and flags.
Key binary_key(const Key& source, std::string_view compiler);

}  // namespace crossdock::jit
