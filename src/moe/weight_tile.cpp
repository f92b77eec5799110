// See weight_tile.hpp. SPDX-License-Identifier: Apache-2.0
#include "moe/weight_tile.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace crossdock::moe {

using device::i32;
using device::u32;
using device::u64;
using device::u8;
using device::WeightFlaw;
using device::WeightFormat;
using device::WeightNumber;
using u16 = device::u16;

namespace {

constexpr u32 kTile = device::kWeightTile;
constexpr u32 kGroups = kTile / device::kFp4Group;  // of a row that share an exponent

class TilePreparer {
 public:
  TilePreparer(const device::WeightMatrix& matrix, const WeightTile& tile) : m_(matrix), t_(tile) {}

  TileResult run() {
    read();
    find_scale();
    if (!none()) return result_;
    if (m_.format == WeightFormat::kBf16) return write_bf16();
    if (m_.format == WeightFormat::kE2m1 || m_.number == WeightNumber::kE2m1) return write_fp4();
    return write_e4m3();
  }

 private:
  [[nodiscard]] bool none() const { return result_.flaw == ~u64{0}; }
  void tell(u32 row, u32 column, WeightFlaw flaw) {
    result_.flaw = std::min(result_.flaw, device::weight_flaw(index(row, column), flaw));
  }
  // Of a value of the tile in the plain matrix.
  [[nodiscard]] u64 index(u32 row, u32 column) const {
    return (u64{t_.expert} * m_.rows + u64{t_.block} * kTile + row) * m_.columns +
           u64{t_.group} * kTile + column;
  }
  [[nodiscard]] u32 code(u64 at) const {
    u32 bits = 0;
    switch (m_.number) {
      case WeightNumber::kF32:
        std::memcpy(&bits, m_.from + at * 4, 4);
        return bits;
      case WeightNumber::kBf16:
        std::memcpy(&bits, m_.from + at * 2, 2);
        return bits;
      case WeightNumber::kE2m1:
        return m_.from[at / 2] >> (at % 2 * 4) & 0xfu;
      default:
        return m_.from[at];
    }
  }
  void read() {
    for (u32 row = 0; row < kTile; ++row)
      for (u32 i = 0; i < kTile; ++i) {
        values_[row][i] = device::weight_number(m_.number, code(index(row, i)));
        if (!device::is_finite(values_[row][i])) tell(row, i, WeightFlaw::kNotFinite);
      }
    if (m_.number != WeightNumber::kE2m1) return;
    for (u32 row = 0; row < kTile; ++row)
      for (u32 g = 0; g < kGroups; ++g) {
        exponents_[row][g] = m_.from_scales[index(row, g * device::kFp4Group) / device::kFp4Group];
        if (exponents_[row][g] == 255) tell(row, g * device::kFp4Group, WeightFlaw::kBadScale);
      }
  }
  // Of e4m3: the one that is given, or of the largest magnitude.
  void find_scale() {
    if (m_.number == WeightNumber::kE4m3) {
      std::memcpy(&scale_, m_.from_scales + m_.scale_from(t_.expert, t_.block, t_.group) * 4, 4);
      if (!device::is_finite(scale_) || scale_ < 0) {
        tell(0, 0, WeightFlaw::kBadScale);
      } else if (m_.ue8m0 && m_.format == WeightFormat::kE4m3 && !device::is_power(scale_)) {
        tell(0, 0, WeightFlaw::kNotAPower);
      }
      return;
    }
    float peak = 0;
    for (const auto& row : values_)
      for (const float value : row)
        peak = std::max(peak, device::weight_magnitude(value));
    scale_ = device::e4m3_weight_scale(peak, m_.ue8m0);
  }
  // With its scale.
  [[nodiscard]] float value(u32 row, u32 i) const {
    if (m_.number == WeightNumber::kE4m3) return values_[row][i] * scale_;
    if (m_.number == WeightNumber::kE2m1)
      return values_[row][i] * device::ue8m0_number(exponents_[row][i / device::kFp4Group]);
    return values_[row][i];
  }
  [[nodiscard]] u8* row_to(u32 row, u32 width) const {
    const u64 to = u64{t_.expert} * m_.rows + m_.row_to(t_.block, row);
    return m_.to + (to * m_.columns + u64{t_.group} * kTile) * width;
  }
  void write_scale(float scale) const {
    const u64 at = m_.scale_to(t_.expert, t_.block, t_.group);
    if (m_.ue8m0) {
      m_.to_scales[at] =
          static_cast<u8>(device::minifloat::encode_ue8m0(std::bit_cast<u32>(scale)));
    } else {
      std::memcpy(m_.to_scales + at * 4, &scale, 4);
    }
  }

  TileResult write_bf16() {
    std::array<std::array<u16, kTile>, kTile> codes;
    for (u32 row = 0; row < kTile; ++row)
      for (u32 i = 0; i < kTile; ++i) {
        codes[row][i] =
            static_cast<u16>(device::minifloat::encode_bf16(std::bit_cast<u32>(value(row, i))));
        if ((codes[row][i] & 0x7f80) == 0x7f80) tell(row, i, WeightFlaw::kTooLarge);
      }
    for (u32 row = 0; none() && row < kTile; ++row)
      std::memcpy(row_to(row, 2), codes[row].data(), sizeof(codes[row]));
    return result_;
  }
  TileResult write_e4m3() const {
    const bool kept = m_.number == WeightNumber::kE4m3;
    const float inverse = 1.0f / scale_;
    for (u32 row = 0; row < kTile; ++row) {
      u8* to = row_to(row, 1);
      for (u32 i = 0; i < kTile; ++i)
        to[i] = static_cast<u8>(kept ? code(index(row, i))
                                     : device::e4m3_weight(values_[row][i], inverse));
    }
    write_scale(scale_);
    return result_;
  }

  // ---- through e2m1 ----

  // Codes of all values, and exponents of groups; -1: all 0.
  void find_codes() {
    for (u32 row = 0; row < kTile; ++row)
      for (u32 g = 0; g < kGroups; ++g) {
        const u32 first = g * device::kFp4Group;
        float peak = 0;
        for (u32 i = first; i < first + device::kFp4Group; ++i)
          peak = std::max(peak, device::weight_magnitude(value(row, i)));
        const bool given = m_.number == WeightNumber::kE2m1;
        if (!given) exponents_[row][g] = device::fp4_exponent(peak);
        u32 any = 0;
        for (u32 i = first; i < first + device::kFp4Group; ++i) {
          codes_[row][i] = static_cast<u8>(
              given ? code(index(row, i)) : device::fp4_code(value(row, i), exponents_[row][g]));
          any |= codes_[row][i] & 7u;
        }
        if (any != 0) largest_ = std::max(largest_, static_cast<i32>(exponents_[row][g]));
      }
  }
  TileResult write_fp4() {
    find_codes();
    const u32 base = device::fp4_base(largest_);
    for (u32 row = 0; row < kTile; ++row)
      for (u32 g = 0; g < kGroups; ++g) {
        const i32 shift = device::fp4_shift(exponents_[row][g], base);
        bool exact = true;
        for (u32 i = g * device::kFp4Group; i < (g + 1) * device::kFp4Group; ++i) {
          const auto folded = device::fp4_fold(codes_[row][i], shift);
          codes_[row][i] = static_cast<u8>(folded.code);
          exact = exact && folded.exact;
        }
        if (!exact) ++result_.inexact;
        write_group(row, g, device::fp4_kept_shift(shift));
      }
    write_scale(device::ue8m0_number(base));
    return result_;
  }
  void write_group(u32 row, u32 g, i32 shift) const {
    const u8* codes = &codes_[row][u64{g} * device::kFp4Group];
    if (m_.format == WeightFormat::kE4m3) {
      u8* to = row_to(row, 1) + u64{g} * device::kFp4Group;
      for (u32 i = 0; i < device::kFp4Group; ++i)
        to[i] = static_cast<u8>(device::e4m3_from_fp4(codes[i], shift));
      return;
    }
    const u32 to = m_.row_to(t_.block, row);
    u8* block = m_.to + m_.packed_to(t_.expert, to, t_.group);
    for (u32 quad = 0; quad < 4; ++quad) {
      u32 word = 0;
      for (u32 i = 0; i < 8; ++i)
        word |= device::fp4_in_word(i, codes[quad * 4 + i % 4 + i / 4 * 16]);
      std::memcpy(block + device::fp4_word_offset(to % kTile, g, quad), &word, 4);
    }
    block[device::fp4_shift_offset(to % kTile, g)] = static_cast<u8>(device::fp4_shift_code(shift));
  }

  const device::WeightMatrix& m_;
  const WeightTile t_;
  TileResult result_;
  float scale_ = 0;
  i32 largest_ = -1;
  std::array<std::array<float, kTile>, kTile> values_;
  std::array<std::array<u8, kTile>, kTile> codes_;
  std::array<std::array<u32, kGroups>, kTile> exponents_;
};

}  // namespace

TileResult prepare_tile(const device::WeightMatrix& matrix, const WeightTile& tile) {
  return TilePreparer(matrix, tile).run();
}

}  // namespace crossdock::moe
