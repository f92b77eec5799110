// The cases that the probes go through, the same for the twin and the GPU: every combination of
// operand layouts, and tensor maps with their boxes. Host code.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probe.cuh"

namespace crossdock::testing::conformance {

inline constexpr ProbeConfig kWarp{.threads = 32};
inline constexpr ProbeConfig kWarpgroup{.threads = 128};

// Swizzle modes as a descriptor encodes them: none, 128, 64, 32 bytes.
inline u32 width_of(u32 mode) {
  return mode == 0 ? 16u : 256u >> mode;
}

// Strides of an operand of `lines` rows or columns; K-major, or MN-major when `transposed`.
inline u64 operand_fields(u32 mode, bool transposed, u32 lines) {
  const u32 w = width_of(mode);
  u32 leading = 16;
  u32 stride = 8 * w;
  if (mode == 0) leading = transposed ? lines / 8 * 128 : 128, stride = transposed ? 128 : 256;
  if (mode != 0 && transposed) leading = 8 * w, stride = lines * 2 / w * 8 * w;
  return u64{leading >> 4} << 16 | u64{stride >> 4} << 32 | u64{mode} << 62;
}

// Calls run(kind, a_fields, b_fields, a_offset, b_offset) for every combination.
template <class Run>
void for_each_wgmma(Run&& run) {
  for (u32 kind = 0; kind < 6; ++kind)
    for (u32 a = 0; a < 4; ++a)
      for (u32 b = 0; b < 4; ++b)
        for (u32 step = 0; step < 2; ++step) {
          // The second K step of a K-major atom of 64 bytes or more is 32 bytes on.
          const bool transposed_a = kind == 2 || kind == 4;
          const bool transposed_b = kind == 3 || kind == 4;
          const u32 a_offset = step == 0 || transposed_a || width_of(a) < 64 ? 0 : 32;
          const u32 b_offset = step == 0 || transposed_b || width_of(b) < 64 ? 0 : 32;
          run(kind, operand_fields(a, transposed_a, 64), operand_fields(b, transposed_b, 64),
              a_offset, b_offset);
        }
}

struct TensorCase {
  u32 swizzle;
  u32 box_width;  // elements of 2 bytes
  i32 x, y;
};
inline constexpr TensorCase kTensorCases[] = {
    {0, 32, 0, 0},   {0, 64, 16, 5},    {32, 16, 16, 8},  {64, 32, 0, 16},  {64, 16, 32, 4},
    {128, 64, 0, 0}, {128, 64, -8, -3}, {128, 32, 8, 15}, {128, 64, 24, 18}};
// Stores at negative coordinates end in an illegal instruction on an H200 (driver 580), so only
// loads go there.
inline u32 stores(const TensorCase& c) {
  return c.x >= 0 && c.y >= 0 ? 1 : 0;
}
inline u32 tile_bytes(const TensorCase& c) {
  return (c.swizzle != 0 ? c.swizzle : c.box_width * 2) * 8;
}
inline constexpr u32 kTensorWidth = 40;
inline constexpr u32 kTensorHeight = 20;
inline constexpr u32 kBoxHeight = 8;

}  // namespace crossdock::testing::conformance
