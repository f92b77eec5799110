// The two math warpgroups of grouped_gemm: main loop and epilogue of one tile after the other.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/hand_over.cuh>
#include <crossdock/gemm/multiply.cuh>
#include <crossdock/gemm/swapped.cuh>
#include <crossdock/gemm/swiglu.cuh>
#include <crossdock/gemm/unpacked.cuh>
#include <crossdock/gemm/unpacked_turns.cuh>
#include <crossdock/role/role.cuh>

namespace crossdock::device {

// The main loop and what it calls when a tile is finished.
template <GroupedGemmConfig kConfig, bool kSwapped = kConfig.swapped, bool kFp8 = kConfig.fp8,
          bool kFp4 = kConfig.fp4>
struct GemmMath : GemmPlain<kConfig> {
  using GemmPlain<kConfig>::GemmPlain;
};
template <GroupedGemmConfig kConfig, bool kFp4>
struct GemmMath<kConfig, false, true, kFp4> : GemmPromoted<kConfig> {
  using GemmPromoted<kConfig>::GemmPromoted;
};
template <GroupedGemmConfig kConfig, bool kFp8>
struct GemmMath<kConfig, true, kFp8, false> : GemmSwapped<kConfig> {
  using GemmSwapped<kConfig>::GemmSwapped;
};
template <GroupedGemmConfig kConfig>
  requires(kConfig.tile_rows < 64)
struct GemmMath<kConfig, true, true, true> : GemmUnpacked<kConfig> {
  using GemmUnpacked<kConfig>::GemmUnpacked;
};
template <GroupedGemmConfig kConfig>
  requires(kConfig.tile_rows == 64)
struct GemmMath<kConfig, true, true, true> : GemmUnpackedInTurns<kConfig> {
  using GemmUnpackedInTurns<kConfig>::GemmUnpackedInTurns;
};

template <GroupedGemmConfig kConfig>
struct GemmMathRole {
  static constexpr u32 kWarps = kGemmMathWarps;
  static constexpr u32 kRegisters = 216;

  CROSSDOCK_DEVICE static void run(const GemmBlock<kConfig>& block, u32 warp) {
    const u32 tiles = ptx::warp_constant(block.experts.own_tiles());
    if (tiles == 0) return;
    GemmMath<kConfig> math(block, warp);
    math.start();
    GemmRecord record = read(0);
    math.begin(record);
    GemmBiasRow<kConfig>::fetch(block, warp, record);
    for (u32 tile = 0; tile < tiles; ++tile) {
      const bool more = tile + 1 < tiles;
      math.run(more);
      // The next tile's record has come with its first stage, for which run() has waited.
      const GemmRecord done = record;
      if (more) {
        record = read(tile + 1);
        math.begin(record);
      }
      store(block, warp, tile, done, math);
      math.clear();
      if (more) GemmBiasRow<kConfig>::fetch(block, warp, record);
    }
    math.finish();
    if (warp == 0 && lane_index() == 0 && !block.hands_over()) block.tell_cycles();
  }

 private:
  CROSSDOCK_DEVICE static GemmRecord read(u32 tile) {
    const auto r = bit_cast<GemmRecord>(ptx::ld_shared(GemmBlock<kConfig>::record(tile)));
    return {ptx::warp_constant(r.row), ptx::warp_constant(r.rows), ptx::warp_constant(r.column),
            ptx::warp_constant(r.expert)};
  }
  CROSSDOCK_DEVICE static void store(const GemmBlock<kConfig>& block, u32 warp, u32 tile,
                                     const GemmRecord& record, const GemmMath<kConfig>& math) {
    if constexpr (GemmBlock<kConfig>::kLends)
      if (block.hands_over())
        return GemmHandOver<kConfig>::run(warp, tile, math.last_stage(),
                                          [&](u32 i) { return math.pair(i); });
    if constexpr (kConfig.swapped) {
      GemmSwappedStore<kConfig>::run(block, warp, record, math);
    } else if constexpr (kConfig.swiglu) {
      GemmSwigluStore<kConfig>::run(block, warp, tile, record, [&](u32 i) { return math.pair(i); });
    } else {
      GemmBf16Store<kConfig>::run(block, warp, record, [&](u32 i) { return math.pair(i); });
    }
  }
};

}  // namespace crossdock::device
