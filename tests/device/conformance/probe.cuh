// Probes of the device: each kernel writes what the hardware computes to `out`. The same source
// runs on the twin and on a GPU, and the two outputs must be equal byte for byte; this is what the
// twin's operand layouts, swizzles and collectives are checked against. Inputs are small integers,
// so sums are exact.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/bulk.cuh>
#include <crossdock/ptx/control.cuh>
#include <crossdock/ptx/descriptor.cuh>
#include <crossdock/ptx/fence.cuh>
#include <crossdock/ptx/mbarrier.cuh>
#include <crossdock/ptx/memory.cuh>
#include <crossdock/ptx/tensor.cuh>
#include <crossdock/ptx/warp.cuh>
#include <crossdock/ptx/wgmma.cuh>

namespace crossdock::testing::conformance {

using namespace crossdock::device;

inline constexpr u32 kShared = 64 * 1024;
inline constexpr u32 kOperandB = 32 * 1024;

// Probes are templates like every kernel, so that the JIT compiles the one it is asked for.
struct ProbeConfig {
  u32 threads;  // of the one block
};

// Fills shared memory with operands: any byte may be read by any layout.
CROSSDOCK_DEVICE u32 scramble(u32 x) {
  x ^= x >> 15;
  x *= 0x2c1b3c6du;
  x ^= x >> 12;
  x *= 0x297a2d39u;
  return x ^ (x >> 15);
}
// Two bf16 or four e4m3 numbers.
CROSSDOCK_DEVICE u32 operand_bits(bool wide, u32 v) {
  u32 bits = 0;
  if (wide) {
    for (u32 i = 0; i < 2; ++i, v /= 8) {  // 0, 1, 2, .. 7
      const u32 n = v % 8;
      const u32 code = n == 0   ? 0
                       : n == 1 ? 0x3f80
                       : n < 4  ? 0x4000 + (n - 2) * 0x40
                                : 0x4080 + (n - 4) * 0x20;
      bits |= code << 16 * i;
    }
  } else {
    for (u32 i = 0; i < 4; ++i, v /= 4)  // 0, 1, 2, 3
      bits |= (v % 4 == 0 ? 0u : v % 4 == 1 ? 0x38u : v % 4 == 2 ? 0x40u : 0x44u) << 8 * i;
  }
  return bits;
}
CROSSDOCK_DEVICE void fill_shared(bool wide) {
  auto* words = reinterpret_cast<u32*>(dynamic_shared());
  for (u32 i = thread_index(); i < kShared / 4; i += block_size())
    ptx::st_shared(words + i, operand_bits(wide, scramble(i + 1)));
  ptx::fence_proxy_async();
  ptx::sync_threads();
}

struct WgmmaParams {
  float* out;    // [128 threads][32]
  u64 a_fields;  // descriptors without their addresses
  u64 b_fields;
  u32 a_offset;
  u32 b_offset;
  u32 kind;  // 0 e4m3; 1 bf16; +1 transposed A; +2 transposed B; 5 A in registers
};

CROSSDOCK_DEVICE void wgmma_one(const WgmmaParams& p, float (&d)[32]) {
  const u64 a = p.a_fields | (ptx::shared_address(dynamic_shared() + p.a_offset) >> 4);
  const u64 b = p.b_fields | (ptx::shared_address(dynamic_shared() + kOperandB + p.b_offset) >> 4);
  u32 registers[4];
  for (u32 r = 0; r < 4; ++r) {
    const u32 v = scramble(thread_index() * 4 + r + 77);
    registers[r] = (v & 1 ? 0x3f80u : 0x4000u) | (v & 2 ? 0x40400000u : 0u);
  }
  ptx::wgmma_fence();
  if (p.kind == 0) ptx::wgmma_e4m3(d, a, b, true);
  if (p.kind == 1) ptx::wgmma_bf16<false, false>(d, a, b, true);
  if (p.kind == 2) ptx::wgmma_bf16<true, false>(d, a, b, true);
  if (p.kind == 3) ptx::wgmma_bf16<false, true>(d, a, b, true);
  if (p.kind == 4) ptx::wgmma_bf16<true, true>(d, a, b, true);
  if (p.kind == 5) ptx::wgmma_bf16<false>(d, registers, b, true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
}

template <ProbeConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    wgmma_probe(CROSSDOCK_PARAMS(WgmmaParams, p)) {
  fill_shared(p.kind != 0);
  float d[32];
  for (u32 i = 0; i < 32; ++i)
    d[i] = static_cast<float>(i);
  wgmma_one(p, d);
  for (u32 i = 0; i < 32; ++i)
    ptx::st_weak(reinterpret_cast<u32*>(p.out) + thread_index() * 32 + i, bit_cast<u32>(d[i]));
}

struct WarpParams {
  u32* out;  // [32 lanes][64]
};
template <ProbeConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    warp_probe(CROSSDOCK_PARAMS(WarpParams, p)) {
  fill_shared(true);
  const u32 lane = lane_index();
  const u32 v = scramble(lane);
  u32 n = 0;
  const auto put = [&](u32 value) { ptx::st_weak(p.out + lane * 64 + n++, value); };
  put(ptx::shuffle(kFullMask, v, 5));
  put(ptx::shuffle_up(kFullMask, v, 3));
  put(ptx::shuffle_down(kFullMask, v, 7));
  put(ptx::shuffle_xor(kFullMask, v, 9));
  put(ptx::ballot(kFullMask, v % 3 == 0));
  put(ptx::match_any(kFullMask, v % 4));
  put(ptx::reduce_add(kFullMask, v));
  put(ptx::reduce_min(kFullMask, v));
  put(ptx::reduce_max(kFullMask, v));
  put(ptx::reduce_or(kFullMask, v));
  put(popcount(ptx::ballot(kFullMask, ptx::elect_one(kFullMask))));
  u32 r[4];
  ptx::load_matrix_x4(r, dynamic_shared() + lane * 16);
  for (u32 i = 0; i < 4; ++i)
    put(r[i]);
  ptx::load_matrix_x4_transposed(r, dynamic_shared() + 1024 + lane * 32);
  for (u32 i = 0; i < 4; ++i)
    put(r[i]);
  ptx::sync_warp(kFullMask);
  for (u32 i = 0; i < 4; ++i)
    r[i] = v + i;
  ptx::store_matrix_x4(dynamic_shared() + 4096 + lane * 16, r);
  ptx::store_matrix_x4_transposed(dynamic_shared() + 8192 + lane * 16, r);
  ptx::store_matrix_x2(dynamic_shared() + 12288 + lane % 16 * 16, {v, v * 3});
  ptx::sync_warp(kFullMask);
  for (u32 i = 0; i < 4; ++i)
    put(ptx::ld_shared(reinterpret_cast<u32*>(dynamic_shared() + 4096) + i * 32 + lane));
  for (u32 i = 0; i < 4; ++i)
    put(ptx::ld_shared(reinterpret_cast<u32*>(dynamic_shared() + 8192) + i * 32 + lane));
  for (u32 i = 0; i < 2; ++i)
    put(ptx::ld_shared(reinterpret_cast<u32*>(dynamic_shared() + 12288) + i * 32 + lane));
  while (n < 64)
    put(0);
}

struct TensorParams {
  u32* out;        // [tile_bytes / 4] as it lies in shared memory
  u32 bytes;       // of the box
  u32 tile_bytes;  // with the padding of rows that are narrower than the swizzle
  i32 x, y;
  u32 stores;
  TensorMap load;
  TensorMap store;  // over another tensor of the same shape
};
template <ProbeConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    tensor_probe(CROSSDOCK_PARAMS(TensorParams, p)) {
  u8* tile = dynamic_shared();
  auto* barrier = reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kOperandB);
  for (u32 i = thread_index(); i < p.tile_bytes / 4; i += block_size())
    ptx::st_shared(reinterpret_cast<u32*>(tile) + i, 0u);
  ptx::fence_proxy_async();
  ptx::sync_threads();
  if (thread_index() == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, p.bytes);
    ptx::tensor_load_2d(tile, &p.load, p.x, p.y, barrier);
  }
  ptx::sync_threads();
  while (!ptx::mbarrier_try_wait(barrier, 0))
    ptx::spin("tile");
  for (u32 i = thread_index(); i < p.tile_bytes / 4; i += block_size())
    ptx::st_weak(p.out + i, ptx::ld_shared(reinterpret_cast<u32*>(tile) + i));
  if (thread_index() == 0 && p.stores != 0) {
    ptx::tensor_store_2d(&p.store, p.x, p.y, tile);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

}  // namespace crossdock::testing::conformance
