// The narrow number formats in plain integer arithmetic, bit-exact with the hardware's conversions:
// e4m3 and e5m2 (FP8), e2m1 (FP4), ue8m0 (a power of two as a scale) and bf16. Used on the host, in
// the twin, and on GPUs that lack the instruction; convert.cuh picks. Pure functions on bit
// patterns. Rounding is to nearest even and saturating (never to infinity); ue8m0 rounds up.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device::minifloat {

struct Format {
  i32 mantissa_bits;
  i32 bias;
  u32 largest;        // code of the largest finite magnitude
  u32 nan;            // what a NaN becomes
  u32 infinity_from;  // magnitudes from here on are infinity (this code) or NaN (above); 0x100:
                      // none
  u32 sign_bit;
};
inline constexpr Format kE4m3{3, 7, 0x7e, 0x7f, 0x100, 0x80};
inline constexpr Format kE5m2{2, 15, 0x7b, 0x7f, 0x7c, 0x80};
inline constexpr Format kE2m1{1, 1, 0x7, 0x7, 0x100, 0x8};

inline constexpr u32 kF32Infinity = 0x7f800000u;
inline constexpr u32 kF32Nan = 0x7fffffffu;
inline constexpr u32 kF32Magnitude = 0x7fffffffu;

// fp32 bits to the format. A NaN loses its sign.
CROSSDOCK_HOST_DEVICE constexpr u32 encode(Format f, u32 bits) {
  const u32 magnitude = bits & kF32Magnitude;
  if (magnitude > kF32Infinity) return f.nan;
  const u32 sign = (bits >> 31) * f.sign_bit;
  const i32 exponent = static_cast<i32>(magnitude >> 23) - 127;
  const i32 smallest = 1 - f.bias;  // exponent of the smallest normal number
  const bool subnormal = exponent < smallest;
  const i32 shift = 23 - f.mantissa_bits + (subnormal ? smallest - exponent : 0);
  if (shift > 24) return sign;  // below half of the smallest subnormal; all fp32 subnormals too
  const u32 mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const u32 rest = mantissa & ((1u << shift) - 1);
  const u32 half = 1u << (shift - 1);
  u32 code = mantissa >> shift;
  code += (rest > half || (rest == half && (code & 1u) != 0)) ? 1u : 0u;
  // A carry out of the mantissa becomes the next exponent by itself, also from subnormal to normal.
  if (!subnormal) code += static_cast<u32>(exponent - smallest) << f.mantissa_bits;
  return sign | (code > f.largest ? f.largest : code);
}

// The format to fp32 bits; exact.
CROSSDOCK_HOST_DEVICE constexpr u32 decode(Format f, u32 code) {
  const u32 sign = (code & f.sign_bit) != 0 ? 0x80000000u : 0u;
  const u32 magnitude = code & (f.sign_bit - 1);
  if (magnitude == f.infinity_from) return sign | kF32Infinity;
  if (magnitude > f.largest) return kF32Nan;
  u32 exponent = magnitude >> f.mantissa_bits;
  u32 mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  if (exponent == 0) {
    if (mantissa == 0) return sign;
    exponent = 1;
    while ((mantissa >> f.mantissa_bits) == 0) {
      mantissa <<= 1;
      --exponent;  // wraps below zero; the sum below is what counts
    }
    mantissa &= (1u << f.mantissa_bits) - 1;
  }
  return sign | (exponent + 127u - static_cast<u32>(f.bias)) << 23 |
         mantissa << (23 - f.mantissa_bits);
}

// bf16: the upper half of fp32, to nearest even; overflow goes to infinity as in the hardware.
CROSSDOCK_HOST_DEVICE constexpr u32 encode_bf16(u32 bits) {
  if ((bits & kF32Magnitude) > kF32Infinity) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// ue8m0: the smallest power of two that is not below the magnitude, as its biased exponent; 0 and
// what is below 2^-127 gives 0, what is above 2^127 gives 254, NaN gives 255.
CROSSDOCK_HOST_DEVICE constexpr u32 encode_ue8m0(u32 bits) {
  const u32 magnitude = bits & kF32Magnitude;
  if (magnitude > kF32Infinity) return 255;
  const u32 exponent = magnitude >> 23;
  // The subnormal 2^-127 is exact at exponent 0: only more than that rounds up to 2^-126.
  const u32 exact = exponent == 0 ? 0x400000u : exponent << 23;
  const u32 up = exponent + (magnitude > exact ? 1u : 0u);
  return up > 254 ? 254 : up;
}
CROSSDOCK_HOST_DEVICE constexpr u32 decode_ue8m0(u32 code) {
  return code == 255 ? kF32Nan : code == 0 ? 0x00400000u : code << 23;
}

}  // namespace crossdock::device::minifloat
