// Preparation of weights: every plain value is where the layout says, quantised within half a step,
// with the scale of its 128 x 128 block; weights that are e4m3 keep their bits; bad input is named.
// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <gmock/gmock.h>
#include <limits>

#include <crossdock/layout/probe.cuh>
#include <crossdock/moe/weights.hpp>
#include <crossdock/ptx/minifloat.cuh>

namespace crossdock::testing {
namespace {

using device::u32;
using device::u64;
using device::u8;
using u16 = device::u16;
using moe::Format;
using moe::Number;
using ::testing::HasSubstr;

constexpr u32 kExperts = 2, kHidden = 256, kInter = 384;

float e4m3(u8 code) {
  return std::bit_cast<float>(device::minifloat::decode(device::minifloat::kE4m3, code));
}
float bf16(u16 code) {
  return std::bit_cast<float>(u32{code} << 16);
}
u16 to_bf16(float value) {
  return static_cast<u16>(device::minifloat::encode_bf16(std::bit_cast<u32>(value)));
}

// One plain matrix in all three kinds of numbers. Blocks of 128 x 128 differ in size.
struct Plain {
  u32 rows, columns;
  std::vector<float> f32, scales;
  std::vector<u16> bf16;
  std::vector<u8> e4m3;

  Plain(u32 r, u32 c, u32 seed) : rows(r), columns(c) {
    for (u64 i = 0; i < u64{kExperts} * rows * columns; ++i) {
      const u32 block = static_cast<u32>(i / columns / 128 * 5 + i % columns / 128);
      const float value =
          (static_cast<float>(device::mix(seed + static_cast<u32>(i)) % 20001) - 10000.0f) / 3e4f;
      f32.push_back(std::ldexp(value, static_cast<int>(block % 7) - 3));
      bf16.push_back(to_bf16(f32.back()));
      e4m3.push_back(static_cast<u8>(device::mix(seed + 1 + static_cast<u32>(i)) % 127));
    }
    for (u64 i = 0; i < f32.size() / 16384; ++i)
      scales.push_back(0.001f * static_cast<float>(1 + i));
  }
  [[nodiscard]] u64 at(u32 expert, u32 row, u32 column) const {
    return (u64{expert} * rows + row) * columns + column;
  }
  [[nodiscard]] float scale(u32 expert, u32 row, u32 column) const {
    return scales[(u64{expert} * (rows / 128) + row / 128) * (columns / 128) + column / 128];
  }
  // Largest magnitude of the block that a value is in.
  [[nodiscard]] float peak(u32 expert, u32 row, u32 column) const {
    float most = 0;
    for (u32 r = row / 128 * 128; r < row / 128 * 128 + 128; ++r)
      for (u32 c = column / 128 * 128; c < column / 128 * 128 + 128; ++c)
        most = std::max(most, std::abs(f32[at(expert, r, c)]));
    return most;
  }
};
struct PlainPair {
  Plain gate_up{2 * kInter, kHidden, 1};
  Plain down{kHidden, kInter, 77777};

  [[nodiscard]] moe::PlainWeights of(Number number) const {
    moe::PlainWeights p{.number = number, .experts = kExperts, .hidden = kHidden, .inter = kInter};
    const auto pick = [&](const Plain& m) -> const void* {
      if (number == Number::kF32) return m.f32.data();
      return number == Number::kBf16 ? static_cast<const void*>(m.bf16.data()) : m.e4m3.data();
    };
    p.gate_up = pick(gate_up);
    p.down = pick(down);
    if (number == Number::kE4m3) {
      p.gate_up_scales = gate_up.scales.data();
      p.down_scales = down.scales.data();
    }
    return p;
  }
};

// Row of the plain gate_up that is row `row` of the prepared one, and which scales are its own.
u32 plain_row(u32 row, bool up_first = false) {
  const bool up = row / 8 % 2 != (up_first ? 1 : 0);
  return (up ? kInter : 0) + row / 16 * 8 + row % 8;
}
float scale_at(const void* scales, u64 index) {
  return static_cast<const float*>(scales)[index];
}
u32 scale_row(u32 row) {
  return row / 256 * 2 + row / 8 % 2;
}

TEST(MoeWeights, Bf16RowsMoveAndKeepTheirBits) {
  const PlainPair plain;
  for (const bool up_first : {false, true}) {
    auto of = plain.of(Number::kBf16);
    of.up_first = up_first;
    const auto weights = moe::Weights::prepare(of, Format::kBf16).value();
    const auto view = weights.view();
    EXPECT_EQ(view.gate_up_scales, nullptr);
    EXPECT_EQ(view.layout.version, moe::kWeightLayoutVersion);
    const auto* got = static_cast<const u16*>(view.gate_up);
    for (u32 e = 0; e < kExperts; ++e)
      for (u32 row = 0; row < 2 * kInter; ++row)
        for (u32 c = 0; c < kHidden; ++c)
          ASSERT_EQ(got[plain.gate_up.at(e, row, c)],
                    plain.gate_up.bf16[plain.gate_up.at(e, plain_row(row, up_first), c)])
              << "expert " << e << " row " << row << " up first " << up_first;
    EXPECT_EQ(std::memcmp(view.down, plain.down.bf16.data(), plain.down.bf16.size() * 2), 0);
  }
}

TEST(MoeWeights, F32IsRoundedToBf16) {
  const PlainPair plain;
  const auto weights = moe::Weights::prepare(plain.of(Number::kF32), Format::kBf16).value();
  EXPECT_EQ(std::memcmp(weights.view().down, plain.down.bf16.data(), plain.down.bf16.size() * 2),
            0);
}

TEST(MoeWeights, QuantisedWithinHalfAStepByTheScaleOfTheBlock) {
  const PlainPair plain;
  const auto weights = moe::Weights::prepare(plain.of(Number::kF32), Format::kE4m3).value();
  const auto view = weights.view();
  const auto* gate_up = static_cast<const u8*>(view.gate_up);
  const auto* down = static_cast<const u8*>(view.down);
  const auto check = [](float want, u8 code, float scale, float peak) {
    ASSERT_EQ(scale, peak / 448.0f);
    const float value = e4m3(code);
    ASSERT_LE(std::abs(value * scale - want),
              std::max(std::abs(value) / 16, 1.0f / 1024) * scale * 1.00001f)
        << want << " became " << value << " x " << scale;
  };
  for (u32 e = 0; e < kExperts; ++e) {
    for (u32 row = 0; row < 2 * kInter; row += 3)
      for (u32 c = row % 5; c < kHidden; c += 37) {
        const u32 from = plain_row(row);
        const float scale =
            scale_at(view.gate_up_scales,
                     (e * (2 * kInter / 128) + scale_row(row)) * (kHidden / 128) + c / 128);
        ASSERT_NO_FATAL_FAILURE(check(plain.gate_up.f32[plain.gate_up.at(e, from, c)],
                                      gate_up[plain.gate_up.at(e, row, c)], scale,
                                      plain.gate_up.peak(e, from, c)));
      }
    for (u32 row = 0; row < kHidden; row += 3)
      for (u32 c = row % 5; c < kInter; c += 37) {
        const float scale = scale_at(view.down_scales,
                                     (e * (kHidden / 128) + row / 128) * (kInter / 128) + c / 128);
        ASSERT_NO_FATAL_FAILURE(check(plain.down.f32[plain.down.at(e, row, c)],
                                      down[plain.down.at(e, row, c)], scale,
                                      plain.down.peak(e, row, c)));
      }
  }
}

TEST(MoeWeights, QuantisedOnesKeepTheirBitsAndScales) {
  const PlainPair plain;
  const auto weights = moe::Weights::prepare(plain.of(Number::kE4m3), Format::kE4m3).value();
  const auto view = weights.view();
  const auto* gate_up = static_cast<const u8*>(view.gate_up);
  for (u32 e = 0; e < kExperts; ++e)
    for (u32 row = 0; row < 2 * kInter; ++row)
      for (u32 c = 0; c < kHidden; ++c) {
        const u32 from = plain_row(row);
        ASSERT_EQ(gate_up[plain.gate_up.at(e, row, c)],
                  plain.gate_up.e4m3[plain.gate_up.at(e, from, c)]);
        ASSERT_EQ(scale_at(view.gate_up_scales,
                           (e * (2 * kInter / 128) + scale_row(row)) * (kHidden / 128) + c / 128),
                  plain.gate_up.scale(e, from, c));
      }
  EXPECT_EQ(std::memcmp(view.down, plain.down.e4m3.data(), plain.down.e4m3.size()), 0);
  EXPECT_EQ(std::memcmp(view.down_scales, plain.down.scales.data(), plain.down.scales.size() * 4),
            0);
}

TEST(MoeWeights, QuantisedOnesBecomeBf16) {
  const PlainPair plain;
  const auto weights = moe::Weights::prepare(plain.of(Number::kE4m3), Format::kBf16).value();
  const auto* down = static_cast<const u16*>(weights.view().down);
  for (u32 row = 0; row < kHidden; ++row) {
    const u64 at = plain.down.at(1, row, row);
    ASSERT_EQ(bf16(down[at]),
              bf16(to_bf16(e4m3(plain.down.e4m3[at]) * plain.down.scale(1, row, row))));
  }
}

TEST(MoeWeights, BlocksOfZerosHaveASmallScale) {
  PlainPair plain;
  std::fill(plain.down.f32.begin(), plain.down.f32.end(), 0.0f);
  const auto weights = moe::Weights::prepare(plain.of(Number::kF32), Format::kE4m3).value();
  EXPECT_EQ(scale_at(weights.view().down_scales, 0), 1e-10f / 448.0f);
  EXPECT_EQ(static_cast<const u8*>(weights.view().down)[5], 0);
}

TEST(MoeWeights, BadInputIsNamed) {
  PlainPair plain;
  const auto refuse = [&](Number number, Format format,
                          const std::function<void(moe::PlainWeights&)>& change, const char* text) {
    auto of = plain.of(number);
    change(of);
    const auto got = moe::Weights::prepare(of, format);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  };
  refuse(
      Number::kF32, Format::kE4m3, [](auto& p) { p.hidden = 200; },
      "hidden = 200 must be a positive multiple of 128, the values that share a scale: pad with "
      "zeros to 256");
  refuse(Number::kF32, Format::kE4m3, [](auto& p) { p.inter = 0; }, "inter = 0");
  refuse(Number::kF32, Format::kE4m3, [](auto& p) { p.experts = 513; }, "experts = 513");
  refuse(Number::kF32, Format::kE4m3, [](auto& p) { p.down = nullptr; }, "must both be given");
  refuse(
      Number::kE4m3, Format::kE4m3, [](auto& p) { p.down_scales = nullptr; },
      "plain weights of e4m3 need scales");
  refuse(
      Number::kBf16, Format::kE4m3, [&](auto& p) { p.down_scales = plain.down.scales.data(); },
      "f32 or bf16 have no scales");
  plain.gate_up.f32[plain.gate_up.at(1, 300, 7)] = std::nanf("");
  plain.down.f32[plain.down.at(0, 3, 9)] = std::numeric_limits<float>::infinity();
  refuse(
      Number::kF32, Format::kE4m3, [](auto&) {},
      "the value nan of gate_up at expert 1, row 300, column 7 must be finite: repair");
  plain.gate_up.f32[plain.gate_up.at(1, 300, 7)] = 3.4e38f;
  refuse(
      Number::kF32, Format::kBf16, [](auto&) {},
      "as bf16 the value 3.4e+38 of gate_up at expert 1");
  plain.gate_up.f32[plain.gate_up.at(1, 300, 7)] = 0;
  refuse(Number::kF32, Format::kBf16, [](auto&) {}, "the value inf of down at expert 0, row 3");
  plain.gate_up.e4m3[4] = 0x7f;
  refuse(Number::kE4m3, Format::kE4m3, [](auto&) {}, "the value nan of gate_up at expert 0, row 0");
  plain.gate_up.e4m3[4] = 0;
  plain.down.scales[3] = -1.0f;
  refuse(
      Number::kE4m3, Format::kE4m3, [](auto&) {},
      "scale -1 of down at expert 0, row 128, column 0 must be finite and not negative");
}

TEST(MoeWeights, LayoutsOfOtherVersionsAreNamed) {
  moe::WeightLayout layout{
      .version = 9, .format = Format::kE4m3, .experts = 4, .hidden = 256, .inter = 128};
  const auto refused = moe::weight_sizes(layout);
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("a layout of version 9"));
  layout.version = moe::kWeightLayoutVersion;
  const auto sizes = moe::weight_sizes(layout).value();
  EXPECT_EQ(sizes.gate_up_bytes, 4u * 256 * 256);
  EXPECT_EQ(sizes.gate_up_scales, 4u * 2 * 2);
  EXPECT_EQ(sizes.down_scales, 4u * 2);
  EXPECT_EQ(moe::describe(layout), "version 1, e4m3, 4 experts, hidden 256, inter 128");
}

}  // namespace
}  // namespace crossdock::testing
