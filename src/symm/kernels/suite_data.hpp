// The data of the suite: every word is a function of where it is from, so that both ends know it.
// No state. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/probe.cuh>

#include "symm/kernels/suite.hpp"

namespace crossdock::symm {

// Where nothing may be written.
inline constexpr u8 kUntouched = 0xee;
inline constexpr u32 kUntouchedWord = 0xeeeeeeeeu;

inline u32 suite_word(u32 seed, u32 rank, u32 row, u32 i) {
  return device::mix(seed * 0x9e3779b9u + rank * 0x10001u + row * 257 + 1) + i;
}
// Rows that push_rows and pull_rows move on a rank, each to a slot of its own.
inline u32 suite_rows(const SuiteShape& shape) {
  return shape.move_blocks * shape.move.warps * shape.rows_per_warp;
}

}  // namespace crossdock::symm
