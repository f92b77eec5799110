// add_parts: the sums of a reduce-scatter, when copy engines have brought the parts of all ranks to
// this one: added in the order of the ranks, in fp32, so that the bits are the same in every run.
// Launch on any rank: any grid, block = kConfig.threads, no shared memory. No wait.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/layout/coll.cuh>
#include <crossdock/ptx/convert.cuh>

namespace crossdock::device {

// 16 bytes of every part, by one thread.
template <bool kBf16>
struct PartsSum {
  static constexpr u32 kValues = kBf16 ? 8 : 4;
  float sum[kValues] = {};

  CROSSDOCK_DEVICE void add(U32x4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < 4; ++j) {
      if constexpr (kBf16) {
        const ptx::F32x2 two = ptx::f32_from_bf16x2(words[j]);
        sum[2 * j] += two.lo;
        sum[2 * j + 1] += two.hi;
      } else {
        sum[j] += bit_cast<float>(words[j]);
      }
    }
  }
  CROSSDOCK_DEVICE U32x4 value() const {
    if constexpr (kBf16)
      return {ptx::bf16x2_from_f32(sum[0], sum[1]), ptx::bf16x2_from_f32(sum[2], sum[3]),
              ptx::bf16x2_from_f32(sum[4], sum[5]), ptx::bf16x2_from_f32(sum[6], sum[7])};
    else
      return {bit_cast<u32>(sum[0]), bit_cast<u32>(sum[1]), bit_cast<u32>(sum[2]),
              bit_cast<u32>(sum[3])};
  }
};

namespace kernel {

template <AddPartsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    add_parts(CROSSDOCK_PARAMS(AddPartsParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  for (u64 i = u64{block_index()} * kConfig.threads + thread_index(); i < p.vectors;
       i += u64{grid_size()} * kConfig.threads) {
    PartsSum<kConfig.bf16> sum;
    for (u32 rank = 0; rank < p.world; ++rank) {
      const u8* part = rank == p.common.rank ? p.own : p.parts + rank * p.pitch;
      sum.add(ptx::ld_weak(reinterpret_cast<const U32x4*>(part) + i));
    }
    ptx::st_weak(reinterpret_cast<U32x4*>(p.output) + i, sum.value());
  }
}

}  // namespace kernel
}  // namespace crossdock::device
