// Scales in grouped_gemm's main loops: of the input by row, from the stage; of the weights by 128
// columns, from global memory, a warp's lanes together. Either f32 or ue8m0, which is a power of
// two in a byte; a word of the input's scales then has those of four stages.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/grouped_gemm.cuh>
#include <crossdock/ptx/convert.cuh>
#include <crossdock/ptx/memory.cuh>
#include <crossdock/ptx/warp.cuh>
#include <crossdock/ptx/wgmma.cuh>

namespace crossdock::device {

inline constexpr u32 kScalesOfWord = 4;  // ue8m0

// Which row of the input's scales a stage needs.
template <GroupedGemmConfig kConfig>
CROSSDOCK_DEVICE u32 gemm_scale_row(u32 stage) {
  return kConfig.ue8m0 ? stage / kScalesOfWord : stage;
}
// The number of a code: 2^(code - 127). The smallest counts as 0, and NaN as infinite, since
// telling them apart would take as long as all the rest.
CROSSDOCK_DEVICE float gemm_ue8m0(u32 code) {
  return bit_cast<float>(code << 23);
}
// What a stage needs of a row's word.
template <GroupedGemmConfig kConfig>
CROSSDOCK_DEVICE float gemm_scale_in(u32 word, u32 stage) {
  if constexpr (!kConfig.ue8m0) {
    return bit_cast<float>(word);
  } else {
    return gemm_ue8m0(ptx::permute_bytes(word, 0, 0x4440 | stage % kScalesOfWord));
  }
}
// Of one row, `at` in the stage's memory.
template <GroupedGemmConfig kConfig>
CROSSDOCK_DEVICE float gemm_input_scale(const float* at, u32 stage) {
  return gemm_scale_in<kConfig>(ptx::ld_shared(reinterpret_cast<const u32*>(at)), stage);
}

// The scales of a tile's weights, in pages of 32 stages: each lane has those of one stage of the
// page and, loaded ahead, of one of the next; all lanes get those of a stage from the lane that has
// them.
template <GroupedGemmConfig kConfig>
struct GemmWeightScales {
  template <bool kUe8m0, class Unused = void>
  struct Kind {
    using Stored = float;
    using Value = float;
    CROSSDOCK_DEVICE static float number(float v) { return v; }
  };
  template <class Unused>
  struct Kind<true, Unused> {
    using Stored = u8;
    using Value = u32;
    CROSSDOCK_DEVICE static float number(u32 v) { return gemm_ue8m0(v); }
  };
  using Own = Kind<kConfig.ue8m0>;
  using Stored = typename Own::Stored;
  using Value = typename Own::Value;

  // With few rows a warpgroup needs both only for gate and up.
  static constexpr bool kBoth = !kConfig.swapped || kConfig.swiglu;

  const Stored* of = nullptr;  // the first 128 columns of the tile
  u32 second = 0;              // distance to those of the second
  u32 stages = 0;
  Value now[2] = {0, 0}, next[2] = {0, 0};
  // Added to the number of a lane it means nothing, but what depends on the lane stays in ordinary
  // registers: else values that all lanes share would be moved to the warp's own.
  u32 turns = ptx::forgotten(lane_index() * kWarpSize);

  // By the loader, ahead of begin(): those of the first page of the tile at `column`, in units of
  // scale groups, are on their way to the L2 cache. They come from further away when all
  // multiprocessors read new weights, and a tile cannot begin without them.
  CROSSDOCK_DEVICE static void ask(const GroupedGemmParams& p, u32 expert, u32 column) {
    const u32 groups = p.shape.columns / kGemmScaleGroup;
    const u32 last = min_of(p.shape.scale_groups, kWarpSize) - 1;
    const Stored* of = static_cast<const Stored*>(p.weight_scales) +
                       (u64{expert} * groups + column) * p.shape.scale_groups;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 2; ++i) {
      if (column + i >= groups) return;
      ptx::prefetch_l2(of + i * p.shape.scale_groups);
      ptx::prefetch_l2(of + i * p.shape.scale_groups + last);
    }
  }
  // A new tile. `half`: which 128 of its columns, where they are all that is needed.
  CROSSDOCK_DEVICE void begin(const GroupedGemmParams& p, const GemmRecord& r, u32 half = 0) {
    const u32 groups = p.shape.columns / kGemmScaleGroup;
    u32 first = r.column / kGemmScaleGroup;
    if constexpr (!kBoth) first = min_of(first + half, groups - 1);
    of = static_cast<const Stored*>(p.weight_scales) +
         (u64{r.expert} * groups + first) * p.shape.scale_groups;
    second = first + 1 < groups ? p.shape.scale_groups : 0;  // the last tile may have 128 columns
    stages = p.shape.k_stages;
    load(0);
  }
  CROSSDOCK_DEVICE float first_of(u32 stage) const { return of_stage(now[0], stage); }
  CROSSDOCK_DEVICE float second_of(u32 stage) const { return of_stage(now[1], stage); }
  // Before the first stage of a page, which is `stage`.
  CROSSDOCK_DEVICE void turn(u32 stage) {
    now[0] = next[0];
    now[1] = next[1];
    if (stage + kWarpSize < stages) load(stage + kWarpSize);
  }

 private:
  // A number before it goes round: what is made of it afterwards would be the same in all lanes,
  // and then computed in registers that a warp has once, with moves among the wgmmas.
  CROSSDOCK_DEVICE float of_stage(Value mine, u32 stage) const {
    return ptx::shuffle(kFullMask, Own::number(mine), stage + turns);
  }
  CROSSDOCK_DEVICE void load(u32 stage) {
    const u32 mine = min_of(stage + turns / kWarpSize, stages - 1);
    ptx::ld_nc_if(next[0], of + mine, true);
    if constexpr (kBoth) ptx::ld_nc_if(next[1], of + second + mine, true);
  }
};

}  // namespace crossdock::device
