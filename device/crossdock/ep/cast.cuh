// The FP8 cast of ep_dispatch: a row of bf16 in shared memory becomes a row of e4m3 elsewhere in
// shared memory, with a scale per 128 values behind it, fp32 or a byte of ue8m0. By a whole warp,
// after the row has been loaded; the caller fences (fence_proxy_async_shared, sync_warp) before
// bulk stores read the result.
//
//   scale = max(|group|, 1e-4) / 448, value = e4m3(x * (448 / max(|group|, 1e-4)))
//   ue8m0: the next power of two, and its reciprocal
//
// A turn of the warp is 512 values: 8 lanes have a group, each 8 values of its first and 8 of its
// second half, so that neither loads nor stores meet in a bank. Seven turns (half a row of 7168)
// are taken at once: all loads go out together, and the lanes exchange their maxima so that lane k
// of a group's 8 lanes ends up with the maximum of turn k: 7 shuffles instead of 21, and a division
// a lane instead of one a turn.
//
// NaN does not count for the maximum and stays NaN; an infinity makes its group's scale infinite,
// which in ue8m0 is NaN, 255.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_dispatch.cuh>
#include <crossdock/ptx/convert.cuh>
#include <crossdock/ptx/warp.cuh>

namespace crossdock::device {

inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kSmallestAmax = 1e-4f;

// Of 128 values, `largest` of them, at least kSmallestAmax.
struct EpCastScale {
  float inverse;  // what values are multiplied by
  u32 bits;       // of the scale: fp32, or the code of ue8m0

  // The larger magnitude of a pair, and not less than `smallest`. Not fmax: NaN loses against a
  // number, and a group of NaNs alone takes the floor.
  CROSSDOCK_DEVICE static float largest(u32 bf16x2, float smallest) {
    const ptx::F32x2 pair = ptx::f32_from_bf16x2(bf16x2 & 0x7fff7fffu);
    float most = pair.hi > pair.lo ? pair.hi : pair.lo;
    if (pair.lo != pair.lo) most = pair.hi;
    return most > smallest ? most : smallest;
  }
  CROSSDOCK_DEVICE static EpCastScale of(float largest, bool ue8m0) {
    const u32 scale = bit_cast<u32>(largest / kE4m3Max);
    if (!ue8m0) return {kE4m3Max / largest, scale};
    if (scale >= minifloat::kF32Infinity) return {0.0f, 255};
    const u32 code = minifloat::encode_ue8m0(scale);
    return {bit_cast<float>((254 - code) << 23), code};
  }
};

struct EpCast {
  static constexpr u32 kPerLoad = 8;                  // values of 16 bytes
  static constexpr u32 kLanes = 8;                    // of a group
  static constexpr u32 kGroups = kWarpSize / kLanes;  // of a turn
  static constexpr u32 kHalf = kEpScaleGroup / 2;
  static constexpr u32 kPerTurn = kWarpSize / kLanes * kEpScaleGroup;
  static constexpr u32 kTurns = 7;
  static constexpr u32 kPerChunk = kTurns * kPerTurn;
  static_assert(kTurns <= kLanes && kHalf == kLanes * kPerLoad && kGroups == 4);

  const u8* row;
  u8* out;
  u32 values;  // a multiple of 128
  bool ue8m0;  // bytes of scales, else fp32
  u32 lane;

  CROSSDOCK_DEVICE EpCast(const u8* from, u8* to, u32 of_values, bool powers)
      : row(from), out(to), values(of_values), ue8m0(powers), lane(lane_index()) {}

  // `drained()` before the first store to `out`; `read()` when the warp has read all of `row`,
  // whose place may be written again. Returns what `read` does.
  template <class Drained, class Read>
  CROSSDOCK_DEVICE bool run(const Drained& drained, const Read& read) const {
    bool ok = true;
    for (u32 first = 0; first < values; first += kPerChunk) {
      Chunk chunk;
      load(chunk, first);
      if (first + kPerChunk >= values) {
        ptx::sync_warp(kFullMask);
        ok = read();
      }
      const float largest = find_largest(chunk);
      if (first == 0) drained();
      store(chunk, first, largest);
    }
    return ok;
  }

  // Four values of e4m3.
  CROSSDOCK_DEVICE static u32 quantise(u32 low, u32 high, float inverse) {
    const ptx::F32x2 a = ptx::f32_from_bf16x2(low);
    const ptx::F32x2 b = ptx::f32_from_bf16x2(high);
    return ptx::e4m3x2_from_f32(a.lo * inverse, a.hi * inverse) |
           ptx::e4m3x2_from_f32(b.lo * inverse, b.hi * inverse) << 16;
  }
  // Eight.
  CROSSDOCK_DEVICE static U32x2 quantise(U32x4 v, float inverse) {
    return {quantise(v.x, v.y, inverse), quantise(v.z, v.w, inverse)};
  }

 private:
  // What a lane holds of each turn: 8 values of either half of its group.
  struct Chunk {
    U32x4 low[kTurns];
    U32x4 high[kTurns];
  };

  // The lane's first value of turn `turn`, of its own group or of lane k's.
  CROSSDOCK_DEVICE u32 group_at(u32 first, u32 turn) const {
    return first + turn * kPerTurn + lane / kLanes * kEpScaleGroup;
  }
  CROSSDOCK_DEVICE void load(Chunk& chunk, u32 first) const {
    CROSSDOCK_UNROLL
    for (u32 t = 0; t < kTurns; ++t) {
      const u32 at = group_at(first, t);
      chunk.low[t] = chunk.high[t] = {};
      if (at >= values) continue;
      const u8* from = row + (u64{at} + lane % kLanes * kPerLoad) * 2;
      chunk.low[t] = ptx::ld_shared(reinterpret_cast<const U32x4*>(from));
      chunk.high[t] = ptx::ld_shared(reinterpret_cast<const U32x4*>(from + kHalf * 2));
    }
  }

  CROSSDOCK_DEVICE static u32 magnitude(U32x4 v) {
    return ptx::max_magnitude_bf16x2(ptx::max_magnitude_bf16x2(v.x, v.y),
                                     ptx::max_magnitude_bf16x2(v.z, v.w));
  }
  // Gives half of `in` to the lane across and keeps the other half: lanes with the bit keep the odd
  // ones.
  template <u32 kCount>
  CROSSDOCK_DEVICE void exchange(const u32 (&in)[kCount], u32 (&kept)[kCount / 2], u32 bit) const {
    const bool odd = (lane & bit) != 0;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kCount / 2; ++i) {
      const u32 keep = odd ? in[2 * i + 1] : in[2 * i];
      const u32 give = odd ? in[2 * i] : in[2 * i + 1];
      kept[i] = ptx::max_magnitude_bf16x2(keep, ptx::shuffle_xor(kFullMask, give, bit));
    }
  }
  // Of turn `lane % 8`, in the lane's group.
  CROSSDOCK_DEVICE float find_largest(const Chunk& chunk) const {
    u32 eight[kLanes];
    CROSSDOCK_UNROLL
    for (u32 t = 0; t < kLanes; ++t)
      eight[t] = t < kTurns ? ptx::max_magnitude_bf16x2(magnitude(chunk.low[t < kTurns ? t : 0]),
                                                        magnitude(chunk.high[t < kTurns ? t : 0]))
                            : 0;
    u32 four[4], two[2], one[1];
    exchange(eight, four, 1);
    exchange(four, two, 2);
    exchange(two, one, 4);
    return EpCastScale::largest(one[0], kSmallestAmax);
  }

  CROSSDOCK_DEVICE void store(const Chunk& chunk, u32 first, float largest) const {
    const EpCastScale scale = EpCastScale::of(largest, ue8m0);
    CROSSDOCK_UNROLL
    for (u32 t = 0; t < kTurns; ++t) {
      const u32 at = group_at(first, t);
      const float factor = ptx::shuffle(kFullMask, scale.inverse, lane / kLanes * kLanes + t);
      if (at >= values) continue;
      u8* to = out + at + lane % kLanes * kPerLoad;
      ptx::st_shared(reinterpret_cast<U32x2*>(to), quantise(chunk.low[t], factor));
      ptx::st_shared(reinterpret_cast<U32x2*>(to + kHalf), quantise(chunk.high[t], factor));
    }
    const u32 own = group_at(first, lane % kLanes) / kEpScaleGroup;
    const bool has_one = lane % kLanes < kTurns && own < values / kEpScaleGroup;
    u32* const scales = reinterpret_cast<u32*>(out + values);
    if (ue8m0) {
      store_word(scales + own / kGroups, has_one ? scale.bits : 0, has_one);
    } else if (has_one) {
      ptx::st_shared(scales + own, scale.bits);
    }
  }
  // The groups of a turn, which four lanes have, are a word.
  CROSSDOCK_DEVICE void store_word(u32* to, u32 code, bool has_one) const {
    u32 word = code << (lane / kLanes * 8);
    word |= ptx::shuffle_xor(kFullMask, word, kLanes);
    word |= ptx::shuffle_xor(kFullMask, word, 2 * kLanes);
    if (has_one && lane < kLanes) ptx::st_shared(to, word);
  }
};

}  // namespace crossdock::device
