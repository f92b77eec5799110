// Reductions (`red_`, no result), atomics (`atom_`, the old value) and compare-and-swap (`cas_`) on
// global and symmetric memory, named by operation, order and scope. A release here publishes what
// its thread wrote, and what the thread had acquired, to whoever acquires the new value. Runs in
// any thread. `red_` never waits for the memory system; prefer it when the result is not needed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
#define CROSSDOCK_PTX_RED(name, type, reg, text, op, order, scope)      \
  CROSSDOCK_DEVICE void name(type* p, type v) {                         \
    asm volatile("red." text " [%0], %1;" ::"l"(p), reg(v) : "memory"); \
  }
#define CROSSDOCK_PTX_ATOM(name, type, reg, text, op, order, scope)                         \
  CROSSDOCK_DEVICE type name(type* p, type v) {                                             \
    type old;                                                                               \
    asm volatile("atom." text " %0, [%1], %2;" : "=" reg(old) : "l"(p), reg(v) : "memory"); \
    return old;                                                                             \
  }
#define CROSSDOCK_PTX_CAS(name, type, reg, text, order, scope)       \
  CROSSDOCK_DEVICE type name(type* p, type expected, type desired) { \
    type old;                                                        \
    asm volatile("atom." text " %0, [%1], %2, %3;"                   \
                 : "=" reg(old)                                      \
                 : "l"(p), reg(expected), reg(desired)               \
                 : "memory");                                        \
    return old;                                                      \
  }
#else
#define CROSSDOCK_PTX_ATOM(name, type, reg, text, op, order, scope)                         \
  CROSSDOCK_DEVICE type name(type* p, type v CROSSDOCK_SITE) {                              \
    return static_cast<type>(                                                               \
        twin::hooks::atomic(p, twin::hooks::Rmw::op, v, sizeof(type),                       \
                            {twin::hooks::Order::order, twin::hooks::Scope::scope}, site)); \
  }
#define CROSSDOCK_PTX_RED(name, type, reg, text, op, order, scope)                           \
  CROSSDOCK_DEVICE void name(type* p, type v CROSSDOCK_SITE) {                               \
    (void)twin::hooks::atomic(p, twin::hooks::Rmw::op, v, sizeof(type),                      \
                              {twin::hooks::Order::order, twin::hooks::Scope::scope}, site); \
  }
#define CROSSDOCK_PTX_CAS(name, type, reg, text, order, scope)                                    \
  CROSSDOCK_DEVICE type name(type* p, type expected, type desired CROSSDOCK_SITE) {               \
    return static_cast<type>(                                                                     \
        twin::hooks::compare_swap(p, {expected, desired}, sizeof(type),                           \
                                  {twin::hooks::Order::order, twin::hooks::Scope::scope}, site)); \
  }
#endif

// clang-format off
#define CROSSDOCK_PTX_ATOMICS(scope, kscope)                                                                               \
  CROSSDOCK_PTX_RED (red_add_relaxed_##scope,  u32, "r", "relaxed." #scope ".global.add.u32", kAdd, kRelaxed, kscope)       \
  CROSSDOCK_PTX_RED (red_add_relaxed_##scope,  u64, "l", "relaxed." #scope ".global.add.u64", kAdd, kRelaxed, kscope)       \
  CROSSDOCK_PTX_RED (red_add_release_##scope,  u32, "r", "release." #scope ".global.add.u32", kAdd, kRelease, kscope)       \
  CROSSDOCK_PTX_RED (red_add_release_##scope,  u64, "l", "release." #scope ".global.add.u64", kAdd, kRelease, kscope)       \
  CROSSDOCK_PTX_RED (red_or_relaxed_##scope,   u32, "r", "relaxed." #scope ".global.or.b32",  kOr,  kRelaxed, kscope)       \
  CROSSDOCK_PTX_RED (red_or_release_##scope,   u32, "r", "release." #scope ".global.or.b32",  kOr,  kRelease, kscope)       \
  CROSSDOCK_PTX_RED (red_and_relaxed_##scope,  u32, "r", "relaxed." #scope ".global.and.b32", kAnd, kRelaxed, kscope)       \
  CROSSDOCK_PTX_RED (red_max_relaxed_##scope,  u32, "r", "relaxed." #scope ".global.max.u32", kMax, kRelaxed, kscope)       \
  CROSSDOCK_PTX_ATOM(atom_add_relaxed_##scope, u32, "r", "relaxed." #scope ".global.add.u32", kAdd, kRelaxed, kscope)       \
  CROSSDOCK_PTX_ATOM(atom_add_relaxed_##scope, u64, "l", "relaxed." #scope ".global.add.u64", kAdd, kRelaxed, kscope)       \
  CROSSDOCK_PTX_ATOM(atom_add_acquire_##scope, u32, "r", "acquire." #scope ".global.add.u32", kAdd, kAcquire, kscope)       \
  CROSSDOCK_PTX_ATOM(atom_add_release_##scope, u32, "r", "release." #scope ".global.add.u32", kAdd, kRelease, kscope)       \
  CROSSDOCK_PTX_ATOM(atom_add_acq_rel_##scope, u32, "r", "acq_rel." #scope ".global.add.u32", kAdd, kAcqRel,  kscope)       \
  CROSSDOCK_PTX_ATOM(atom_add_acq_rel_##scope, u64, "l", "acq_rel." #scope ".global.add.u64", kAdd, kAcqRel,  kscope)       \
  CROSSDOCK_PTX_ATOM(atom_or_relaxed_##scope,  u32, "r", "relaxed." #scope ".global.or.b32",  kOr,  kRelaxed, kscope)       \
  CROSSDOCK_PTX_ATOM(atom_or_acq_rel_##scope,  u32, "r", "acq_rel." #scope ".global.or.b32",  kOr,  kAcqRel,  kscope)       \
  CROSSDOCK_PTX_ATOM(atom_exch_relaxed_##scope, u32, "r", "relaxed." #scope ".global.exch.b32", kExchange, kRelaxed, kscope) \
  CROSSDOCK_PTX_ATOM(atom_exch_acq_rel_##scope, u32, "r", "acq_rel." #scope ".global.exch.b32", kExchange, kAcqRel,  kscope) \
  CROSSDOCK_PTX_ATOM(atom_exch_acq_rel_##scope, u64, "l", "acq_rel." #scope ".global.exch.b64", kExchange, kAcqRel,  kscope) \
  CROSSDOCK_PTX_CAS (cas_relaxed_##scope, u32, "r", "relaxed." #scope ".global.cas.b32", kRelaxed, kscope)                  \
  CROSSDOCK_PTX_CAS (cas_relaxed_##scope, u64, "l", "relaxed." #scope ".global.cas.b64", kRelaxed, kscope)                  \
  CROSSDOCK_PTX_CAS (cas_acquire_##scope, u32, "r", "acquire." #scope ".global.cas.b32", kAcquire, kscope)                  \
  CROSSDOCK_PTX_CAS (cas_release_##scope, u32, "r", "release." #scope ".global.cas.b32", kRelease, kscope)                  \
  CROSSDOCK_PTX_CAS (cas_acq_rel_##scope, u32, "r", "acq_rel." #scope ".global.cas.b32", kAcqRel,  kscope)                  \
  CROSSDOCK_PTX_CAS (cas_acq_rel_##scope, u64, "l", "acq_rel." #scope ".global.cas.b64", kAcqRel,  kscope)
CROSSDOCK_PTX_ATOMICS(cta, kCta)
CROSSDOCK_PTX_ATOMICS(gpu, kGpu)
CROSSDOCK_PTX_ATOMICS(sys, kSys)
#undef CROSSDOCK_PTX_ATOMICS
// clang-format on

#undef CROSSDOCK_PTX_RED
#undef CROSSDOCK_PTX_ATOM
#undef CROSSDOCK_PTX_CAS

// Shared memory, among the threads of the block; a barrier makes the sums readable.
#if CROSSDOCK_ON_GPU
CROSSDOCK_DEVICE void red_add_shared(u32* p, u32 v) {
  asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(
                   static_cast<u32>(__cvta_generic_to_shared(p))),
               "r"(v)
               : "memory");
}
#else
CROSSDOCK_DEVICE void red_add_shared(u32* p, u32 v CROSSDOCK_SITE) {
  (void)twin::hooks::atomic(p, twin::hooks::Rmw::kAdd, v, sizeof(u32),
                            {twin::hooks::Order::kRelaxed, twin::hooks::Scope::kCta}, site);
}
#endif

// Floating-point sums. Each 4-byte element is atomic by itself; the order of the additions, and so
// the last bit of a float sum, depends on the run.
#if CROSSDOCK_ON_GPU
CROSSDOCK_DEVICE void red_add_relaxed_gpu(float* p, float v) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}
CROSSDOCK_DEVICE void red_add_relaxed_gpu(F32x4* p, F32x4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
// Four pairs of bf16.
CROSSDOCK_DEVICE void red_add_bf16_relaxed_gpu(U32x4* p, U32x4 v) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(p),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
#else
inline constexpr twin::hooks::Access kRelaxedGpuAccess{twin::hooks::Order::kRelaxed,
                                                       twin::hooks::Scope::kGpu};
CROSSDOCK_DEVICE void red_add_relaxed_gpu(float* p, float v CROSSDOCK_SITE) {
  (void)twin::hooks::atomic(p, twin::hooks::Rmw::kAddF32, bit_cast<u32>(v), 4, kRelaxedGpuAccess,
                            site);
}
CROSSDOCK_DEVICE void red_add_relaxed_gpu(F32x4* p, F32x4 v CROSSDOCK_SITE) {
  twin::hooks::reduce_vector(p, twin::hooks::Rmw::kAddF32, &v, 4, kRelaxedGpuAccess, site);
}
CROSSDOCK_DEVICE void red_add_bf16_relaxed_gpu(U32x4* p, U32x4 v CROSSDOCK_SITE) {
  twin::hooks::reduce_vector(p, twin::hooks::Rmw::kAddBf16x2, &v, 4, kRelaxedGpuAccess, site);
}
#endif

}  // namespace crossdock::device::ptx
