// One tile of 128 x 128 weights as a block of prepare_weights makes it ready: bit by bit what the
// CPU makes (src/moe/weight_tile.cpp), both with the functions of layout/weights.cuh.
//
//   two threads have a row of the tile, 64 values each, which lie in shared memory:
//   read, find flaws -> [block: any?] -> scale of the tile -> [block: largest] -> write
//
// Nothing of a tile with a flaw is written; the host reads the first flaw of all.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/layout/weights.cuh>
#include <crossdock/ptx/atomic.cuh>

namespace crossdock::device {

inline constexpr u32 kPrepareThreads = 2 * kWeightTile;
// Values of the tile, exponents of groups of 32, and a word for each warp. Each thread's own are a
// block apart, so that the threads of a warp use different banks.
inline constexpr u32 kPrepareValues = kWeightTile * kWeightTile * 4;
inline constexpr u32 kPrepareExponents = kWeightTile * kWeightTile / kFp4Group * 4;
inline constexpr u32 kPrepareShared =
    kPrepareValues + kPrepareExponents + kPrepareThreads / kWarpSize * 4;

class WeightTileBlock {
 public:
  static constexpr u32 kValues = kWeightTile / 2;  // of a thread
  static constexpr u32 kGroups = kValues / kFp4Group;

  CROSSDOCK_DEVICE WeightTileBlock(const PrepareWeightsParams& p, u32 tile)
      : p_(p), m_(p.matrix), row_(thread_index() / 2), first_(thread_index() % 2 * kValues) {
    group_ = tile % m_.groups();
    block_ = tile / m_.groups() % m_.blocks();
    expert_ = tile / m_.groups() / m_.blocks();
  }
  CROSSDOCK_DEVICE void run() {
    read();
    find_scale();
    if (m_.format == WeightFormat::kBf16) find_large();
    if (ThreadGroup::block().any(flaw_ != ~u64{0})) return tell();
    if (m_.format == WeightFormat::kBf16) {
      write_bf16();
    } else if (m_.format == WeightFormat::kE2m1 || m_.number == WeightNumber::kE2m1) {
      write_fp4();
    } else {
      write_e4m3();
    }
  }

 private:
  // Of the thread's value i in the plain matrix.
  CROSSDOCK_DEVICE u64 index(u32 i) const {
    const u64 row = u64{expert_} * m_.rows + block_ * kWeightTile + row_;
    return row * m_.columns + group_ * kWeightTile + first_ + i;
  }
  CROSSDOCK_DEVICE void found(u32 i, WeightFlaw flaw) {
    const u64 at = weight_flaw(index(i), flaw);
    flaw_ = at < flaw_ ? at : flaw_;
  }
  CROSSDOCK_DEVICE void tell() const {
    u64 seen = ~u64{0};
    while (flaw_ < seen) {
      const u64 was = ptx::cas_relaxed_gpu(p_.flaw, seen, flaw_);
      if (was == seen) return;
      seen = was;
    }
  }
  // The thread's values without their scale, and the exponents of its groups.
  CROSSDOCK_DEVICE static float& number(u32 i) {
    return reinterpret_cast<float*>(dynamic_shared())[i * kPrepareThreads + thread_index()];
  }
  CROSSDOCK_DEVICE static u32& exponent(u32 g) {
    return reinterpret_cast<u32*>(dynamic_shared() +
                                  kPrepareValues)[g * kPrepareThreads + thread_index()];
  }
  // 16 bytes at a time.
  template <WeightNumber kNumber, u32 kBits>
  CROSSDOCK_DEVICE void read_codes() const {
    constexpr u32 kPerWord = 32 / kBits;
    constexpr u32 kMask = kBits == 32 ? ~0u : (1u << kBits % 32) - 1;
    const u8* from = m_.from + index(0) * kBits / 8;
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < kValues / (4 * kPerWord); ++i) {
      const U32x4 v = ptx::ld_weak(reinterpret_cast<const U32x4*>(from) + i);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
      CROSSDOCK_UNROLL
      for (u32 w = 0; w < 4; ++w) {
        CROSSDOCK_NO_UNROLL
        for (u32 j = 0; j < kPerWord; ++j)
          number((i * 4 + w) * kPerWord + j) =
              weight_number(kNumber, words[w] >> (j * kBits) & kMask);
      }
    }
  }
  CROSSDOCK_DEVICE void read() {
    switch (m_.number) {
      case WeightNumber::kF32:
        read_codes<WeightNumber::kF32, 32>();
        break;
      case WeightNumber::kBf16:
        read_codes<WeightNumber::kBf16, 16>();
        break;
      case WeightNumber::kE4m3:
        read_codes<WeightNumber::kE4m3, 8>();
        break;
      default:
        read_codes<WeightNumber::kE2m1, 4>();
        CROSSDOCK_NO_UNROLL
        for (u32 g = 0; g < kGroups; ++g) {
          exponent(g) = ld_byte(m_.from_scales + index(g * kFp4Group) / kFp4Group);
          if (exponent(g) == 255) found(g * kFp4Group, WeightFlaw::kBadScale);
        }
    }
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < kValues; ++i)
      if (!is_finite(number(i))) found(i, WeightFlaw::kNotFinite);
  }
  CROSSDOCK_DEVICE static u32 ld_byte(const u8* at) {
    u32 byte = 0;
    ptx::ld_nc_if(byte, at, true);
    return byte;
  }
  // The largest of all threads' numbers; not negative.
  CROSSDOCK_DEVICE static u32 largest(u32 mine) {
    u32* words = reinterpret_cast<u32*>(dynamic_shared() + kPrepareValues + kPrepareExponents);
    const ThreadGroup block = ThreadGroup::block();
    CROSSDOCK_NO_UNROLL
    for (u32 distance = 1; distance < kWarpSize; distance *= 2)
      mine = max_of(mine, ptx::shuffle_xor(kFullMask, mine, distance));
    block.sync();  // what was there before has been read
    if (lane_index() == 0) words[warp_index()] = mine;
    block.sync();
    CROSSDOCK_NO_UNROLL
    for (u32 w = 0; w < kPrepareThreads / kWarpSize; ++w)
      mine = max_of(mine, words[w]);
    return mine;
  }
  CROSSDOCK_DEVICE void find_scale() {
    if (m_.number == WeightNumber::kE4m3) {
      scale_ = ptx::ld_weak(reinterpret_cast<const float*>(m_.from_scales) +
                            m_.scale_from(expert_, block_, group_));
      if (thread_index() != 0) return;
      if (!is_finite(scale_) || scale_ < 0) {
        found(0, WeightFlaw::kBadScale);
      } else if (m_.ue8m0 && m_.format == WeightFormat::kE4m3 && !is_power(scale_)) {
        found(0, WeightFlaw::kNotAPower);
      }
      return;
    }
    u32 peak = 0;
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < kValues; ++i)
      peak = max_of(peak, bit_cast<u32>(weight_magnitude(number(i))));
    scale_ = e4m3_weight_scale(bit_cast<float>(largest(peak)), m_.ue8m0);
  }
  // With its scale.
  CROSSDOCK_DEVICE float value(u32 i) const {
    if (m_.number == WeightNumber::kE4m3) return number(i) * scale_;
    if (m_.number == WeightNumber::kE2m1) return number(i) * ue8m0_number(exponent(i / kFp4Group));
    return number(i);
  }
  CROSSDOCK_DEVICE u32 bf16(u32 i) const { return minifloat::encode_bf16(bit_cast<u32>(value(i))); }
  CROSSDOCK_DEVICE void find_large() {
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < kValues; ++i)
      if ((bf16(i) & 0x7f80u) == 0x7f80u) found(i, WeightFlaw::kTooLarge);
  }
  CROSSDOCK_DEVICE U32x4* row_to(u32 width) const {
    const u64 to = u64{expert_} * m_.rows + m_.row_to(block_, row_);
    return reinterpret_cast<U32x4*>(m_.to +
                                    (to * m_.columns + group_ * kWeightTile + first_) * width);
  }
  CROSSDOCK_DEVICE void write_scale(float scale) const {
    if (thread_index() != 0) return;
    const u64 at = m_.scale_to(expert_, block_, group_);
    if (m_.ue8m0) {
      ptx::st_weak(m_.to_scales + at,
                   static_cast<u8>(minifloat::encode_ue8m0(bit_cast<u32>(scale))));
    } else {
      ptx::st_weak(reinterpret_cast<float*>(m_.to_scales) + at, scale);
    }
  }
  CROSSDOCK_DEVICE void write_bf16() const {
    U32x4* to = row_to(2);
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < kValues / 8; ++i) {
      u32 words[4];
      CROSSDOCK_NO_UNROLL
      for (u32 j = 0; j < 4; ++j)
        words[j] = bf16(8 * i + 2 * j) | bf16(8 * i + 2 * j + 1) << 16;
      ptx::st_weak(to + i, U32x4{words[0], words[1], words[2], words[3]});
    }
  }
  // `code(i)`: of the thread's value i.
  template <class Code>
  CROSSDOCK_DEVICE void write_bytes(const Code& code) const {
    U32x4* to = row_to(1);
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < kValues / 16; ++i) {
      u32 words[4] = {0, 0, 0, 0};
      CROSSDOCK_NO_UNROLL
      for (u32 j = 0; j < 16; ++j)
        words[j / 4] |= code(16 * i + j) << (j % 4 * 8);
      ptx::st_weak(to + i, U32x4{words[0], words[1], words[2], words[3]});
    }
  }
  CROSSDOCK_DEVICE void write_e4m3() const {
    // Codes that are kept become themselves again.
    const float inverse = m_.number == WeightNumber::kE4m3 ? 1.0f : 1.0f / scale_;
    write_bytes([&](u32 i) { return e4m3_weight(number(i), inverse); });
    write_scale(scale_);
  }

  // ---- through e2m1 ----

  CROSSDOCK_DEVICE u32 code_of(u32 i) const {
    if (m_.number == WeightNumber::kE2m1)
      return minifloat::encode(minifloat::kE2m1, bit_cast<u32>(number(i)));
    return fp4_code(value(i), exponent(i / kFp4Group));
  }
  // Exponents of the groups; the largest of those that are not all 0, plus 1, or 0.
  CROSSDOCK_DEVICE u32 find_exponents() {
    u32 most = 0;
    CROSSDOCK_NO_UNROLL
    for (u32 g = 0; g < kGroups; ++g) {
      float peak = 0;
      CROSSDOCK_NO_UNROLL
      for (u32 i = g * kFp4Group; i < (g + 1) * kFp4Group; ++i) {
        const float magnitude = weight_magnitude(value(i));
        peak = magnitude > peak ? magnitude : peak;
      }
      if (m_.number != WeightNumber::kE2m1) exponent(g) = fp4_exponent(peak);
      u32 any = 0;
      CROSSDOCK_NO_UNROLL
      for (u32 i = g * kFp4Group; i < (g + 1) * kFp4Group; ++i)
        any |= code_of(i) & 7u;
      if (any != 0) most = max_of(most, exponent(g) + 1);
    }
    return most;
  }
  CROSSDOCK_DEVICE void write_fp4() {
    const u32 base = fp4_base(static_cast<i32>(largest(find_exponents())) - 1);
    u32 inexact = 0;
    CROSSDOCK_NO_UNROLL
    for (u32 g = 0; g < kGroups; ++g) {
      bool exact = true;
      CROSSDOCK_NO_UNROLL
      for (u32 i = g * kFp4Group; i < (g + 1) * kFp4Group; ++i)
        exact = fp4_fold(code_of(i), fp4_shift(exponent(g), base)).exact && exact;
      inexact += exact ? 0 : 1;
    }
    if (inexact != 0) ptx::red_add_relaxed_gpu(p_.inexact, u64{inexact});
    const auto folded = [&](u32 i) {
      return fp4_fold(code_of(i), fp4_shift(exponent(i / kFp4Group), base)).code;
    };
    if (m_.format == WeightFormat::kE4m3) {
      write_bytes([&](u32 i) { return e4m3_from_fp4(folded(i), kept_shift(i / kFp4Group, base)); });
    } else {
      CROSSDOCK_NO_UNROLL
      for (u32 g = 0; g < kGroups; ++g)
        write_packed(g, base, folded);
    }
    write_scale(ue8m0_number(base));
  }
  CROSSDOCK_DEVICE i32 kept_shift(u32 g, u32 base) const {
    return fp4_kept_shift(fp4_shift(exponent(g), base));
  }
  template <class Code>
  CROSSDOCK_DEVICE void write_packed(u32 g, u32 base, const Code& code) const {
    const u32 to = m_.row_to(block_, row_);
    u8* block = m_.to + m_.packed_to(expert_, to, group_);
    const u32 step = first_ / kFp4Group + g;
    CROSSDOCK_NO_UNROLL
    for (u32 quad = 0; quad < 4; ++quad) {
      u32 word = 0;
      CROSSDOCK_NO_UNROLL
      for (u32 i = 0; i < 8; ++i)
        word |= fp4_in_word(i, code(g * kFp4Group + quad * 4 + i % 4 + i / 4 * 16));
      ptx::st_weak(reinterpret_cast<u32*>(block + fp4_word_offset(to % kWeightTile, step, quad)),
                   word);
    }
    ptx::st_weak(block + fp4_shift_offset(to % kWeightTile, step),
                 static_cast<u8>(fp4_shift_code(kept_shift(g, base))));
  }

  const PrepareWeightsParams& p_;
  const WeightMatrix& m_;
  u32 row_, first_;  // of the thread: row and column of the tile
  u32 expert_, block_, group_;
  u64 flaw_ = ~u64{0};
  float scale_ = 0;
};

}  // namespace crossdock::device
