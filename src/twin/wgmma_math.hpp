// What a wgmma computes: decoding of shared-memory descriptors, operand layouts, and the product.
// Written from the ISA's tables and on purpose without a line in common with
// device/crossdock/layout, so that an error there is not repeated here. Pure functions over a CTA's
// shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "twin/async.hpp"

namespace crossdock::twin {

// Offset in shared memory (not a 32-bit shared address) and bytes of an operand's 16-byte chunks,
// smallest covering range.
struct OperandRange {
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
};

// Empty when the operation is one that sm_90a has; else what is wrong with it.
std::string check_mma(const hooks::Wgmma& op, std::uint64_t a, std::uint64_t b,
                      bool a_in_registers);
// The operands that lie in shared memory.
struct OperandRanges {
  std::array<OperandRange, 2> range;
  std::uint32_t count = 0;
};
OperandRanges operand_ranges(const MmaOp& mma);
// Runs the operation and writes all accumulators. Operand bytes outside of shared memory read as
// NaN.
void execute_mma(MmaOp& mma, const unsigned char* shared, std::size_t shared_bytes);

}  // namespace crossdock::twin
