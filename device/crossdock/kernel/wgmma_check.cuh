// wgmma_check: one warpgroup multiplies two small matrices, tile by tile of 128 bytes of K, and
// writes every accumulator to its place. It ties together what a matrix kernel rests on: the
// swizzle, descriptors and K steps, tensor-map loads, A fragments in registers, the accumulators'
// places and the proxy fences.
// Launch: one block of 128 threads, shared memory `wgmma_check_shared_bytes`.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/check.cuh>
#include <crossdock/ptx/control.cuh>
#include <crossdock/ptx/fence.cuh>
#include <crossdock/ptx/tensor.cuh>
#include <crossdock/ptx/wgmma.cuh>

namespace crossdock::device::kernel {

inline constexpr u32 kWgmmaRowBytes = 128;  // of a tile: one swizzle width

// Tiles of A and B, each 1024-byte aligned, then the mbarrier.
CROSSDOCK_HOST_DEVICE constexpr u32 wgmma_check_a_bytes() {
  return 64 * kWgmmaRowBytes;
}
CROSSDOCK_HOST_DEVICE constexpr u32 wgmma_check_shared_bytes(u32 n) {
  return wgmma_check_a_bytes() + n * kWgmmaRowBytes + 16;
}

template <WgmmaCheckConfig kConfig>
struct WgmmaCheck {
  static constexpr u32 kRegisters = kConfig.n / 2;
  static constexpr u32 kTileBytes = wgmma_check_a_bytes() + kConfig.n * kWgmmaRowBytes;

  CROSSDOCK_DEVICE static u8* tile_a() { return dynamic_shared(); }
  CROSSDOCK_DEVICE static u8* tile_b() { return dynamic_shared() + wgmma_check_a_bytes(); }
  CROSSDOCK_DEVICE static ptx::MBarrier* full() {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kTileBytes);
  }

  // Rows of 128 bytes of k block `block` to swizzled shared memory, by all threads.
  CROSSDOCK_DEVICE static void copy(const WgmmaCheckParams& p, const u8* from, u8* tile, u32 rows,
                                    u32 block) {
    const u64 pitch = u64{p.k_blocks} * kWgmmaRowBytes;
    for (u32 i = thread_index(); i < rows * 8; i += kWarpgroupSize) {
      const u8* source = from + (i / 8) * pitch + u64{block} * kWgmmaRowBytes + i % 8 * 16;
      const U32x4 v = ptx::ld_weak(reinterpret_cast<const U32x4*>(source));
      u8* target = tile + ptx::swizzled(ptx::Swizzle::k128, i * 16);
      ptx::st_shared(reinterpret_cast<U32x4*>(target), v);
    }
  }
  // All threads; the tiles of `block` are in shared memory and visible to wgmma afterwards.
  CROSSDOCK_DEVICE static void load(const WgmmaCheckParams& p, u32 block) {
    if constexpr (kConfig.tensor_map) {
      if (thread_index() == 0) {
        const i32 column = static_cast<i32>(block * (kConfig.fp8 ? 128 : 64));
        ptx::mbarrier_arrive_expect_tx(full(), kTileBytes);
        ptx::tensor_load_2d(tile_a(), &p.a_map, column, 0, full());
        ptx::tensor_load_2d(tile_b(), &p.b_map, column, 0, full());
      }
      // A copy inside this rank: it needs no peer, so no deadline can be missed.
      while (!ptx::mbarrier_try_wait(full(), block & 1u))
        ptx::spin("tiles");
    } else {
      copy(p, p.a, tile_a(), 64, block);
      copy(p, p.b, tile_b(), kConfig.n, block);
      ptx::fence_proxy_async_shared();
    }
    ptx::sync_threads();
  }
  // A's fragment for one step of 32 bytes of K: rows 16 * warp + lane / 4 and 8 below, 4 bytes at
  // lane % 4 and 16 further.
  CROSSDOCK_DEVICE static void fragment(u32 step, u32 (&a)[4]) {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = 16 * warp_index() + lane_index() / 4 + 8 * (i % 2);
      const u32 column = 32 * step + 4 * (lane_index() % 4) + 16 * (i / 2);
      const u32 at = ptx::swizzled(ptx::Swizzle::k128, row * kWgmmaRowBytes + column);
      a[i] = ptx::ld_shared(reinterpret_cast<const u32*>(tile_a() + at));
    }
  }
  CROSSDOCK_DEVICE static void multiply(float (&d)[kRegisters], bool accumulate) {
    const u64 a = ptx::matrix_descriptor(tile_a(), ptx::k_major(ptx::Swizzle::k128));
    const u64 b = ptx::matrix_descriptor(tile_b(), ptx::k_major(ptx::Swizzle::k128));
    u32 fragments[4][4];
    if constexpr (kConfig.a_registers) {
      CROSSDOCK_UNROLL
      for (u32 step = 0; step < 4; ++step)
        fragment(step, fragments[step]);
    }
    ptx::wgmma_fence();
    CROSSDOCK_UNROLL
    for (u32 step = 0; step < 4; ++step) {
      const bool add = accumulate || step != 0;
      if constexpr (kConfig.fp8 && kConfig.a_registers) {
        ptx::wgmma_e4m3(d, fragments[step], ptx::advanced(b, 32 * step), add);
      } else if constexpr (kConfig.fp8) {
        ptx::wgmma_e4m3(d, ptx::advanced(a, 32 * step), ptx::advanced(b, 32 * step), add);
      } else if constexpr (kConfig.a_registers) {
        ptx::wgmma_bf16(d, fragments[step], ptx::advanced(b, 32 * step), add);
      } else {
        ptx::wgmma_bf16(d, ptx::advanced(a, 32 * step), ptx::advanced(b, 32 * step), add);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(d);
  }
};

template <WgmmaCheckConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(128, 1)
    wgmma_check(CROSSDOCK_PARAMS(WgmmaCheckParams, p)) {
  using Check = WgmmaCheck<kConfig>;
  if (kConfig.tensor_map && thread_index() == 0) {
    ptx::prefetch_tensor_map(&p.a_map);
    ptx::mbarrier_init(Check::full(), 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_threads();
  float d[Check::kRegisters];
  CROSSDOCK_UNROLL
  for (u32 i = 0; i < Check::kRegisters; ++i)
    d[i] = -1.0f;  // the first step must not add to it
  for (u32 block = 0; block < p.k_blocks; ++block) {
    Check::load(p, block);
    Check::multiply(d, block != 0);
    ptx::sync_threads();  // every warp has read the tiles
  }
  // One address a thread; the rest are offsets the compiler knows, or 256 columns would spill.
  float* first = p.d + ptx::accumulator_row(thread_index(), 0) * kConfig.n +
                 ptx::accumulator_column(thread_index(), 0);
  CROSSDOCK_UNROLL
  for (u32 i = 0; i < Check::kRegisters; ++i)
    ptx::st_weak(first + ptx::accumulator_row(0, i) * kConfig.n + ptx::accumulator_column(0, i),
                 d[i]);
}

}  // namespace crossdock::device::kernel
