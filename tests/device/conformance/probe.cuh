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

CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(128, 1) wgmma_probe(CROSSDOCK_PARAMS(WgmmaParams, p)) {
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
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(32, 1) warp_probe(CROSSDOCK_PARAMS(WarpParams, p)) {
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
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(32, 1) tensor_probe(CROSSDOCK_PARAMS(TensorParams, p)) {
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

// ---- cases, the same for both runners -------------------------------------------------------

// Swizzle modes as a descriptor encodes them: none, 128, 64, 32 bytes.
inline u32 width_of(u32 mode) {
  return mode == 0 ? 16u : 256u >> mode;
}

// Strides of an operand of `lines` rows or columns; K-major, or MN-major when `transposed`.
inline u64 operand_fields(u32 mode, bool transposed, u32 lines) {
  const u32 w = width_of(mode);
  u32 leading = 16;
  u32 stride = 8 * w;
  if (mode == 0) leading = transposed ? lines / 8 * 128 : 128, stride = transposed ? 128 : 256;
  if (mode != 0 && transposed) leading = 8 * w, stride = lines * 2 / w * 8 * w;
  return u64{leading >> 4} << 16 | u64{stride >> 4} << 32 | u64{mode} << 62;
}

// Calls run(kind, a_fields, b_fields, a_offset, b_offset) for every combination.
template <class Run>
void for_each_wgmma(Run&& run) {
  for (u32 kind = 0; kind < 6; ++kind)
    for (u32 a = 0; a < 4; ++a)
      for (u32 b = 0; b < 4; ++b)
        for (u32 step = 0; step < 2; ++step) {
          // The second K step of a K-major atom of 64 bytes or more is 32 bytes on.
          const bool transposed_a = kind == 2 || kind == 4;
          const bool transposed_b = kind == 3 || kind == 4;
          const u32 a_offset = step == 0 || transposed_a || width_of(a) < 64 ? 0 : 32;
          const u32 b_offset = step == 0 || transposed_b || width_of(b) < 64 ? 0 : 32;
          run(kind, operand_fields(a, transposed_a, 64), operand_fields(b, transposed_b, 64),
              a_offset, b_offset);
        }
}

struct TensorCase {
  u32 swizzle;
  u32 box_width;  // elements of 2 bytes
  i32 x, y;
};
inline constexpr TensorCase kTensorCases[] = {
    {0, 32, 0, 0},   {0, 64, 16, 5},    {32, 16, 16, 8},  {64, 32, 0, 16},  {64, 16, 32, 4},
    {128, 64, 0, 0}, {128, 64, -8, -3}, {128, 32, 8, 15}, {128, 64, 24, 18}};
// Stores at negative coordinates end in an illegal instruction on an H200 (driver 580), so only
// loads go there.
inline u32 stores(const TensorCase& c) {
  return c.x >= 0 && c.y >= 0 ? 1 : 0;
}
inline u32 tile_bytes(const TensorCase& c) {
  return (c.swizzle != 0 ? c.swizzle : c.box_width * 2) * 8;
}
inline constexpr u32 kTensorWidth = 40;
inline constexpr u32 kTensorHeight = 20;
inline constexpr u32 kBoxHeight = 8;

}  // namespace crossdock::testing::conformance
