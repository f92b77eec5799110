// The FP8 cast of ep_dispatch: a row of bf16 in shared memory becomes e4m3 in place, with one fp32
// scale per 128 values behind the row. By a whole warp, after the row has been loaded; the caller
// fences (fence_proxy_async_shared, sync_warp) before bulk stores read the result.
//
//   scale = max(|group|, 1e-4) / 448, value = e4m3(x * (448 / max(|group|, 1e-4)))
//
// In place is safe: a turn of the warp reads 1024 bytes and writes 512, and the values written lie
// below everything that later turns read; turns taken together are all read before one is written.
// NaN does not count for the maximum and stays NaN; an infinity makes its group's scale infinite.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_dispatch.cuh>
#include <crossdock/ptx/convert.cuh>
#include <crossdock/ptx/warp.cuh>

namespace crossdock::device {

inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kSmallestAmax = 1e-4f;

struct EpCast {
  static constexpr u32 kPerLane = 16;  // values of a lane and turn: 8 lanes make a group
  static constexpr u32 kLanesPerGroup = kEpScaleGroup / kPerLane;
  static constexpr u32 kPerTurn = kPerLane * kWarpSize;
  static constexpr u32 kTurns = 4;  // side by side, since each is a chain of latencies

  CROSSDOCK_DEVICE static u32 magnitude(U32x4 v) {
    constexpr u32 kMask = 0x7fff7fffu;
    return ptx::max_bf16x2(ptx::max_bf16x2(v.x & kMask, v.y & kMask),
                           ptx::max_bf16x2(v.z & kMask, v.w & kMask));
  }
  // Four values of e4m3.
  CROSSDOCK_DEVICE static u32 quantise(u32 low, u32 high, float inverse) {
    const ptx::F32x2 a = ptx::f32_from_bf16x2(low);
    const ptx::F32x2 b = ptx::f32_from_bf16x2(high);
    return ptx::e4m3x2_from_f32(a.lo * inverse, a.hi * inverse) |
           ptx::e4m3x2_from_f32(b.lo * inverse, b.hi * inverse) << 16;
  }

  // What a lane holds of one turn.
  struct Piece {
    U32x4 x, y;
    u32 at;
    float largest;
  };

  CROSSDOCK_DEVICE static Piece read(const u8* row, u32 at, u32 values) {
    Piece piece{{}, {}, at, 0};
    if (at >= values) return piece;
    const auto* source = reinterpret_cast<const U32x4*>(row + u64{at} * 2);
    piece.x = ptx::ld_shared(source);
    piece.y = ptx::ld_shared(source + 1);
    return piece;
  }
  CROSSDOCK_DEVICE static void find_largest(Piece& piece) {
    u32 amax = ptx::max_bf16x2(magnitude(piece.x), magnitude(piece.y));
    CROSSDOCK_UNROLL
    for (u32 step = 1; step < kLanesPerGroup; step *= 2)
      amax = ptx::max_bf16x2(amax, ptx::shuffle_xor(kFullMask, amax, step));
    const ptx::F32x2 two = ptx::f32_from_bf16x2(amax);
    // Not fmax: a group of NaNs alone has a maximum of NaN and takes the floor.
    piece.largest = two.lo > two.hi ? two.lo : two.hi;
    piece.largest = piece.largest > kSmallestAmax ? piece.largest : kSmallestAmax;
  }
  CROSSDOCK_DEVICE static void write(u8* row, float* scales, const Piece& piece, u32 values) {
    if (piece.at >= values) return;
    const float inverse = kE4m3Max / piece.largest;
    ptx::st_shared(
        reinterpret_cast<U32x4*>(row + piece.at),
        U32x4{quantise(piece.x.x, piece.x.y, inverse), quantise(piece.x.z, piece.x.w, inverse),
              quantise(piece.y.x, piece.y.y, inverse), quantise(piece.y.z, piece.y.w, inverse)});
    if (lane_index() % kLanesPerGroup == 0)
      ptx::st_shared(scales + piece.at / kEpScaleGroup, piece.largest / kE4m3Max);
  }

  // `values`: a multiple of 128. The scales go to `row` + values, as if it were e4m3 already.
  CROSSDOCK_DEVICE static void run(u8* row, float* scales, u32 values) {
    for (u32 turn = 0; turn < values; turn += kTurns * kPerTurn) {
      Piece pieces[kTurns];
      const u32 at = turn + lane_index() * kPerLane;
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kTurns; ++i)
        pieces[i] = read(row, at + i * kPerTurn, values);
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kTurns; ++i)
        find_largest(pieces[i]);
      // All lanes have read their parts of these turns: the shuffles have waited for them.
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kTurns; ++i)
        write(row, scales, pieces[i], values);
    }
  }
};

}  // namespace crossdock::device
