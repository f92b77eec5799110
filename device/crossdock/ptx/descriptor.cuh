// Shared-memory matrix descriptors, through which wgmma finds its operands, and the swizzle that
// tensor-map copies and descriptors share. Pure functions; also used on the host by tests.
//
// A descriptor holds, in units of 16 bytes: start address (bits 0-13), leading byte offset (16-29),
// stride byte offset (32-45); then the base offset (49-51, zero for atoms aligned to their size)
// and the swizzle (62-63). An atom is 8 rows of the swizzle width; it starts at a multiple of its
// size. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/memory.cuh>

namespace crossdock::device::ptx {

// The value is the encoding in the descriptor.
enum class Swizzle : u32 { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

CROSSDOCK_HOST_DEVICE constexpr u32 swizzle_bytes(Swizzle s) {
  return s == Swizzle::k128 ? 128 : s == Swizzle::k64 ? 64 : s == Swizzle::k32 ? 32 : 16;
}

// Where the byte at `offset` of an unswizzled tile lies: the 16-byte column is XORed with the row,
// 128-byte line by line. Offsets are relative to a 1024-byte boundary.
CROSSDOCK_HOST_DEVICE constexpr u32 swizzled(Swizzle s, u32 offset) {
  return s == Swizzle::kNone ? offset
                             : offset ^ (((offset >> 7) & (swizzle_bytes(s) / 16 - 1)) << 4);
}

struct MatrixLayout {
  Swizzle swizzle;
  u32 leading_bytes;  // ignored by swizzled K-major operands
  u32 stride_bytes;   // between groups of 8 rows (K-major)
};

// K-major operand whose rows are exactly one swizzle width of bytes long, rows packed.
CROSSDOCK_HOST_DEVICE constexpr MatrixLayout k_major(Swizzle s) {
  return {s, 16, 8 * swizzle_bytes(s)};
}

CROSSDOCK_HOST_DEVICE constexpr u64 matrix_descriptor(u32 address, MatrixLayout layout) {
  return static_cast<u64>((address & 0x3ffffu) >> 4) |
         static_cast<u64>((layout.leading_bytes & 0x3ffffu) >> 4) << 16 |
         static_cast<u64>((layout.stride_bytes & 0x3ffffu) >> 4) << 32 |
         static_cast<u64>(layout.swizzle) << 62;
}
CROSSDOCK_DEVICE u64 matrix_descriptor(const void* shared, MatrixLayout layout) {
  return matrix_descriptor(shared_address(shared), layout);
}
// The operand `bytes` further on: the next K step inside a swizzle atom (+32), or the next rows.
CROSSDOCK_HOST_DEVICE constexpr u64 advanced(u64 descriptor, u32 bytes) {
  return descriptor + (bytes >> 4);
}

}  // namespace crossdock::device::ptx
