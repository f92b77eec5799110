// The additions of ep_combine where rows have travelled compressed: as EpAddition, a part of all
// rows of one token, in shared memory, becomes a part of the token's output row. By a warp; the
// order is that of the rows, in fp32, rounded once. A part is whole units.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/payload.cuh>
#include <crossdock/layout/ep_combine.cuh>

namespace crossdock::device {

template <EpPayload kPayload>
class EpPackedAddition {
  using Sums = typename EpUnpacker<kPayload>::Sums;

 public:
  // As EpAddition.
  CROSSDOCK_DEVICE EpPackedAddition(const EpCombineParams& p, const u8* rows,
                                    const EpStageNote& what, u32 bytes)
      : output_(p.output),
        rows_(rows),
        step_(p.parts.bytes),
        what_(what),
        units_(bytes / kUnit),
        first_(what.part * (p.parts.bytes / kUnit)) {}

  CROSSDOCK_DEVICE void run() const {
    for (u32 unit = 0; unit < units_; ++unit) {
      Sums sums{};
      add_biases(sums, unit);
      for (u32 row = 0; row < what_.rows; ++row)
        EpUnpacker<kPayload>::add(rows_ + row * step_ + unit * kUnit, lane_index(), sums);
      store(sums, unit);
    }
  }

 private:
  static constexpr u32 kUnit = ep_unit_bytes(kPayload);

  // Bytes of a row of bf16 before the lane's values.
  CROSSDOCK_DEVICE u64 at(u32 unit) const {
    return (u64{first_ + unit} * kEpUnitValues + lane_index() * 16) * 2;
  }
  CROSSDOCK_DEVICE void add_biases(Sums& sums, u32 unit) const {
    CROSSDOCK_UNROLL
    for (u32 k = 0; k < 2; ++k) {
      if (output_.bias[k] == nullptr) continue;
      const auto* from = reinterpret_cast<const U32x4*>(
          output_.bias[k] + what_.token * output_.bias_stride[k] + at(unit));
      CROSSDOCK_UNROLL
      for (u32 half = 0; half < 2; ++half) {
        const U32x4 v = ptx::ld_weak(from + half);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        CROSSDOCK_UNROLL
        for (u32 i = 0; i < 4; ++i) {
          const ptx::F32x2 two = ptx::f32_from_bf16x2(words[i]);
          sums[half * 8 + 2 * i] += two.lo;
          sums[half * 8 + 2 * i + 1] += two.hi;
        }
      }
    }
  }
  CROSSDOCK_DEVICE void store(const Sums& sums, u32 unit) const {
    auto* to = reinterpret_cast<U32x4*>(output_.rows + what_.token * output_.row_stride + at(unit));
    CROSSDOCK_UNROLL
    for (u32 half = 0; half < 2; ++half) {
      const float* s = sums + half * 8;
      ptx::st_weak_no_allocate(
          to + half, U32x4{ptx::bf16x2_from_f32(s[0], s[1]), ptx::bf16x2_from_f32(s[2], s[3]),
                           ptx::bf16x2_from_f32(s[4], s[5]), ptx::bf16x2_from_f32(s[6], s[7])});
    }
  }

  const EpCombineOutput& output_;
  const u8* rows_;
  u32 step_;
  EpStageNote what_;
  u32 units_;
  u32 first_;  // unit of the row
};

}  // namespace crossdock::device
