// moe_cast_rows: rows of bf16 become rows of e4m3 with scales by column, as grouped_gemm loads
// them, with the numbers that the cast of ep_dispatch gives (ep/cast.cuh). Rows that are e4m3
// already stay where they are: only their scales are turned. Launch on any rank: any grid, block =
// 32 * kConfig.warps threads, no shared memory. 16 lanes take the 128 values of a group.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/ep/cast.cuh>
#include <crossdock/layout/moe_cast.cuh>

namespace crossdock::device {

struct MoeCastGroup {
  static constexpr u32 kValues = 8;                       // of a lane
  static constexpr u32 kLanes = kEpScaleGroup / kValues;  // of a group
  static constexpr u32 kPerWarp = kWarpSize / kLanes;     // groups at once

  const MoeCastRowsParams& p;
  u32 lane;

  CROSSDOCK_DEVICE explicit MoeCastGroup(const MoeCastRowsParams& params)
      : p(params), lane(lane_index()) {}

  // Group `at` of all, counted row by row; by whole warps, lanes without a group with `works`
  // false.
  CROSSDOCK_DEVICE void run(u64 at, bool works) const {
    const u64 row = at / p.groups;
    const u32 group = static_cast<u32>(at % p.groups);
    const u64 first = u64{group} * kEpScaleGroup + lane % kLanes * kValues;
    const U32x4 v =
        works
            ? ptx::ld_weak(reinterpret_cast<const U32x4*>(p.rows + row * p.row_stride + first * 2))
            : U32x4{};
    const float largest = find_largest(v);
    if (!works) return;
    const EpCastScale scale = EpCastScale::of(largest, p.ue8m0);
    ptx::st_weak(reinterpret_cast<U32x2*>(p.codes + row * p.groups * kEpScaleGroup + first),
                 U32x2{quantise(v.x, v.y, scale.inverse), quantise(v.z, v.w, scale.inverse)});
    if (lane % kLanes != 0) return;
    if (!p.ue8m0) return ptx::st_weak(p.scales + group * p.scale_columns + row, scale.bits);
    u8* word = reinterpret_cast<u8*>(p.scales + group / 4 * p.scale_columns + row);
    ptx::st_weak(word + group % 4, static_cast<u8>(scale.bits));
  }

 private:
  // Of the 16 lanes. Not fmax: NaN loses against a number, and a group of NaNs alone takes the
  // floor.
  CROSSDOCK_DEVICE float find_largest(const U32x4& v) const {
    u32 most = ptx::max_magnitude_bf16x2(ptx::max_magnitude_bf16x2(v.x, v.y),
                                         ptx::max_magnitude_bf16x2(v.z, v.w));
    CROSSDOCK_UNROLL
    for (u32 away = 1; away < kLanes; away *= 2)
      most = ptx::max_magnitude_bf16x2(most, ptx::shuffle_xor(kFullMask, most, away));
    const ptx::F32x2 pair = ptx::f32_from_bf16x2(most & 0x7fff7fffu);
    float largest = pair.hi > pair.lo ? pair.hi : pair.lo;
    if (pair.lo != pair.lo) largest = pair.hi;
    return largest > kSmallestAmax ? largest : kSmallestAmax;
  }
  CROSSDOCK_DEVICE static u32 quantise(u32 low, u32 high, float inverse) {
    const ptx::F32x2 a = ptx::f32_from_bf16x2(low);
    const ptx::F32x2 b = ptx::f32_from_bf16x2(high);
    return ptx::e4m3x2_from_f32(a.lo * inverse, a.hi * inverse) |
           ptx::e4m3x2_from_f32(b.lo * inverse, b.hi * inverse) << 16;
  }
};

namespace kernel {

template <MoeCastRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    moe_cast_rows(CROSSDOCK_PARAMS(MoeCastRowsParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  const u64 thread = u64{block_index()} * kConfig.warps * kWarpSize + thread_index();
  const u64 threads = u64{grid_size()} * kConfig.warps * kWarpSize;
  if (p.rows == nullptr) {
    for (u64 at = thread; at < u64{p.count} * p.words; at += threads) {
      const auto* from = reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(p.given) +
                                                      at / p.words * p.given_stride);
      ptx::st_weak(p.scales + at % p.words * p.scale_columns + at / p.words,
                   ptx::ld_weak(from + at % p.words));
    }
    return;
  }
  const u64 all = u64{p.count} * p.groups;
  const MoeCastGroup cast(p);
  // Whole warps, since the lanes of a group ask each other.
  for (u64 first = thread / kWarpSize * MoeCastGroup::kPerWarp; first < all;
       first += threads / kWarpSize * MoeCastGroup::kPerWarp) {
    const u64 at = first + lane_index() / MoeCastGroup::kLanes;
    cast.run(at < all ? at : first, at < all);
  }
}

}  // namespace kernel
}  // namespace crossdock::device
