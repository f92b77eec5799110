// Weights in e2m1 become e4m3 (layout/fp4_weights.cuh): what a thread reads of 64 rows of a block,
// and what it makes of it. Eight values take nine instructions: a byte of the shifts is the lowest
// one of the address at which the eight e4m3 codes are that magnitudes can be; byte permutes pick
// four of them at a time, and signs are merged.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fp4_weights.cuh>
#include <crossdock/ptx/convert.cuh>
#include <crossdock/ptx/shared_place.cuh>
#include <crossdock/ptx/wgmma.cuh>

namespace crossdock::device {

inline constexpr u32 kFp4Steps = kFp4BlockRows / kFp4Group;

// Eight values of a row: the first four of K, and the four that are 16 further on. `kProducts`: two
// of the seven instructions of the integer units go to those that multiply.
template <bool kProducts = false>
CROSSDOCK_DEVICE U32x2 fp4_unpack(u32 word, U32x2 codes) {
  const u32 magnitudes = ptx::opaque(word & 0x77777777u);
  return {
      ptx::permute_bytes(codes.x, codes.y, magnitudes) | (word & 0x80808080u),
      ptx::permute_bytes(codes.x, codes.y,
                         kProducts ? ptx::upper_half_by_product(magnitudes) : magnitudes >> 16) |
          (word << 4 & 0x80808080u)};
}

struct GemmFp4Words {
  u32 words[kFp4Steps * 2];  // [step]{row, row + 8}
  u32 shifts[2];             // {row, row + 8}: a byte for each step

  // From fp4_word_offset() and fp4_shift_offset() of the thread's first row.
  CROSSDOCK_DEVICE void read(const u8* of_words, const u8* of_shifts) {
    constexpr u32 kTwoSteps = fp4_word_offset(0, 2, 0);
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 2; ++i) {
      const U32x4 v = ptx::ld_shared(reinterpret_cast<const U32x4*>(of_words + i * kTwoSteps));
      words[4 * i] = v.x;
      words[4 * i + 1] = v.y;
      words[4 * i + 2] = v.z;
      words[4 * i + 3] = v.w;
    }
    const U32x2 v = ptx::ld_shared(reinterpret_cast<const U32x2*>(of_shifts));
    shifts[0] = v.x;
    shifts[1] = v.y;
  }
  template <bool kProducts = false>
  CROSSDOCK_DEVICE U32x2 unpack(const u8* table, u32 step, u32 second) const {
    if constexpr (kProducts) {
      return fp4_unpack<true>(words[2 * step + second],
                              ptx::ld_shared_table_by_product(table, shifts[second], step));
    } else {
      return fp4_unpack(words[2 * step + second],
                        ptx::ld_shared_table(table, shifts[second], step));
    }
  }
};

}  // namespace crossdock::device
