// What every device source starts from: compiler selection, function macros, fixed-width aliases,
// thread identity and the dynamic shared-memory block. The same source is compiled by a CUDA
// compiler (nvcc, NVRTC) for the GPU and by the host compiler for the twin, which runs it with
// fibers; this header is the only place that decides which of the two it is. It must not contain
// inline assembly (that is `ptx/`) and includes no host library header.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CROSSDOCK_ON_GPU 1
#define CROSSDOCK_ON_TWIN 0
#else
#define CROSSDOCK_ON_GPU 0
#define CROSSDOCK_ON_TWIN 1
#include <crossdock/twin/hooks.hpp>
#endif

#if CROSSDOCK_ON_GPU
#define CROSSDOCK_DEVICE __device__ __forceinline__
// What is slow anyway. A kernel with so many waits and faults that they make most of its code
// defines CROSSDOCK_CALLS_COLD before its first include: such parts are functions then, compiled
// once and not once a place. Others do not: a call takes registers that a small kernel has not, and
// leaves wgmma too few.
#ifdef CROSSDOCK_CALLS_COLD
#define CROSSDOCK_COLD inline __device__ __noinline__
#else
#define CROSSDOCK_COLD __device__ __forceinline__
#endif
#define CROSSDOCK_HOST_DEVICE __host__ __device__ __forceinline__
// CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(384, 1) void name(CROSSDOCK_PARAMS(Params, p)) { ... }
#define CROSSDOCK_KERNEL __global__ void
#define CROSSDOCK_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
// One POD of parameters a kernel, in constant memory on the GPU; in the twin all threads share the
// copy that the launch owns.
#define CROSSDOCK_PARAMS(type, name) const __grid_constant__ type name
#define CROSSDOCK_UNROLL _Pragma("unroll")
#define CROSSDOCK_NO_UNROLL _Pragma("unroll 1")
// A function that can wait takes its caller's place as a last parameter, so that the twin's reports
// name the line in the kernel and not the line in the vocabulary. On the GPU these are nothing.
#define CROSSDOCK_SITE
#define CROSSDOCK_SITE_ONLY
#define CROSSDOCK_PASS_SITE
#define CROSSDOCK_PASS_SITE_ONLY
#else
#define CROSSDOCK_DEVICE inline
#define CROSSDOCK_COLD inline
#define CROSSDOCK_HOST_DEVICE inline
#define CROSSDOCK_KERNEL inline void
#define CROSSDOCK_LAUNCH_BOUNDS(threads, blocks)
#define CROSSDOCK_PARAMS(type, name) const type& name
#define CROSSDOCK_UNROLL
#define CROSSDOCK_NO_UNROLL
// Declaration: `bool wait(u32* p CROSSDOCK_SITE)`, `void sync(CROSSDOCK_SITE_ONLY)`.
// Passing on:  `inner(p CROSSDOCK_PASS_SITE)`,     `inner(CROSSDOCK_PASS_SITE_ONLY)`.
#define CROSSDOCK_SITE , ::crossdock::twin::Site site = ::crossdock::twin::Site::here()
#define CROSSDOCK_SITE_ONLY ::crossdock::twin::Site site = ::crossdock::twin::Site::here()
#define CROSSDOCK_PASS_SITE , site
#define CROSSDOCK_PASS_SITE_ONLY site
#endif

namespace crossdock::device {

// `unsigned long long` on every compiler: `uint64_t` is another type on the host, and overloads and
// templates would part ways.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8);

// 16 bytes, the widest access of one thread.
struct alignas(16) U32x4 {
  u32 x, y, z, w;
};
struct alignas(8) U32x2 {
  u32 x, y;
};
struct alignas(16) F32x4 {
  float x, y, z, w;
};

// A tensor map as the driver encodes it (GPU) or as the twin encodes it; always a kernel parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

inline constexpr u32 kWarpSize = 32;
inline constexpr u32 kWarpgroupSize = 128;
inline constexpr u32 kFullMask = 0xffffffffu;

template <class T>
CROSSDOCK_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <class T>
CROSSDOCK_HOST_DEVICE constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}
template <class T>
CROSSDOCK_HOST_DEVICE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
CROSSDOCK_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

// The value of `from` seen as a `To` of the same size.
template <class To, class From>
CROSSDOCK_HOST_DEVICE constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

#if CROSSDOCK_ON_GPU

CROSSDOCK_DEVICE u32 thread_index() {
  return threadIdx.x;
}
CROSSDOCK_DEVICE u32 block_index() {
  return blockIdx.x;
}
CROSSDOCK_DEVICE u32 block_size() {
  return blockDim.x;
}
CROSSDOCK_DEVICE u32 grid_size() {
  return gridDim.x;
}

// The one dynamic shared-memory block. Static `__shared__` variables are not allowed: the twin
// could not give each block its own.
CROSSDOCK_DEVICE u8* dynamic_shared() {
  extern __shared__ __align__(1024) u8 crossdock_dynamic_shared[];
  return crossdock_dynamic_shared;
}

CROSSDOCK_DEVICE u32 popcount(u32 v) {
  return static_cast<u32>(__popc(v));
}
CROSSDOCK_DEVICE u32 popcount(u64 v) {
  return static_cast<u32>(__popcll(v));
}
// Index of the lowest set bit; `v` is not zero.
CROSSDOCK_DEVICE u32 lowest_bit(u32 v) {
  return static_cast<u32>(__ffs(static_cast<int>(v))) - 1;
}
CROSSDOCK_DEVICE u32 leading_zeros(u32 v) {
  return static_cast<u32>(__clz(static_cast<int>(v)));
}
// Ends the kernel (and on the GPU the context): only for bugs of the library itself.
CROSSDOCK_DEVICE void trap() {
  __trap();
}

#else

CROSSDOCK_DEVICE u32 thread_index() {
  return twin::hooks::self().thread_index;
}
CROSSDOCK_DEVICE u32 block_index() {
  return twin::hooks::self().block_index;
}
CROSSDOCK_DEVICE u32 block_size() {
  return twin::hooks::self().block_size;
}
CROSSDOCK_DEVICE u32 grid_size() {
  return twin::hooks::self().grid_size;
}

CROSSDOCK_DEVICE u8* dynamic_shared() {
  return twin::hooks::dynamic_shared();
}

CROSSDOCK_DEVICE u32 popcount(u32 v) {
  return static_cast<u32>(__builtin_popcount(v));
}
CROSSDOCK_DEVICE u32 popcount(u64 v) {
  return static_cast<u32>(__builtin_popcountll(v));
}
CROSSDOCK_DEVICE u32 lowest_bit(u32 v) {
  return static_cast<u32>(__builtin_ctz(v));
}
CROSSDOCK_DEVICE u32 leading_zeros(u32 v) {
  return v == 0 ? 32u : static_cast<u32>(__builtin_clz(v));
}
CROSSDOCK_DEVICE void trap(CROSSDOCK_SITE_ONLY) {
  twin::hooks::trap("trap", site);
}

#endif

CROSSDOCK_DEVICE u32 lane_index() {
  return thread_index() % kWarpSize;
}
CROSSDOCK_DEVICE u32 warp_index() {
  return thread_index() / kWarpSize;
}
CROSSDOCK_DEVICE u32 warpgroup_index() {
  return thread_index() / kWarpgroupSize;
}

}  // namespace crossdock::device
