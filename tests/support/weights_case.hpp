// Plain weights under test, and their preparation on a rank beside that on the CPU: the same bits,
// the same report, the same error. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <vector>

#include <crossdock/layout/probe.cuh>
#include <crossdock/layout/weights.cuh>
#include <crossdock/moe/weights.hpp>

#include "support/gemm_case.hpp"

namespace crossdock::testing {

struct WeightCase {
  u32 experts = 2, hidden = 256, inter = 128;
  moe::Number number = moe::Number::kF32;
  moe::Format format = moe::Format::kE4m3;
  moe::ScaleType scales = moe::ScaleType::kF32;
  bool up_first = false;
  u32 spread = 20;  // of e2m1's exponents
  u32 seed = 1;
};

// The numbers of one matrix, some tiles large, some small, some groups 0.
struct PlainMatrix {
  std::vector<u8> codes, scales;

  PlainMatrix(const WeightCase& c, u64 rows, u64 columns, u32 seed) {
    const u64 count = c.experts * rows * columns;
    codes.resize(count * bits(c) / 8);
    for (u64 i = 0; i < count; ++i)
      put(c, i, number(c, i, columns, seed));
    if (c.number == moe::Number::kE4m3)
      for (u64 i = 0; i < count / 16384; ++i)
        add_scale(c.scales == moe::ScaleType::kUe8m0
                      ? std::ldexp(1.0f, static_cast<int>(i % 19) - 9)
                      : 0.001f * static_cast<float>(1 + i));
    if (c.number == moe::Number::kE2m1)
      for (u64 i = 0; i < count / 32; ++i)
        scales.push_back(
            static_cast<u8>(110 + device::mix(seed + static_cast<u32>(i)) % (c.spread + 1)));
  }
  static u64 bits(const WeightCase& c) {
    constexpr u64 kBits[] = {32, 16, 8, 4};
    return kBits[static_cast<u32>(c.number)];
  }

 private:
  static float number(const WeightCase& c, u64 i, u64 columns, u32 seed) {
    const u32 random = device::mix(c.seed * 7919u + seed + static_cast<u32>(i));
    const u32 group = static_cast<u32>(i / 32);
    if (group % 23 == 5) return 0;
    const u32 tile = static_cast<u32>(i / columns / 128 * 5 + i % columns / 128);
    const float value = (static_cast<float>(random % 20001) - 10000.0f) / 3e4f;
    return std::ldexp(value, static_cast<int>(tile % 7) - static_cast<int>(group % 5) * 4);
  }
  void put(const WeightCase& c, u64 i, float value) {
    const u32 bits = device::bit_cast<u32>(value);
    const u32 random = device::mix(bits + static_cast<u32>(i));
    switch (c.number) {
      case moe::Number::kF32:
        std::memcpy(&codes[i * 4], &bits, 4);
        break;
      case moe::Number::kBf16: {
        const u32 code = device::minifloat::encode_bf16(bits);
        std::memcpy(&codes[i * 2], &code, 2);
        break;
      }
      case moe::Number::kE4m3:
        codes[i] = static_cast<u8>(random % 127 | (random >> 8 & 0x80u));
        break;
      default:
        codes[i / 2] |= static_cast<u8>((value == 0 ? 0 : random % 16) << (i % 2 * 4));
    }
  }
  void add_scale(float scale) {
    const u64 at = scales.size();
    scales.resize(at + 4);
    std::memcpy(&scales[at], &scale, 4);
  }
};

struct PlainPair {
  WeightCase c;
  PlainMatrix gate_up, down;

  explicit PlainPair(const WeightCase& of)
      : c(of), gate_up(of, 2 * of.inter, of.hidden, 11), down(of, of.hidden, of.inter, 77777) {}
  [[nodiscard]] moe::PlainWeights plain() const {
    const bool scaled = !gate_up.scales.empty();
    return {.number = c.number,
            .experts = c.experts,
            .hidden = c.hidden,
            .inter = c.inter,
            .gate_up = gate_up.codes.data(),
            .up_first = c.up_first,
            .down = down.codes.data(),
            .gate_up_scales = scaled ? gate_up.scales.data() : nullptr,
            .down_scales = scaled ? down.scales.data() : nullptr};
  }
};

// The plain weights in memory of a rank.
struct PlainOnRank {
  symm::LocalMemory gate_up, down, gate_up_scales, down_scales;
  moe::PlainWeights plain;

  PlainOnRank(GemmRig& rig, const PlainPair& from)
      : gate_up(rig.put(from.gate_up.codes)),
        down(rig.put(from.down.codes)),
        gate_up_scales(rig.put(from.gate_up.scales)),
        down_scales(rig.put(from.down.scales)),
        plain(from.plain()) {
    plain.gate_up = gate_up.address();
    plain.down = down.address();
    if (plain.gate_up_scales != nullptr) plain.gate_up_scales = gate_up_scales.address();
    if (plain.down_scales != nullptr) plain.down_scales = down_scales.address();
  }
};

// Every kind of number to every format.
inline std::vector<WeightCase> weight_cases() {
  std::vector<WeightCase> all;
  for (const auto number :
       {moe::Number::kF32, moe::Number::kBf16, moe::Number::kE4m3, moe::Number::kE2m1})
    for (const auto format : {moe::Format::kBf16, moe::Format::kE4m3, moe::Format::kE2m1})
      for (const auto scales : {moe::ScaleType::kF32, moe::ScaleType::kUe8m0}) {
        if (format == moe::Format::kBf16 && scales == moe::ScaleType::kUe8m0) continue;
        all.push_back({.number = number,
                       .format = format,
                       .scales = scales,
                       .up_first = scales == moe::ScaleType::kUe8m0});
      }
  return all;
}

// On a rank of the rig as on the CPU.
inline void compare_preparation(GemmRig& rig, const WeightCase& c) {
  SCOPED_TRACE(::testing::Message() << "number " << int(c.number) << " format " << int(c.format)
                                    << " scales " << int(c.scales));
  const PlainPair from(c);
  const PlainOnRank there(rig, from);
  const auto want = moe::Weights::prepare(from.plain(), c.format, c.scales).value();
  const auto got = moe::Weights::prepare(rig.gemm(), 0, there.plain,
                                         {.format = c.format, .scales = c.scales}, GemmRig::soon());
  ASSERT_TRUE(got.ok()) << got.error().describe();
  EXPECT_EQ(got->layout(), want.layout());
  EXPECT_EQ(got->report().groups, want.report().groups);
  EXPECT_EQ(got->report().inexact_groups, want.report().inexact_groups);
  const auto sizes = moe::weight_sizes(want.layout()).value();
  const auto same = [&](const void* mine, const void* expected, u64 bytes, const char* what) {
    if (bytes == 0) return;
    const auto seen =
        symm::download(rig.rank(), static_cast<const u8*>(mine), bytes, GemmRig::soon()).value();
    EXPECT_EQ(std::memcmp(seen.data(), expected, bytes), 0) << what;
  };
  const moe::WeightsView a = got->view(), b = want.view();
  same(a.gate_up, b.gate_up, sizes.gate_up_bytes, "gate_up");
  same(a.down, b.down, sizes.down_bytes, "down");
  same(a.gate_up_scales, b.gate_up_scales, sizes.gate_up_scales * sizes.scale_bytes, "its scales");
  same(a.down_scales, b.down_scales, sizes.down_scales * sizes.scale_bytes, "scales of down");
}

// Both refuse it, and say the same.
inline std::string compare_refusal(GemmRig& rig, const PlainPair& from) {
  const PlainOnRank there(rig, from);
  const auto want = moe::Weights::prepare(from.plain(), from.c.format, from.c.scales);
  const auto got =
      moe::Weights::prepare(rig.gemm(), 0, there.plain,
                            {.format = from.c.format, .scales = from.c.scales}, GemmRig::soon());
  EXPECT_EQ(want.code(), Code::kInvalidArgument);
  EXPECT_EQ(got.code(), Code::kInvalidArgument);
  if (want.ok() || got.ok()) return {};
  EXPECT_EQ(got.error().message, want.error().message);
  return want.error().message;
}

}  // namespace crossdock::testing
