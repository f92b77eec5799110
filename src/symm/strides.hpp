// Strides that a caller may leave out. Values. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crossdock::symm {

// From one row to the next, in any unit: as given, or `dense` where 0 was given.
constexpr std::uint64_t or_dense(std::uint64_t given, std::uint64_t dense) {
  return given == 0 ? dense : given;
}

}  // namespace crossdock::symm
