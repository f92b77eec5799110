// Compressed rows of a combine: what makes them and what takes them apart. See
// layout/ep_payload.cuh for the bits.
//
//   EpPacker    16 lanes have a group, 8 values each, as a reader of bf16 rows has them
//   EpUnpacker  a lane has 16 values of a unit, 8 lanes have a group
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/cast.cuh>
#include <crossdock/layout/ep_payload.cuh>

namespace crossdock::device {

// Writes a row into global memory.
struct EpPacker {
  static constexpr float kFp8Smallest = 0x1p-100f;
  EpPayload payload;
  u8* row;

  // Vector `index` of the row, 8 values of bf16. By whole warps: the lanes' vectors are neighbours,
  // the first at a multiple of 32.
  CROSSDOCK_DEVICE void store(u32 index, U32x4 v) const {
    u8* unit = row + u64{index / kEpUnitVectors} * ep_unit_bytes(payload);
    const u32 at = index % kEpUnitVectors;
    if (payload == EpPayload::kFp8) return store_fp8(unit, at, v);
    store_log(unit, at, v);
  }

 private:
  static constexpr u32 kLanes = kEpScaleGroup / 8;  // of a group

  CROSSDOCK_DEVICE static void store_fp8(u8* unit, u32 at, U32x4 v) {
    u32 most = ptx::max_magnitude_bf16x2(ptx::max_magnitude_bf16x2(v.x, v.y),
                                         ptx::max_magnitude_bf16x2(v.z, v.w));
    CROSSDOCK_UNROLL
    for (u32 bit = 1; bit < kLanes; bit *= 2)
      most = ptx::max_magnitude_bf16x2(most, ptx::shuffle_xor(kFullMask, most, bit));
    const EpCastScale scale = EpCastScale::of(EpCastScale::largest(most, kFp8Smallest), false);
    ptx::st_weak(reinterpret_cast<U32x2*>(unit) + at, EpCast::quantise(v, scale.inverse));
    if (at % kLanes == 0)
      ptx::st_weak(reinterpret_cast<u32*>(unit + kEpFp8Scales) + at / kLanes, scale.bits);
  }

  CROSSDOCK_DEVICE static EpLogRange range_of(const u32 (&words)[4]) {
    u32 highest = 0, below = ~0u;  // the smallest less 1, so that zeros are far above
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 8; ++i) {
      const u32 magnitude = words[i / 2] >> (i % 2 * 16) & 0x7fffu;
      highest = max_of(highest, magnitude);
      below = min_of(below, magnitude - 1);
    }
    CROSSDOCK_UNROLL
    for (u32 bit = 1; bit < kLanes; bit *= 2) {
      highest = max_of(highest, ptx::shuffle_xor(kFullMask, highest, bit));
      below = min_of(below, ptx::shuffle_xor(kFullMask, below, bit));
    }
    return EpLogRange::of(below + 1, highest);
  }
  CROSSDOCK_DEVICE static void store_log(u8* unit, u32 at, U32x4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    const EpLogRange range = range_of(words);
    const u32 inverse = range.inverse();
    u32 low[2] = {}, high = 0;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 8; ++i) {
      const u32 value = words[i / 2] >> (i % 2 * 16);
      const u32 code = range.code(value & 0x7fffu, inverse);
      low[i / 4] |= (code & 0xffu) << (i % 4 * 8);
      high |= (code >> 8 | (value >> 14 & 2u)) << (2 * i);
    }
    ptx::st_weak(reinterpret_cast<U32x2*>(unit) + at, U32x2{low[0], low[1]});
    const u32 across = ptx::shuffle_xor(kFullMask, high, 1);
    if (at % 2 == 0)
      ptx::st_weak(reinterpret_cast<u32*>(unit + kEpLogHigh) + at / 2, high | across << 16);
    if (at % kLanes == 0)
      ptx::st_weak(reinterpret_cast<u32*>(unit + kEpLogRanges) + at / kLanes, range.word());
  }
};

// Adds the lane's 16 values of a unit in shared memory, those from 16 * lane on.
template <EpPayload kPayload>
struct EpUnpacker {
  using Sums = float[16];

  CROSSDOCK_DEVICE static void add(const u8* unit, u32 lane, Sums& sums) {
    const U32x4 v = ptx::ld_shared(reinterpret_cast<const U32x4*>(unit) + lane);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    if constexpr (kPayload == EpPayload::kFp8) {
      add_fp8(words, ptx::ld_shared(reinterpret_cast<const float*>(unit + kEpFp8Scales) + lane / 8),
              sums);
    } else {
      const u32 high = ptx::ld_shared(reinterpret_cast<const u32*>(unit + kEpLogHigh) + lane);
      const u32 word = ptx::ld_shared(reinterpret_cast<const u32*>(unit + kEpLogRanges) + lane / 8);
      add_log(words, high, EpLogRange::from(word), sums);
    }
  }

 private:
  CROSSDOCK_DEVICE static void add_fp8(const u32 (&words)[4], float scale, Sums& sums) {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 8; ++i) {
      const ptx::F32x2 two = ptx::f32_from_e4m3x2(words[i / 2] >> (i % 2 * 16) & 0xffffu);
      sums[2 * i] = ptx::fused_multiply_add(two.lo, scale, sums[2 * i]);
      sums[2 * i + 1] = ptx::fused_multiply_add(two.hi, scale, sums[2 * i + 1]);
    }
  }
  CROSSDOCK_DEVICE static void add_log(const u32 (&words)[4], u32 high, EpLogRange range,
                                       Sums& sums) {
    const u32 step = range.step(), base = range.base();
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 16; ++i) {
      const u32 code = (words[i / 4] >> (i % 4 * 8) & 0xffu) | (high >> (2 * i) & 1u) << 8;
      const u32 sign = high << (30 - 2 * i) & 0x80000000u;
      const u32 bits = code == 0 ? 0 : base + code * step;
      sums[i] += bit_cast<float>(bits | sign);
    }
  }
};

}  // namespace crossdock::device
