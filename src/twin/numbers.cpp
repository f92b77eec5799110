// Conversions of small floating-point formats.
// SPDX-License-Identifier: Apache-2.0
#include "twin/numbers.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace crossdock::twin {

namespace {

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
float signed_value(bool negative, float magnitude) {
  return negative ? -magnitude : magnitude;
}

}  // namespace

float bf16_to_float(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  if (std::isnan(value)) return 0x7FFF;
  const std::uint32_t round = 0x7FFF + (bits >> 16 & 1);
  return static_cast<std::uint16_t>((bits + round) >> 16);
}

float f16_to_float(std::uint16_t bits) {
  const bool negative = (bits & 0x8000) != 0;
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 0x3FF;
  if (exponent == 31) {
    if (mantissa != 0) return std::numeric_limits<float>::quiet_NaN();
    return signed_value(negative, std::numeric_limits<float>::infinity());
  }
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return signed_value(negative, magnitude);
}

std::uint16_t float_to_f16(float value) {
  const auto sign = static_cast<std::uint16_t>(bits_of(value) >> 16 & 0x8000);
  if (std::isnan(value)) return 0x7FFF;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f)
    return static_cast<std::uint16_t>(sign | 0x7C00);  // rounds to infinity
  int exponent = magnitude > 0 ? std::ilogb(magnitude) : -14;
  if (exponent < -14) exponent = -14;
  // In units of the last place; nearbyint rounds half to even in the default mode. A carry into the
  // exponent comes out right because the fields are adjacent.
  const auto scaled =
      static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  const std::uint32_t biased = scaled < 1024 ? 0 : static_cast<std::uint32_t>(exponent + 14);
  return static_cast<std::uint16_t>(sign | ((biased << 10) + scaled));
}

float e4m3_to_float(std::uint8_t bits) {
  const bool negative = (bits & 0x80) != 0;
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
  return signed_value(negative, magnitude);
}

float e5m2_to_float(std::uint8_t bits) {
  return f16_to_float(static_cast<std::uint16_t>(bits << 8));
}

}  // namespace crossdock::twin
