// Weights in e2m1 as grouped_gemm takes them, and how they become e4m3. Plain data and constexpr
// functions, shared by host, kernels and twin.
//
// 32 values of a row along K share a power of two. In the kernel they become e4m3 together with
// that power: a group's shift, -8 to 6, is its exponent minus that of the scale which 128 x 128
// values share. e2m1 times 2^shift is exactly e4m3 for all of these; so a product needs no more
// than e4m3's one scale for 128 values, and has the bits of a product whose weights were e4m3.
//
// A block is 128 rows x 128 values of K in the order in which a warpgroup's threads need them as
// wgmma's A operand, so that each reads 16 bytes at a time:
//
//   [warp 4][piece 2][steps 2][lane 32] 16 bytes: {row, row + 8} of a step, {those} of the next
//   [warp 4][piece 2][lane / 4: 8][row, row + 8] 4 bytes: 8 * (shift + 8) of the four steps
//
// where row = piece * 64 + warp * 16 + lane / 4, and a step is 32 values of K, of which a lane has
// 4 * (lane % 4) .. + 3 and those 16 further on: 8 values in a word, see fp4_word().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/minifloat.cuh>

namespace crossdock::device {

inline constexpr u32 kFp4Group = 32;       // values of K that share an exponent
inline constexpr u32 kFp4BlockRows = 128;  // and values of K
inline constexpr u32 kFp4CodeBytes = kFp4BlockRows * kFp4BlockRows / 2;
inline constexpr u32 kFp4BlockBytes = kFp4CodeBytes + kFp4BlockRows * 4;
inline constexpr i32 kFp4SmallestShift = -8;
inline constexpr i32 kFp4LargestShift = 6;
inline constexpr u32 kFp4Shifts = kFp4LargestShift - kFp4SmallestShift + 1;
// Of the table of codes by shift, and what its address is a multiple of: a byte of the shifts is
// then the lowest one of an address.
inline constexpr u32 kFp4TableBytes = 256;

// In a block: the lane's word of a row and step.
CROSSDOCK_HOST_DEVICE constexpr u32 fp4_word_offset(u32 row, u32 step, u32 quad) {
  const u32 piece = row / 64, warp = row % 64 / 16, second = row / 8 % 2;
  const u32 lane = row % 8 * 4 + quad;
  return (((warp * 2 + piece) * 2 + step / 2) * 32 + lane) * 16 + step % 2 * 8 + second * 4;
}
CROSSDOCK_HOST_DEVICE constexpr u32 fp4_shift_offset(u32 row, u32 step) {
  const u32 piece = row / 64, warp = row % 64 / 16, second = row / 8 % 2;
  return kFp4CodeBytes + (((warp * 2 + piece) * 8 + row % 8) * 2 + second) * 4 + step;
}
CROSSDOCK_HOST_DEVICE constexpr u32 fp4_shift_code(i32 shift) {
  return static_cast<u32>(shift - kFp4SmallestShift) * 8;
}
// Value i of the 8 in a lane's word belongs to k = 4 * quad + i % 4 + i / 4 * 16 of the step.
// Magnitudes are in the lower three bits of the nibbles, in order; the signs of the first four are
// where e4m3 has them in a word, those of the others four bits below.
CROSSDOCK_HOST_DEVICE constexpr u32 fp4_in_word(u32 i, u32 code) {
  const u32 sign = code >> 3 << (i % 4 * 8 + (i < 4 ? 7 : 3));
  return (code & 7u) << (i * 4) | sign;
}
CROSSDOCK_HOST_DEVICE constexpr u32 fp4_from_word(u32 i, u32 word) {
  const u32 sign = word >> (i % 4 * 8 + (i < 4 ? 7 : 3)) & 1u;
  return (word >> (i * 4) & 7u) | sign << 3;
}

// e2m1 times 2^shift as e4m3; exact for shifts from -8 to 6.
CROSSDOCK_HOST_DEVICE constexpr u32 e4m3_from_fp4(u32 code, i32 shift) {
  const u32 bits = minifloat::decode(minifloat::kE2m1, code & 0xfu);
  const u32 scaled = (code & 7u) == 0 ? bits : bits + (static_cast<u32>(shift) << 23);
  return minifloat::encode(minifloat::kE4m3, scaled);
}
// The e4m3 codes of the eight magnitudes at one shift, the smallest in the lowest byte.
CROSSDOCK_HOST_DEVICE constexpr u64 fp4_codes(i32 shift) {
  u64 codes = 0;
  for (u32 magnitude = 0; magnitude < 8; ++magnitude)
    codes |= u64{e4m3_from_fp4(magnitude, shift)} << (8 * magnitude);
  return codes;
}

}  // namespace crossdock::device
