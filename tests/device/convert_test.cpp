// The conversions to and from narrow formats against a plain reference: the set of representable
// values, searched for the nearest. No twin is run; the functions are pure.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <vector>

#include <crossdock/ptx/convert.cuh>

namespace {

using namespace crossdock::device;

float from_bits(u32 bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
u32 to_bits(float f) {
  u32 bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

// A small format, described by its textbook definition and not by the code under test.
struct Reference {
  const char* name;
  int mantissa_bits;
  int bias;
  u32 codes;  // number of non-negative finite codes
  u32 nan;
  u32 sign;

  double value(u32 code) const {
    const int mantissa = static_cast<int>(code & ((1u << mantissa_bits) - 1));
    const int exponent = static_cast<int>(code >> mantissa_bits);
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  }
  // The nearest code; of two equally near ones the even one; the largest for all beyond.
  u32 nearest(float x) const {
    if (std::isnan(x)) return nan;
    const double magnitude = std::fabs(static_cast<double>(x));
    u32 best = codes - 1;
    for (u32 code = 0; code + 1 < codes; ++code) {
      const double down = magnitude - value(code);
      const double up = value(code + 1) - magnitude;
      if (up < 0) continue;
      best = down < up || (down == up && code % 2 == 0) ? code : code + 1;
      break;
    }
    return best | (std::signbit(x) ? sign : 0);
  }
};
constexpr Reference kE4m3{"e4m3", 3, 7, 0x7f, 0x7f, 0x80};
constexpr Reference kE5m2{"e5m2", 2, 15, 0x7c, 0x7f, 0x80};
constexpr Reference kE2m1{"e2m1", 1, 1, 8, 7, 8};

// Where rounding is decided: every value, every midpoint, and the floats next to them; the ends of
// fp32; and a spread of random bit patterns.
std::vector<float> probes(const Reference& format) {
  std::vector<float> out;
  const auto around = [&](double v) {
    const float f = static_cast<float>(v);
    for (float x : {std::nextafter(f, -1e30f), f, std::nextafter(f, 1e30f)}) {
      out.push_back(x);
      out.push_back(-x);
    }
  };
  for (u32 code = 0; code + 1 < format.codes; ++code) {
    around(format.value(code));
    around((format.value(code) + format.value(code + 1)) / 2);
  }
  const double largest = format.value(format.codes - 1);
  for (double v : {largest, largest * 1.03, largest * 1.07, largest * 2})
    around(v);
  for (u32 bits :
       {0u, 1u, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fffffffu})
    for (u32 sign : {0u, 0x80000000u})
      out.push_back(from_bits(bits | sign));
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i)
    out.push_back(from_bits(static_cast<u32>(random())));
  std::uniform_real_distribution<float> inside(static_cast<float>(-largest),
                                               static_cast<float>(largest));
  for (int i = 0; i < 20000; ++i)
    out.push_back(inside(random));
  return out;
}

TEST(Convert, E4m3RoundsToNearestEvenAndSaturates) {
  for (float x : probes(kE4m3)) {
    const u32 packed = ptx::e4m3x2_from_f32(x, -x);
    ASSERT_EQ(packed & 0xff, kE4m3.nearest(x)) << std::hexfloat << x;
    ASSERT_EQ(packed >> 8, kE4m3.nearest(-x)) << std::hexfloat << x;
  }
}

TEST(Convert, E5m2RoundsToNearestEvenAndSaturates) {
  for (float x : probes(kE5m2)) {
    const u32 packed = ptx::e5m2x2_from_f32(x, -x);
    ASSERT_EQ(packed & 0xff, kE5m2.nearest(x)) << std::hexfloat << x;
    ASSERT_EQ(packed >> 8, kE5m2.nearest(-x)) << std::hexfloat << x;
  }
}

TEST(Convert, E2m1RoundsToNearestEvenAndSaturates) {
  for (float x : probes(kE2m1)) {
    const u32 packed = ptx::e2m1x2_from_f32(x, -x);
    ASSERT_EQ(packed & 0xf, kE2m1.nearest(x)) << std::hexfloat << x;
    ASSERT_EQ(packed >> 4, kE2m1.nearest(-x)) << std::hexfloat << x;
  }
}

TEST(Convert, DecodingGivesTheTextbookValueOfEveryCode) {
  for (const Reference& format : {kE4m3, kE5m2, kE2m1}) {
    const u32 codes = 2 * format.sign;
    for (u32 code = 0; code < codes; ++code) {
      const bool four_bits = format.sign == 8;
      const ptx::F32x2 pair = four_bits          ? ptx::f32_from_e2m1x2(code << 4)
                              : format.bias == 7 ? ptx::f32_from_e4m3x2(code << 8)
                                                 : ptx::f32_from_e5m2x2(code << 8);
      const u32 magnitude = code & (format.sign - 1);
      EXPECT_EQ(pair.lo, 0.0f);
      if (magnitude < format.codes) {
        EXPECT_EQ(static_cast<double>(pair.hi),
                  (code & format.sign ? -1 : 1) * format.value(magnitude))
            << format.name << " " << code;
        EXPECT_EQ(std::signbit(pair.hi), (code & format.sign) != 0);
      } else if (format.bias == 15 && magnitude == 0x7c) {
        EXPECT_TRUE(std::isinf(pair.hi));
      } else {
        EXPECT_TRUE(std::isnan(pair.hi)) << format.name << " " << code;
      }
    }
  }
}

TEST(Convert, Bf16RoundsToNearestEven) {
  std::mt19937 random(2);
  std::vector<u32> patterns;
  for (u32 upper = 0; upper < 0x10000; ++upper)
    for (u32 lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      patterns.push_back(upper << 16 | lower);
  for (int i = 0; i < 100000; ++i)
    patterns.push_back(static_cast<u32>(random()));
  for (u32 bits : patterns) {
    const float x = from_bits(bits);
    const u32 packed = ptx::bf16x2_from_f32(x, 1.0f);
    ASSERT_EQ(packed >> 16, 0x3f80u);
    const u32 code = packed & 0xffff;
    if (std::isnan(x)) {
      ASSERT_EQ(code, 0x7fffu);
      continue;
    }
    // Between the two neighbours, in exact arithmetic; the one beyond the largest is 2^128.
    const auto value = [](u32 upper) {
      const double v = static_cast<double>(from_bits(upper << 16));
      return std::isinf(v) ? std::copysign(std::ldexp(1.0, 128), v) : v;
    };
    const u32 toward_zero = bits >> 16;
    if (std::isinf(x)) {
      ASSERT_EQ(code, toward_zero);
      continue;
    }
    const double below = std::fabs(static_cast<double>(x) - value(toward_zero));
    const double above = std::fabs(value(toward_zero + 1) - static_cast<double>(x));
    const bool stay = below < above || (below == above && toward_zero % 2 == 0);
    ASSERT_EQ(code, stay ? toward_zero : toward_zero + 1) << std::hex << bits;
  }
}

TEST(Convert, Bf16WidensExactlyAndTakesTheLarger) {
  for (u32 code = 0; code < 0x10000; ++code) {
    const ptx::F32x2 pair = ptx::f32_from_bf16x2(code << 16 | 0x3f80u);
    ASSERT_EQ(to_bits(pair.hi), code << 16);
    ASSERT_EQ(pair.lo, 1.0f);
  }
  std::mt19937 random(3);
  for (int i = 0; i < 100000; ++i) {
    const u32 a = static_cast<u32>(random()) & 0xffffu, b = static_cast<u32>(random()) & 0xffffu;
    const float fa = from_bits(a << 16), fb = from_bits(b << 16);
    const u32 larger = ptx::max_bf16x2(a | b << 16, b | a << 16);
    ASSERT_EQ(larger & 0xffff, larger >> 16);
    if (std::isnan(fa) && std::isnan(fb)) {
      ASSERT_EQ(larger & 0xffff, 0x7fffu);
    } else {
      const float expected = std::isnan(fa) ? fb : std::isnan(fb) ? fa : fa < fb ? fb : fa;
      ASSERT_EQ(from_bits(larger << 16), expected);
    }
  }
  EXPECT_EQ(ptx::max_bf16x2(0x80000000u, 0x00008000u), 0u) << "+0 is above -0";
}

TEST(Convert, Ue8m0IsTheSmallestPowerOfTwoNotBelow) {
  std::vector<float> inputs{0.0f, std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::infinity()};
  for (int k = -149; k <= 127; ++k) {
    const float power = static_cast<float>(std::ldexp(1.0, k));
    for (float x : {std::nextafter(power, 0.0f), power, std::nextafter(power, 3e38f)})
      inputs.push_back(x);
  }
  for (float x : inputs) {
    u32 expected = 0;
    while (expected < 254 &&
           std::ldexp(1.0, static_cast<int>(expected) - 127) < static_cast<double>(x))
      ++expected;
    ASSERT_EQ(ptx::ue8m0_from_f32(x), expected) << std::hexfloat << x;
  }
  EXPECT_EQ(ptx::ue8m0_from_f32(std::numeric_limits<float>::quiet_NaN()), 255u);
  for (u32 code = 0; code < 255; ++code)
    EXPECT_EQ(static_cast<double>(ptx::f32_from_ue8m0(code)),
              std::ldexp(1.0, static_cast<int>(code) - 127));
  EXPECT_TRUE(std::isnan(ptx::f32_from_ue8m0(255)));
}

}  // namespace
