// Conversions between fp32 and the narrow formats, two values at a time as the hardware has them.
// `lo` is the value in the lower bits. The GPU's instruction where there is one, minifloat.cuh
// elsewhere; both give the same bits. Also the few approximate functions kernels need: those differ
// in the last bits between GPU and host. Pure functions, any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/minifloat.cuh>

namespace crossdock::device::ptx {

struct F32x2 {
  float lo, hi;
};

// ---- formats without an instruction on every GPU ----------------------------------------------

// e2m1: two values in one byte; saturates at 6. NaN becomes 6.
CROSSDOCK_DEVICE u32 e2m1x2_from_f32(float lo, float hi) {
#if CROSSDOCK_ON_GPU && defined(__CUDA_ARCH_FEAT_SM100_ALL)
  u32 out;
  asm("{\n.reg .b8 b;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %1, %2;\n"
      "cvt.u32.u8 %0, b;\n}"
      : "=r"(out)
      : "f"(hi), "f"(lo));
  return out;
#else
  return minifloat::encode(minifloat::kE2m1, bit_cast<u32>(lo)) |
         minifloat::encode(minifloat::kE2m1, bit_cast<u32>(hi)) << 4;
#endif
}
CROSSDOCK_DEVICE F32x2 f32_from_e2m1x2(u32 packed) {
  return {bit_cast<float>(minifloat::decode(minifloat::kE2m1, packed & 0xfu)),
          bit_cast<float>(minifloat::decode(minifloat::kE2m1, (packed >> 4) & 0xfu))};
}
// ue8m0: the scale that is not below `magnitude`.
CROSSDOCK_DEVICE u32 ue8m0_from_f32(float magnitude) {
  return minifloat::encode_ue8m0(bit_cast<u32>(magnitude));
}
CROSSDOCK_DEVICE float f32_from_ue8m0(u32 code) {
  return bit_cast<float>(minifloat::decode_ue8m0(code));
}
// bf16 to fp32 is a shift.
CROSSDOCK_DEVICE F32x2 f32_from_bf16x2(u32 packed) {
  return {bit_cast<float>(packed << 16), bit_cast<float>(packed & 0xffff0000u)};
}

// Four of the eight bytes of `a` and, above, `b`: of each nibble of the selector's lower half, the
// lower three bits say which; the fourth is 0.
CROSSDOCK_DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
#if CROSSDOCK_ON_GPU
  u32 out;  // not __byte_perm(), which clears the fourth bits once more
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
#else
  const u64 bytes = u64{b} << 32 | a;
  u32 out = 0;
  for (u32 i = 0; i < 4; ++i)
    out |= static_cast<u32>(bytes >> (selector >> (4 * i) & 7u) * 8 & 0xffu) << (8 * i);
  return out;
#endif
}

// ---- formats with an instruction --------------------------------------------------------------

#if CROSSDOCK_ON_GPU
CROSSDOCK_DEVICE u32 e4m3x2_from_f32(float lo, float hi) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(hi), "f"(lo));
  return out;
}
CROSSDOCK_DEVICE u32 e5m2x2_from_f32(float lo, float hi) {
  u16 out;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(hi), "f"(lo));
  return out;
}
CROSSDOCK_DEVICE F32x2 f32_from_f16x2(u32 packed) {
  F32x2 out;
  asm("{\n.reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.f32.f16 %0, l;\n"
      "cvt.f32.f16 %1, h;\n}"
      : "=f"(out.lo), "=f"(out.hi)
      : "r"(packed));
  return out;
}
CROSSDOCK_DEVICE F32x2 f32_from_e4m3x2(u32 packed) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(packed)));
  return f32_from_f16x2(halves);
}
CROSSDOCK_DEVICE F32x2 f32_from_e5m2x2(u32 packed) {
  u32 halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(packed)));
  return f32_from_f16x2(halves);
}
CROSSDOCK_DEVICE u32 bf16x2_from_f32(float lo, float hi) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  return out;
}
// The larger of each pair; NaN loses against a number.
CROSSDOCK_DEVICE u32 max_bf16x2(u32 a, u32 b) {
  u32 out;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Of each pair the larger magnitude, under some sign; NaN loses against a number.
CROSSDOCK_DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
  u32 out;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
CROSSDOCK_DEVICE float exp2_approximate(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
// Not approximate: within 2 units of the last place.
CROSSDOCK_DEVICE float exponential(float x) {
  return expf(x);
}
CROSSDOCK_DEVICE float reciprocal_approximate(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
CROSSDOCK_DEVICE float fused_multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
#else
CROSSDOCK_DEVICE u32 pack_minifloat(minifloat::Format f, float lo, float hi) {
  return minifloat::encode(f, bit_cast<u32>(lo)) | minifloat::encode(f, bit_cast<u32>(hi)) << 8;
}
CROSSDOCK_DEVICE F32x2 unpack_minifloat(minifloat::Format f, u32 packed) {
  return {bit_cast<float>(minifloat::decode(f, packed & 0xffu)),
          bit_cast<float>(minifloat::decode(f, (packed >> 8) & 0xffu))};
}
CROSSDOCK_DEVICE u32 e4m3x2_from_f32(float lo, float hi) {
  return pack_minifloat(minifloat::kE4m3, lo, hi);
}
CROSSDOCK_DEVICE u32 e5m2x2_from_f32(float lo, float hi) {
  return pack_minifloat(minifloat::kE5m2, lo, hi);
}
CROSSDOCK_DEVICE F32x2 f32_from_e4m3x2(u32 packed) {
  return unpack_minifloat(minifloat::kE4m3, packed);
}
CROSSDOCK_DEVICE F32x2 f32_from_e5m2x2(u32 packed) {
  return unpack_minifloat(minifloat::kE5m2, packed);
}
CROSSDOCK_DEVICE u32 bf16x2_from_f32(float lo, float hi) {
  return minifloat::encode_bf16(bit_cast<u32>(lo)) | minifloat::encode_bf16(bit_cast<u32>(hi))
                                                         << 16;
}
CROSSDOCK_DEVICE u32 max_bf16(u32 a, u32 b) {
  constexpr u32 kInfinity = 0x7f80;
  const bool a_nan = (a & 0x7fffu) > kInfinity;
  const bool b_nan = (b & 0x7fffu) > kInfinity;
  if (a_nan) return b_nan ? 0x7fffu : b;
  if (b_nan) return a;
  // Ordered as sign and magnitude: +0 is above -0.
  const auto key = [](u32 v) { return (v & 0x8000u) != 0 ? ~v & 0xffffu : v | 0x8000u; };
  return key(a) < key(b) ? b : a;
}
CROSSDOCK_DEVICE u32 max_bf16x2(u32 a, u32 b) {
  return max_bf16(a & 0xffffu, b & 0xffffu) | max_bf16(a >> 16, b >> 16) << 16;
}
CROSSDOCK_DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
  return max_bf16x2(a & 0x7fff7fffu, b & 0x7fff7fffu) | ((a ^ b) & 0x80008000u);
}
CROSSDOCK_DEVICE float exp2_approximate(float x) {
  return __builtin_exp2f(x);
}
CROSSDOCK_DEVICE float exponential(float x) {
  return __builtin_expf(x);
}
CROSSDOCK_DEVICE float reciprocal_approximate(float x) {
  return 1.0f / x;
}
CROSSDOCK_DEVICE float fused_multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
#endif

}  // namespace crossdock::device::ptx
