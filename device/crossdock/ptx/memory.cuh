// Loads and stores, named by order and scope. Global and symmetric memory is accessed through these
// functions only; `_weak` is an ordinary access that other threads may see late, torn and in any
// order until a release and an acquire order it; `_relaxed` is a single strong access; `_acquire`
// and `_release` pair with each other (also with the `red_`, `atom_` and `cas_` of atomic.cuh).
// Scope is the set of observers: the block (cta), the device (gpu), every rank and the host (sys).
// Shared memory: plain C++ accesses, or the `_shared` forms where the compiler must not guess the
// address space. Runs in any thread; must not be used on data that the async proxy reads without
// `fence_proxy_async` (fence.cuh).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
#define CROSSDOCK_PTX_LOAD(name, type, reg, text, order, scope)       \
  CROSSDOCK_DEVICE type name(const type* p) {                         \
    type v;                                                           \
    asm volatile(text " %0, [%1];" : "=" reg(v) : "l"(p) : "memory"); \
    return v;                                                         \
  }
#define CROSSDOCK_PTX_LOAD2(name, type, reg, text, order, scope)                            \
  CROSSDOCK_DEVICE type name(const type* p) {                                               \
    type v;                                                                                 \
    asm volatile(text " {%0, %1}, [%2];" : "=" reg(v.x), "=" reg(v.y) : "l"(p) : "memory"); \
    return v;                                                                               \
  }
#define CROSSDOCK_PTX_LOAD4(name, type, reg, text, order, scope)          \
  CROSSDOCK_DEVICE type name(const type* p) {                             \
    type v;                                                               \
    asm volatile(text " {%0, %1, %2, %3}, [%4];"                          \
                 : "=" reg(v.x), "=" reg(v.y), "=" reg(v.z), "=" reg(v.w) \
                 : "l"(p)                                                 \
                 : "memory");                                             \
    return v;                                                             \
  }
#define CROSSDOCK_PTX_STORE(name, type, reg, text, order, scope) \
  CROSSDOCK_DEVICE void name(type* p, type v) {                  \
    asm volatile(text " [%0], %1;" ::"l"(p), reg(v) : "memory"); \
  }
#define CROSSDOCK_PTX_STORE2(name, type, reg, text, order, scope)                  \
  CROSSDOCK_DEVICE void name(type* p, type v) {                                    \
    asm volatile(text " [%0], {%1, %2};" ::"l"(p), reg(v.x), reg(v.y) : "memory"); \
  }
#define CROSSDOCK_PTX_STORE4(name, type, reg, text, order, scope)                                 \
  CROSSDOCK_DEVICE void name(type* p, type v) {                                                   \
    asm volatile(text " [%0], {%1, %2, %3, %4};" ::"l"(p), reg(v.x), reg(v.y), reg(v.z), reg(v.w) \
                 : "memory");                                                                     \
  }
#else
#define CROSSDOCK_PTX_LOAD(name, type, reg, text, order, scope)                                   \
  CROSSDOCK_DEVICE type name(const type* p CROSSDOCK_SITE) {                                      \
    return twin::hooks::load_as(p, {twin::hooks::Order::order, twin::hooks::Scope::scope}, site); \
  }
#define CROSSDOCK_PTX_STORE(name, type, reg, text, order, scope)                               \
  CROSSDOCK_DEVICE void name(type* p, type v CROSSDOCK_SITE) {                                 \
    twin::hooks::store_as(p, v, {twin::hooks::Order::order, twin::hooks::Scope::scope}, site); \
  }
#define CROSSDOCK_PTX_LOAD2 CROSSDOCK_PTX_LOAD
#define CROSSDOCK_PTX_LOAD4 CROSSDOCK_PTX_LOAD
#define CROSSDOCK_PTX_STORE2 CROSSDOCK_PTX_STORE
#define CROSSDOCK_PTX_STORE4 CROSSDOCK_PTX_STORE
#endif

// clang-format off
// Weak: ordinary accesses.
CROSSDOCK_PTX_LOAD (ld_weak, u16,   "h", "ld.global.u16",    kWeak, kCta)
CROSSDOCK_PTX_LOAD (ld_weak, u32,   "r", "ld.global.u32",    kWeak, kCta)
CROSSDOCK_PTX_LOAD (ld_weak, i32,   "r", "ld.global.s32",    kWeak, kCta)
CROSSDOCK_PTX_LOAD (ld_weak, u64,   "l", "ld.global.u64",    kWeak, kCta)
CROSSDOCK_PTX_LOAD (ld_weak, float, "f", "ld.global.f32",    kWeak, kCta)
CROSSDOCK_PTX_LOAD2(ld_weak, U32x2, "r", "ld.global.v2.u32", kWeak, kCta)
CROSSDOCK_PTX_LOAD4(ld_weak, U32x4, "r", "ld.global.v4.u32", kWeak, kCta)
CROSSDOCK_PTX_LOAD4(ld_weak, F32x4, "f", "ld.global.v4.f32", kWeak, kCta)
CROSSDOCK_PTX_STORE (st_weak, u16,   "h", "st.global.u16",    kWeak, kCta)
CROSSDOCK_PTX_STORE (st_weak, u32,   "r", "st.global.u32",    kWeak, kCta)
CROSSDOCK_PTX_STORE (st_weak, i32,   "r", "st.global.s32",    kWeak, kCta)
CROSSDOCK_PTX_STORE (st_weak, u64,   "l", "st.global.u64",    kWeak, kCta)
CROSSDOCK_PTX_STORE (st_weak, float, "f", "st.global.f32",    kWeak, kCta)
CROSSDOCK_PTX_STORE2(st_weak, U32x2, "r", "st.global.v2.u32", kWeak, kCta)
CROSSDOCK_PTX_STORE4(st_weak, U32x4, "r", "st.global.v4.u32", kWeak, kCta)
CROSSDOCK_PTX_STORE4(st_weak, F32x4, "f", "st.global.v4.f32", kWeak, kCta)

// Read-only for the whole kernel; `_no_allocate` leaves L1 to data that is read again.
CROSSDOCK_PTX_LOAD (ld_nc, u32,   "r", "ld.global.nc.u32",    kNonCoherent, kCta)
CROSSDOCK_PTX_LOAD (ld_nc, i32,   "r", "ld.global.nc.s32",    kNonCoherent, kCta)
CROSSDOCK_PTX_LOAD (ld_nc, u64,   "l", "ld.global.nc.u64",    kNonCoherent, kCta)
CROSSDOCK_PTX_LOAD (ld_nc, float, "f", "ld.global.nc.f32",    kNonCoherent, kCta)
CROSSDOCK_PTX_LOAD4(ld_nc, U32x4, "r", "ld.global.nc.v4.u32", kNonCoherent, kCta)
CROSSDOCK_PTX_LOAD (ld_nc_no_allocate, u32,   "r", "ld.global.nc.L1::no_allocate.u32",    kNonCoherent, kCta)
CROSSDOCK_PTX_LOAD4(ld_nc_no_allocate, U32x4, "r", "ld.global.nc.L1::no_allocate.v4.u32", kNonCoherent, kCta)
CROSSDOCK_PTX_LOAD4(ld_weak_no_allocate, U32x4, "r", "ld.global.L1::no_allocate.v4.u32",  kWeak, kCta)
CROSSDOCK_PTX_STORE4(st_weak_no_allocate, U32x4, "r", "st.global.L1::no_allocate.v4.u32", kWeak, kCta)

// Strong accesses.
#define CROSSDOCK_PTX_STRONG(scope, kscope)                                                              \
  CROSSDOCK_PTX_LOAD (ld_relaxed_##scope, u32, "r", "ld.relaxed." #scope ".global.u32", kRelaxed, kscope) \
  CROSSDOCK_PTX_LOAD (ld_relaxed_##scope, u64, "l", "ld.relaxed." #scope ".global.u64", kRelaxed, kscope) \
  CROSSDOCK_PTX_LOAD (ld_acquire_##scope, u32, "r", "ld.acquire." #scope ".global.u32", kAcquire, kscope) \
  CROSSDOCK_PTX_LOAD (ld_acquire_##scope, u64, "l", "ld.acquire." #scope ".global.u64", kAcquire, kscope) \
  CROSSDOCK_PTX_STORE(st_relaxed_##scope, u32, "r", "st.relaxed." #scope ".global.u32", kRelaxed, kscope) \
  CROSSDOCK_PTX_STORE(st_relaxed_##scope, u64, "l", "st.relaxed." #scope ".global.u64", kRelaxed, kscope) \
  CROSSDOCK_PTX_STORE(st_release_##scope, u32, "r", "st.release." #scope ".global.u32", kRelease, kscope) \
  CROSSDOCK_PTX_STORE(st_release_##scope, u64, "l", "st.release." #scope ".global.u64", kRelease, kscope)
CROSSDOCK_PTX_STRONG(cta, kCta)
CROSSDOCK_PTX_STRONG(gpu, kGpu)
CROSSDOCK_PTX_STRONG(sys, kSys)
#undef CROSSDOCK_PTX_STRONG
// clang-format on

// Two strong accesses of 8 bytes by one instruction: each is whole by itself, and whoever reads
// them may see the one without the other. GPUs do show 16 bytes apart.
struct alignas(16) U64x2 {
  u64 x, y;
};
CROSSDOCK_PTX_LOAD2(ld_relaxed_sys, U64x2, "l", "ld.relaxed.sys.global.v2.u64", kRelaxed, kSys)
CROSSDOCK_PTX_STORE2(st_relaxed_sys, U64x2, "l", "st.relaxed.sys.global.v2.u64", kRelaxed, kSys)

#undef CROSSDOCK_PTX_LOAD
#undef CROSSDOCK_PTX_LOAD2
#undef CROSSDOCK_PTX_LOAD4
#undef CROSSDOCK_PTX_STORE
#undef CROSSDOCK_PTX_STORE2
#undef CROSSDOCK_PTX_STORE4

// L2 replacement hints. A policy is made once by a thread and passed to the `_hint` forms here and
// in bulk.cuh; it changes speed only, never a value.
struct CachePolicy {
  u64 bits;
};

#if CROSSDOCK_ON_GPU
CROSSDOCK_DEVICE CachePolicy evict_first_policy() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}
CROSSDOCK_DEVICE CachePolicy evict_last_policy() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}
// ld_nc into `v` where `condition` holds; nothing waits for it until `v` is used.
CROSSDOCK_DEVICE void ld_nc_if(float& v, const float* p, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p ld.global.nc.f32 %0, [%1];\n}"
      : "+f"(v)
      : "l"(p), "r"(static_cast<u32>(condition))
      : "memory");
}
CROSSDOCK_DEVICE void ld_nc_if(u32& v, const u8* p, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p ld.global.nc.u8 %0, [%1];\n}"
      : "+r"(v)
      : "l"(p), "r"(static_cast<u32>(condition))
      : "memory");
}
CROSSDOCK_DEVICE void st_weak(u8* p, u8 v) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(u32{v}) : "memory");
}
CROSSDOCK_DEVICE U32x4 ld_nc_hint(const U32x4* p, CachePolicy policy) {
  U32x4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(policy.bits)
               : "memory");
  return v;
}
CROSSDOCK_DEVICE void st_weak_hint(U32x4* p, U32x4 v, CachePolicy policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy.bits)
               : "memory");
}
// Asks for the line that holds `p`; nothing waits for it.
CROSSDOCK_DEVICE void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

CROSSDOCK_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
CROSSDOCK_DEVICE u32 ld_shared(const u32* p) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
CROSSDOCK_DEVICE float ld_shared(const float* p) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
CROSSDOCK_DEVICE U32x2 ld_shared(const U32x2* p) {
  U32x2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "r"(shared_address(p))
               : "memory");
  return v;
}
CROSSDOCK_DEVICE U32x4 ld_shared(const U32x4* p) {
  U32x4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(p))
               : "memory");
  return v;
}
CROSSDOCK_DEVICE void st_shared(u32* p, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}
CROSSDOCK_DEVICE void st_shared(float* p, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared_address(p)), "f"(v) : "memory");
}
CROSSDOCK_DEVICE void st_shared(U32x2* p, U32x2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared_address(p)), "r"(v.x), "r"(v.y)
               : "memory");
}
CROSSDOCK_DEVICE void st_shared(U32x4* p, U32x4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
#else
inline constexpr twin::hooks::Access kWeakAccess{twin::hooks::Order::kWeak,
                                                 twin::hooks::Scope::kCta};
inline constexpr twin::hooks::Access kNonCoherentAccess{twin::hooks::Order::kNonCoherent,
                                                        twin::hooks::Scope::kCta};

CROSSDOCK_DEVICE CachePolicy evict_first_policy() {
  return {1};
}
CROSSDOCK_DEVICE CachePolicy evict_last_policy() {
  return {2};
}
CROSSDOCK_DEVICE void ld_nc_if(float& v, const float* p, bool condition CROSSDOCK_SITE) {
  if (condition) v = twin::hooks::load_as(p, kNonCoherentAccess, site);
}
CROSSDOCK_DEVICE void ld_nc_if(u32& v, const u8* p, bool condition CROSSDOCK_SITE) {
  if (condition) v = twin::hooks::load_as(p, kNonCoherentAccess, site);
}
CROSSDOCK_DEVICE void st_weak(u8* p, u8 v CROSSDOCK_SITE) {
  twin::hooks::store_as(p, v, kWeakAccess, site);
}
CROSSDOCK_DEVICE U32x4 ld_nc_hint(const U32x4* p, CachePolicy CROSSDOCK_SITE) {
  return twin::hooks::load_as(p, kNonCoherentAccess, site);
}
CROSSDOCK_DEVICE void st_weak_hint(U32x4* p, U32x4 v, CachePolicy CROSSDOCK_SITE) {
  twin::hooks::store_as(p, v, kWeakAccess, site);
}
CROSSDOCK_DEVICE void prefetch_l2(const void*) {}

CROSSDOCK_DEVICE u32 shared_address(const void* p) {
  return twin::hooks::shared_address(p);
}
template <class T>
CROSSDOCK_DEVICE T ld_shared(const T* p CROSSDOCK_SITE) {
  return twin::hooks::load_as(p, kWeakAccess, site);
}
template <class T>
CROSSDOCK_DEVICE void st_shared(T* p, T v CROSSDOCK_SITE) {
  twin::hooks::store_as(p, v, kWeakAccess, site);
}
#endif

}  // namespace crossdock::device::ptx
