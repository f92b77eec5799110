// Compressed rows of combine: what experts make, with groups of every kind, and the reference: what
// each format makes of it, in plain C++, and the error that the format promises, in fp64. Test
// code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include <crossdock/ep/options.hpp>
#include <crossdock/layout/ep_payload.cuh>

#include "support/ep_case.hpp"

namespace crossdock::testing {

inline constexpr u32 kPayloadGroup = 128;

// Value `i` of what the experts of `rank` make of a token: groups of zeros, of magnitudes within an
// octave, over seventy octaves, down to the smallest of bf16, and like those of a model.
inline u16 wide_value(u32 rank, u32 source, u32 token, u32 i, u32 round) {
  const u32 row = rank * 7919 + source * 104729 + token * 1299709 + round * 65537;
  const u32 x = mix(row + i * 31);
  const float sign = (x & 1u) != 0 ? -1.0f : 1.0f;
  const float fraction = 1.0f + static_cast<float>(x >> 8 & 0xffffu) / 65536.0f;
  switch (mix(row + i / kPayloadGroup * 977) % 8) {
    case 0:
      return 0;
    case 1:
      return bf16_of(sign * fraction);
    case 2:
      return bf16_of(sign * std::ldexp(fraction, static_cast<int>(x >> 24) % 70 - 50));
    case 3:
      return bf16_of(sign * std::ldexp(fraction, -100 - static_cast<int>(x >> 24) % 35));
    default:
      return bf16_of((static_cast<float>(x % 4001) - 2000.0f) / 300.0f);
  }
}

// A group as it comes out of a format.
struct PayloadGroup {
  float values[kPayloadGroup];
};
inline PayloadGroup through_fp8(const u16* bf16) {
  float most = 0x1p-100f;
  for (u32 i = 0; i < kPayloadGroup; ++i)
    if (std::abs(from_bf16(bf16[i])) > most) most = std::abs(from_bf16(bf16[i]));
  PayloadGroup out{};
  for (u32 i = 0; i < kPayloadGroup; ++i) {
    const float scaled = from_bf16(bf16[i]) * (448.0f / most);
    const u32 code = minifloat::encode(minifloat::kE4m3, bit_cast<u32>(scaled));
    out.values[i] = bit_cast<float>(minifloat::decode(minifloat::kE4m3, code));
  }
  return out;
}
inline float fp8_scale(const u16* bf16) {
  float most = 0x1p-100f;
  for (u32 i = 0; i < kPayloadGroup; ++i)
    if (std::abs(from_bf16(bf16[i])) > most) most = std::abs(from_bf16(bf16[i]));
  return most / 448.0f;
}
inline PayloadGroup through_log(const u16* bf16) {
  u32 lowest = 0, highest = 0;
  for (u32 i = 0; i < kPayloadGroup; ++i) {
    const u32 magnitude = bf16[i] & 0x7fffu;
    highest = std::max(highest, magnitude);
    if (magnitude != 0 && (lowest == 0 || magnitude < lowest)) lowest = magnitude;
  }
  const EpLogRange range = EpLogRange::from(EpLogRange::of(lowest, highest).word());
  PayloadGroup out{};
  for (u32 i = 0; i < kPayloadGroup; ++i) {
    const u32 code = range.code(bf16[i] & 0x7fffu, range.inverse());
    const u32 bits = code == 0 ? 0 : (range.lowest << 16) + (code - 1) * range.step();
    out.values[i] = bit_cast<float>(bits | u32{bf16[i] & 0x8000u} << 16);
  }
  return out;
}

// The most that value `i` of a group may be off, by what layout/ep_payload.cuh promises.
inline double payload_error(ep::Payload payload, const u16* bf16, u32 i) {
  double most = 0, least = INFINITY;
  for (u32 k = 0; k < kPayloadGroup; ++k) {
    const double magnitude = std::abs(double{from_bf16(bf16[k])});
    most = std::max(most, magnitude);
    if (magnitude != 0) least = std::min(least, magnitude);
  }
  const double value = std::abs(double{from_bf16(bf16[i])});
  if (payload == ep::Payload::kFp8) return value / 16 + std::max(most, 0x1p-100) / 0x1p18;
  if (payload == ep::Payload::kBf16 || value == 0) return 0;
  const double octaves = std::min(std::log2(most / least), 32.0);
  if (value < most / 0x1p31) return value;
  return octaves < 3.8 ? 0 : value * octaves / 900;
}

// What has to come out of a combine whose rows have gone through a format.
class EpPayloadReference {
 public:
  EpPayloadReference(const EpCase& c, const EpInputs& inputs, ep::Payload payload)
      : case_(c), inputs_(inputs), payload_(payload) {}

  // Of the experts of `rank`: in the order of the received rows, with the gaps between them.
  [[nodiscard]] std::vector<u16> expert_rows(u32 rank, u32 round) const {
    std::vector<u16> out;
    u32 row = 0;
    for (u32 source = 0; source < case_.world; ++source) {
      row = case_.first_row(source, row);
      out.resize(u64{row} * values());
      for (u32 token = 0; token < inputs_.of(source).tokens; ++token) {
        if (!inputs_.goes_to(source, token, rank)) continue;
        append(out, rank, source, token, round);
        ++row;
      }
    }
    return out;
  }
  // The combined rows of `rank`: bit by bit what the format makes of them, and no further from the
  // sums in fp64 than the format promises. Tells the largest error, of what is promised.
  void check(u32 rank, const u8* rows, u32 round, double* largest = nullptr) const {
    for (u32 token = 0; token < inputs_.of(rank).tokens; ++token) {
      std::vector<std::vector<u16>> of_ranks;
      for (u32 d = 0; d < case_.world; ++d) {
        if (!inputs_.goes_to(rank, token, d)) continue;
        of_ranks.emplace_back();
        append(of_ranks.back(), d, rank, token, round);
      }
      for (u32 first = 0; first < values(); first += kPayloadGroup) {
        const u16* got = reinterpret_cast<const u16*>(rows) + u64{token} * values() + first;
        ASSERT_NO_FATAL_FAILURE(check_group({rank, token, first}, of_ranks, got, largest))
            << "round " << round;
      }
    }
  }

 private:
  struct Place {
    u32 rank, token, first;
  };
  [[nodiscard]] u32 values() const { return case_.combine_bytes / 2; }
  void append(std::vector<u16>& out, u32 rank, u32 source, u32 token, u32 round) const {
    for (u32 i = 0; i < values(); ++i)
      out.push_back(wide_value(rank, source, token, i, round));
  }
  void check_group(const Place& at, const std::vector<std::vector<u16>>& of_ranks, const u16* got,
                   double* largest) const {
    float sums[kPayloadGroup] = {};
    double exact[kPayloadGroup] = {}, error[kPayloadGroup] = {}, magnitude[kPayloadGroup] = {};
    for (u32 which = 0; which < case_.biases; ++which)
      for (u32 i = 0; i < kPayloadGroup; ++i) {
        const float bias = from_bf16(bias_value(which, at.rank, at.token, at.first + i));
        sums[i] += bias;
        exact[i] += bias;
        magnitude[i] += std::abs(bias);
      }
    for (const auto& row : of_ranks) {
      const u16* group = &row[at.first];
      add_group(group, sums);
      for (u32 i = 0; i < kPayloadGroup; ++i) {
        exact[i] += from_bf16(group[i]);
        magnitude[i] += std::abs(from_bf16(group[i]));
        error[i] += payload_error(payload_, group, i);
      }
    }
    for (u32 i = 0; i < kPayloadGroup; ++i) {
      SCOPED_TRACE("rank " + std::to_string(at.rank) + " token " + std::to_string(at.token) +
                   " value " + std::to_string(at.first + i));
      ASSERT_EQ(got[i], bf16_of(sums[i]));
      const double off = std::abs(from_bf16(got[i]) - exact[i]);
      // The sum is rounded to bf16 once, and on the way as fp32.
      const double rounding = (std::abs(exact[i]) + error[i]) / 256 + magnitude[i] / 0x1p20 + 1e-38;
      ASSERT_LE(off, error[i] + rounding);
      if (largest != nullptr && error[i] > rounding)
        *largest = std::max(*largest, off / (error[i] + rounding));
    }
  }
  void add_group(const u16* group, float (&sums)[kPayloadGroup]) const {
    if (payload_ == ep::Payload::kFp8) {
      const PayloadGroup codes = through_fp8(group);
      const float scale = fp8_scale(group);
      for (u32 i = 0; i < kPayloadGroup; ++i)
        sums[i] = std::fma(codes.values[i], scale, sums[i]);
      return;
    }
    const PayloadGroup values = through_log(group);
    for (u32 i = 0; i < kPayloadGroup; ++i)
      sums[i] += payload_ == ep::Payload::kBf16 ? from_bf16(group[i]) : values.values[i];
  }
  const EpCase& case_;
  const EpInputs& inputs_;
  ep::Payload payload_;
};

}  // namespace crossdock::testing
