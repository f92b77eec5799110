// Warpgroup matrix multiply: D[64][n] (+)= A[64][k] * B[n][k]^T with fp32 accumulators, k = 16 bf16
// or 32 e4m3 elements. A and B lie in shared memory (descriptor.cuh), or A in registers. All 128
// threads of a warpgroup call it together. n is n / 2 = the size of the accumulator array: 8, 16,
// 32, 64, 96, 128, 192 or 256.
//
//   wgmma_fence();                        registers written before are ready
//   wgmma_e4m3(d, a, b, k != 0); ...      asynchronous: d, A and B are in use from here
//   wgmma_commit();
//   wgmma_wait<0>(d);                     d may be read, A and B overwritten
//
// Thread t of the warpgroup holds, for register i: row 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 %
// 2), column i / 4 * 8 + t % 4 * 2 + i % 2. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/descriptor.cuh>

namespace crossdock::device::ptx {

CROSSDOCK_HOST_DEVICE constexpr u32 accumulator_row(u32 thread, u32 i) {
  return 16 * (thread / 32) + thread % 32 / 4 + 8 * (i / 2 % 2);
}
CROSSDOCK_HOST_DEVICE constexpr u32 accumulator_column(u32 thread, u32 i) {
  return i / 4 * 8 + thread % 4 * 2 + i % 2;
}

}  // namespace crossdock::device::ptx

#if CROSSDOCK_ON_GPU
#include <crossdock/ptx/wgmma_operands.cuh>

namespace crossdock::device::ptx {

CROSSDOCK_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
CROSSDOCK_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <u32 kPending>
CROSSDOCK_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of `d` across this place.
template <u32 kRegisters>
CROSSDOCK_DEVICE void pin_accumulators(float (&d)[kRegisters]) {
  CROSSDOCK_UNROLL
  for (u32 i = 0; i < kRegisters; ++i)
    asm volatile("" : "+f"(d[i])::"memory");
}
// The same for values that are made from accumulators before these are used again.
template <u32 kCount>
CROSSDOCK_DEVICE void pin_registers(u32 (&r)[kCount]) {
  CROSSDOCK_UNROLL
  for (u32 i = 0; i < kCount; ++i)
    asm volatile("" : "+r"(r[i])::"memory");
}
// `value`, as if it were not known: what is made of it is computed here and not kept in registers
// from before.
CROSSDOCK_DEVICE u32 forgotten(u32 value) {
  asm volatile("" : "+r"(value)::"memory");
  return value;
}
// The same for a value that may be computed wherever it suits.
CROSSDOCK_DEVICE u32 opaque(u32 value) {
  asm("" : "+r"(value));
  return value;
}

// Operand lists of 4, 8, ... accumulators from index i on.
#define CROSSDOCK_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CROSSDOCK_D8(d, i) CROSSDOCK_D4(d, i), CROSSDOCK_D4(d, i + 4)
#define CROSSDOCK_D16(d, i) CROSSDOCK_D8(d, i), CROSSDOCK_D8(d, i + 8)
#define CROSSDOCK_D32(d, i) CROSSDOCK_D16(d, i), CROSSDOCK_D16(d, i + 16)
#define CROSSDOCK_D48(d, i) CROSSDOCK_D32(d, i), CROSSDOCK_D16(d, i + 32)
#define CROSSDOCK_D64(d, i) CROSSDOCK_D32(d, i), CROSSDOCK_D32(d, i + 32)
#define CROSSDOCK_D96(d, i) CROSSDOCK_D64(d, i), CROSSDOCK_D32(d, i + 64)
#define CROSSDOCK_D128(d, i) CROSSDOCK_D64(d, i), CROSSDOCK_D64(d, i + 64)

// The three instructions for one n with r = n / 2 registers.
#define CROSSDOCK_PTX_WGMMA(n, r)                                                                  \
  template <bool kTransposeA = false, bool kTransposeB = false>                                    \
  CROSSDOCK_DEVICE void wgmma_bf16(float(&d)[r], u64 a, u64 b, bool accumulate) {                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " CROSSDOCK_WGMMA_SCALE_SS_##r                  \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n                                            \
                 "k16.f32.bf16.bf16 " CROSSDOCK_WGMMA_SS_##r ";\n}"                                \
                 : CROSSDOCK_D##r(d, 0)                                                            \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)),                              \
                   "n"(static_cast<int>(kTransposeA)), "n"(static_cast<int>(kTransposeB))          \
                 : "memory");                                                                      \
  }                                                                                                \
  template <bool kTransposeB = false>                                                              \
  CROSSDOCK_DEVICE void wgmma_bf16(float(&d)[r], const u32(&a)[4], u64 b, bool accumulate) {       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " CROSSDOCK_WGMMA_SCALE_RS_##r                  \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n                                            \
                 "k16.f32.bf16.bf16 " CROSSDOCK_WGMMA_RS_##r ";\n}"                                \
                 : CROSSDOCK_D##r(d, 0)                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                             \
                   "r"(static_cast<u32>(accumulate)), "n"(static_cast<int>(kTransposeB))           \
                 : "memory");                                                                      \
  }                                                                                                \
  CROSSDOCK_DEVICE void wgmma_e4m3(float(&d)[r], u64 a, u64 b, bool accumulate) {                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " CROSSDOCK_WGMMA_SCALE_SS_##r                  \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n                                            \
                 "k32.f32.e4m3.e4m3 " CROSSDOCK_WGMMA_SS8_##r ";\n}"                               \
                 : CROSSDOCK_D##r(d, 0)                                                            \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate))                               \
                 : "memory");                                                                      \
  }                                                                                                \
  CROSSDOCK_DEVICE void wgmma_e4m3(float(&d)[r], const u32(&a)[4], u64 b, bool accumulate) {       \
    asm volatile(                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " CROSSDOCK_WGMMA_SCALE_RS_##r                           \
        ", 0;\n"                                                                                   \
        "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 " CROSSDOCK_WGMMA_RS8_##r ";\n}" \
        : CROSSDOCK_D##r(d, 0)                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(accumulate))    \
        : "memory");                                                                               \
  }
CROSSDOCK_PTX_WGMMA(8, 4)
CROSSDOCK_PTX_WGMMA(16, 8)
CROSSDOCK_PTX_WGMMA(32, 16)
CROSSDOCK_PTX_WGMMA(64, 32)
CROSSDOCK_PTX_WGMMA(96, 48)
CROSSDOCK_PTX_WGMMA(128, 64)
CROSSDOCK_PTX_WGMMA(192, 96)
CROSSDOCK_PTX_WGMMA(256, 128)
#undef CROSSDOCK_PTX_WGMMA
#undef CROSSDOCK_D4
#undef CROSSDOCK_D8
#undef CROSSDOCK_D16
#undef CROSSDOCK_D32
#undef CROSSDOCK_D48
#undef CROSSDOCK_D64
#undef CROSSDOCK_D96
#undef CROSSDOCK_D128

template <u32 kPending, u32 kRegisters>
CROSSDOCK_DEVICE void wgmma_wait(float (&d)[kRegisters]) {
  wgmma_wait<kPending>();
  pin_accumulators(d);
}

}  // namespace crossdock::device::ptx
#else
namespace crossdock::device::ptx {

CROSSDOCK_DEVICE void wgmma_fence(CROSSDOCK_SITE_ONLY) {
  twin::hooks::wgmma_fence(site);
}
CROSSDOCK_DEVICE void wgmma_commit(CROSSDOCK_SITE_ONLY) {
  twin::hooks::wgmma_commit(site);
}
template <u32 kPending>
CROSSDOCK_DEVICE void wgmma_wait(CROSSDOCK_SITE_ONLY) {
  twin::hooks::wgmma_wait(kPending, site);
}
template <u32 kPending, std::size_t kRegisters>
CROSSDOCK_DEVICE void wgmma_wait(float (&)[kRegisters] CROSSDOCK_SITE) {
  twin::hooks::wgmma_wait(kPending, site);
}
template <std::size_t kRegisters>
CROSSDOCK_DEVICE void pin_accumulators(float (&)[kRegisters]) {}
template <std::size_t kCount>
CROSSDOCK_DEVICE void pin_registers(u32 (&)[kCount]) {}
CROSSDOCK_DEVICE u32 forgotten(u32 value) {
  return value;
}
CROSSDOCK_DEVICE u32 opaque(u32 value) {
  return value;
}

template <std::size_t kRegisters>
constexpr bool wgmma_width_exists() {
  return kRegisters == 4 || kRegisters == 8 || kRegisters == 16 || kRegisters == 32 ||
         kRegisters == 48 || kRegisters == 64 || kRegisters == 96 || kRegisters == 128;
}
template <bool kTransposeA = false, bool kTransposeB = false, std::size_t kRegisters>
CROSSDOCK_DEVICE void wgmma_bf16(float (&d)[kRegisters], u64 a, u64 b,
                                 bool accumulate CROSSDOCK_SITE) {
  static_assert(wgmma_width_exists<kRegisters>());
  twin::hooks::Wgmma op{2 * kRegisters, twin::hooks::Element::kBf16, twin::hooks::Element::kBf16,
                        accumulate};
  op.transpose_a = kTransposeA;
  op.transpose_b = kTransposeB;
  twin::hooks::wgmma_ss(d, a, b, op, site);
}
template <bool kTransposeB = false, std::size_t kRegisters>
CROSSDOCK_DEVICE void wgmma_bf16(float (&d)[kRegisters], const u32 (&a)[4], u64 b,
                                 bool accumulate CROSSDOCK_SITE) {
  static_assert(wgmma_width_exists<kRegisters>());
  twin::hooks::Wgmma op{2 * kRegisters, twin::hooks::Element::kBf16, twin::hooks::Element::kBf16,
                        accumulate};
  op.transpose_b = kTransposeB;
  twin::hooks::wgmma_rs(d, a, b, op, site);
}
template <std::size_t kRegisters>
CROSSDOCK_DEVICE void wgmma_e4m3(float (&d)[kRegisters], u64 a, u64 b,
                                 bool accumulate CROSSDOCK_SITE) {
  static_assert(wgmma_width_exists<kRegisters>());
  twin::hooks::wgmma_ss(
      d, a, b,
      {2 * kRegisters, twin::hooks::Element::kE4m3, twin::hooks::Element::kE4m3, accumulate}, site);
}
template <std::size_t kRegisters>
CROSSDOCK_DEVICE void wgmma_e4m3(float (&d)[kRegisters], const u32 (&a)[4], u64 b,
                                 bool accumulate CROSSDOCK_SITE) {
  static_assert(wgmma_width_exists<kRegisters>());
  twin::hooks::wgmma_rs(
      d, a, b,
      {2 * kRegisters, twin::hooks::Element::kE4m3, twin::hooks::Element::kE4m3, accumulate}, site);
}

}  // namespace crossdock::device::ptx
#endif
