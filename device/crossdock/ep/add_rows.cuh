// The additions of ep_combine: a part of all rows of one token, in shared memory, becomes a part of
// the token's output row. By a warp; the order is that of the rows, in fp32, rounded once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_combine.cuh>
#include <crossdock/ptx/convert.cuh>
#include <crossdock/ptx/warp.cuh>

namespace crossdock::device {

struct EpAccumulator {
  float of[8] = {};

  CROSSDOCK_DEVICE void add(U32x4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      const ptx::F32x2 two = ptx::f32_from_bf16x2(words[i]);
      of[2 * i] += two.lo;
      of[2 * i + 1] += two.hi;
    }
  }
  CROSSDOCK_DEVICE U32x4 rounded() const {
    return {ptx::bf16x2_from_f32(of[0], of[1]), ptx::bf16x2_from_f32(of[2], of[3]),
            ptx::bf16x2_from_f32(of[4], of[5]), ptx::bf16x2_from_f32(of[6], of[7])};
  }
};

class EpAddition {
 public:
  // `rows`: the parts of the token's rows, one after the other at the step of a whole part, of
  // which `bytes` are used.
  CROSSDOCK_DEVICE EpAddition(const EpCombineParams& p, const u8* rows, const EpStageNote& what,
                              u32 bytes)
      : output_(p.output),
        from_(reinterpret_cast<const U32x4*>(rows)),
        step_(p.parts.bytes / static_cast<u32>(sizeof(U32x4))),
        what_(what),
        at_(u64{what.part} * p.parts.bytes),
        to_(reinterpret_cast<U32x4*>(p.output.rows + what.token * p.output.row_stride + at_)),
        vectors_(bytes / static_cast<u32>(sizeof(U32x4))) {}

  CROSSDOCK_DEVICE void run() const {
    const bool biased = output_.bias[0] != nullptr || output_.bias[1] != nullptr;
    switch (biased ? 0 : what_.rows) {
      case 1:
        return add_plain<1>();
      case 2:
        return add_plain<2>();
      case 3:
        return add_plain<3>();
      case 4:
        return add_plain<4>();
      default:
        return add_any();
    }
  }

 private:
  // A known number of rows and nothing else: several vectors at a time, all their loads together.
  template <u32 kRows>
  CROSSDOCK_DEVICE void add_plain() const {
    constexpr u32 kBatch = 4;
    for (u32 first = lane_index(); first < vectors_; first += kWarpSize * kBatch) {
      U32x4 v[kBatch][kRows]{};
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 i = first + j * kWarpSize;
        CROSSDOCK_UNROLL
        for (u32 r = 0; r < kRows; ++r)
          if (i < vectors_) v[j][r] = ptx::ld_shared(from_ + r * step_ + i);
      }
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j) {
        EpAccumulator sum;
        CROSSDOCK_UNROLL
        for (u32 r = 0; r < kRows; ++r)
          sum.add(v[j][r]);
        const u32 i = first + j * kWarpSize;
        if (i < vectors_) ptx::st_weak_no_allocate(to_ + i, sum.rounded());
      }
    }
  }
  // Any number of rows, after the biases.
  CROSSDOCK_DEVICE void add_any() const {
    for (u32 i = lane_index(); i < vectors_; i += kWarpSize) {
      EpAccumulator sum;
      CROSSDOCK_UNROLL
      for (u32 k = 0; k < 2; ++k)
        if (output_.bias[k] != nullptr) sum.add(ptx::ld_weak(bias(k) + i));
      for (u32 r = 0; r < what_.rows; ++r)
        sum.add(ptx::ld_shared(from_ + r * step_ + i));
      ptx::st_weak_no_allocate(to_ + i, sum.rounded());
    }
  }
  CROSSDOCK_DEVICE const U32x4* bias(u32 k) const {
    return reinterpret_cast<const U32x4*>(output_.bias[k] + what_.token * output_.bias_stride[k] +
                                          at_);
  }

  const EpCombineOutput& output_;
  const U32x4* from_;
  u32 step_;
  EpStageNote what_;
  u64 at_;
  U32x4* to_;
  u32 vectors_;
};

}  // namespace crossdock::device
