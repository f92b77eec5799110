// The load warpgroup of grouped_gemm: warp 0 brings tiles of weights and input, and the input's
// scales, by tensor map; warps 1 to 3 bring rows of the input through a list, with their scales.
// Where weights are unpacked by others, warp 1 brings those (packed.cuh), and rows are left to two.
// Where no rows are gathered, warp 1 may store outputs (hand_over.cuh).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/block.cuh>
#include <crossdock/gemm/hand_over.cuh>
#include <crossdock/gemm/packed.cuh>
#include <crossdock/gemm/scales.cuh>
#include <crossdock/ptx/async_copy.cuh>
#include <crossdock/ptx/bulk.cuh>
#include <crossdock/ptx/descriptor.cuh>

namespace crossdock::device {

// Warp 0; one thread.
template <GroupedGemmConfig kConfig>
struct GemmTileLoader {
  using Block = GemmBlock<kConfig>;
  const Block& block;
  typename Block::Cursor at = {};

  CROSSDOCK_DEVICE void run() {
    typename Block::Walk walk(block.experts);
    // In the warp's own registers, where the copies want their operands: what is moved there takes
    // turns of the scheduler from math warps.
    const u32 tiles = ptx::lane_constant(block.experts.own_tiles());
    for (u32 tile = 0; tile < tiles; walk.next(), ++tile) {
      const Tile t = constant(walk.tile());
      for (u32 k = 0; k < block.p.shape.k_stages; ++k) {
        if constexpr (Block::kLends)
          if (k == block.p.skipped) at.skip();
        if (!block.wait_empty(at)) return give_up();
        if constexpr (Block::kLends)
          if (k == Block::kReturned && block.hands_over() && tile != 0)
            block.wait_returned(tile - 1);
        if (k == 0) {
          const GemmRecord r{t.row, t.rows, t.column * kGemmColumns, t.expert};
          ptx::st_shared(Block::record(tile), bit_cast<U32x4>(r));
          if constexpr (Block::kHandsOver || kConfig.spare_integers)
            GemmWeightScales<kConfig>::ask(block.p, t.expert, r.column / kGemmScaleGroup);
        }
        load(t, k);
        at.advance();
      }
    }
    // All stages have been multiplied: the deadline of the other warps' waits.
    for (u32 s = 0; s < kConfig.stages; ++s, at.advance())
      if (!block.wait_empty(at)) return give_up();
  }

 private:
  CROSSDOCK_DEVICE static Tile constant(const Tile& t) {
    return {ptx::lane_constant(t.expert), ptx::lane_constant(t.row), ptx::lane_constant(t.rows),
            ptx::lane_constant(t.column)};
  }
  CROSSDOCK_DEVICE void load(const Tile& t, u32 k) const {
    const GroupedGemmParams& p = block.p;
    ptx::MBarrier* full = Block::full(at.stage);
    const i32 column = static_cast<i32>(k * (kConfig.fp8 ? 128 : 64));
    const u32 weight_row = t.expert * p.shape.columns + t.column * kGemmColumns;
    ptx::mbarrier_arrive_expect_tx(full, block.full_bytes());
    if constexpr (kConfig.fp4 && !Block::kUnpacksApart) {
      gemm_load_packed<kConfig>(block, t, k, Block::weights(at.stage), full);
    } else if constexpr (!kConfig.fp4) {
      ptx::tensor_load_2d(Block::weights(at.stage), &p.weight_map, column,
                          static_cast<i32>(weight_row), full);
    }
    if (block.gathers()) return;
    ptx::tensor_load_2d(Block::input(at.stage), &p.input_map, column, static_cast<i32>(t.row),
                        full);
    if constexpr (kConfig.fp8)
      ptx::tensor_load_2d(Block::input_scales(at.stage), &p.input_scale_map,
                          static_cast<i32>(t.row), static_cast<i32>(gemm_scale_row<kConfig>(k)),
                          full);
  }
  // The math warps store nothing more, and no load is on its way when the block has ended.
  CROSSDOCK_DEVICE void give_up() const {
    static_assert(!Block::kLends || !Block::kUnpacksApart,
                  "where a place sits out a turn each has a parity of its own, and only loads of "
                  "weights that are unpacked apart end here: the parities below are those of a "
                  "ring without gaps");
    ptx::unordered_from_here();  // they may be reading the records
    for (u32 i = 0; i < kGemmRecords; ++i)
      ptx::st_shared(Block::record(i), U32x4{0, 0, 0, 0});
    for (u32 s = 0; s < kConfig.stages; ++s)
      settle_stage(block.p.common, Block::full(s), s < at.stage ? at.parity : at.parity ^ 1);
  }
};

// The last two or three warps: the rows of a tile, 16 bytes at a time, eight lanes to a row, with
// the swizzle that a tensor map would give; and their scales. A stage is announced when kLag
// further ones are on their way. (A tensor map with boxes of one row brings a row in 32 cycles, a
// third of the speed.)
template <GroupedGemmConfig kConfig>
struct GemmGather {
  using Block = GemmBlock<kConfig>;
  static constexpr u32 kWarps = Block::kGatherWarps;
  static constexpr u32 kLag = min_of(2u, kConfig.stages - 2);
  // Rows are dealt to the warps by fours, which one instruction copies.
  static constexpr u32 kFours = kConfig.tile_rows / 4;
  static constexpr u32 kFoursHere = ceil_div(kFours, kWarps);
  // A block that has warps to unpack leaves this one few registers.
  static constexpr u32 kAtOnce = Block::kUnpacksApart ? 2 : kFoursHere;
  static_assert(kLag + 2 <= kConfig.stages, "the math warps have a stage while one is waited for");

  const Block& block;
  u32 warp;
  u32 lane;
  typename Block::Cursor at = {}, done = {};
  u32 pending = 0;

  CROSSDOCK_DEVICE GemmGather(const Block& of, u32 index)
      : block(of), warp(index), lane(lane_index()) {}

  CROSSDOCK_DEVICE void run() {
    const u32 stages = block.p.shape.k_stages;
    for (typename Block::Walk walk(block.experts); walk.valid(); walk.next()) {
      find(walk.tile());
      for (u32 k = 0; k < stages; ++k) {
        if (!block.wait_empty(at)) return;
        copy(k);
        if constexpr (kConfig.fp8) copy_scales(k);
        ptx::copy_async_commit();
        at.advance();
        if (++pending <= kLag) continue;
        ptx::copy_async_wait<kLag>();
        announce();
      }
    }
    ptx::copy_async_wait<0>();
    while (pending != 0)
      announce();
  }

 private:
  // The oldest stage has arrived.
  CROSSDOCK_DEVICE void announce() {
    ptx::fence_proxy_async_shared();
    ptx::sync_warp(kFullMask);
    if (lane == 0) ptx::mbarrier_arrive(Block::full(done.stage));
    done.advance();
    --pending;
  }
  // The warp's `i`-th row of the tile.
  CROSSDOCK_DEVICE u32 own_row(u32 i) const { return (i / 4 * kWarps + warp) * 4 + i % 4; }

  // Where the rows of the tile are, null where there are none; each warp for its own.
  CROSSDOCK_DEVICE void find(const Tile& t) const {
    ptx::sync_warp(kFullMask);
    for (u32 i = lane; i < kFoursHere * 4; i += kWarpSize) {
      const u32 row = own_row(i);
      if (row >= kConfig.tile_rows) break;
      const i32 source = row < t.rows ? listed(t.row + row) : -1;
      const GroupedGemmParams& p = block.p;
      Block::sources()[row] = {
          source < 0 ? nullptr : p.input_rows + static_cast<u32>(source) * p.input_row_stride,
          source < 0 || !kConfig.fp8 ? nullptr : p.input_scales + source};
    }
    ptx::sync_warp(kFullMask);
  }
  CROSSDOCK_DEVICE i32 listed(u32 place) const {
    const i32 row = ptx::ld_weak(block.p.rows.list + place);
    if (row < static_cast<i32>(block.p.input_count)) return row;
    raise_fault(block.p.common, {Phase::kListedRow, kNoPeer, place}, static_cast<u32>(row), 0);
    return -1;
  }
  CROSSDOCK_DEVICE void copy(u32 k) const {
    const u32 chunk = lane % 8;
    u8* to = Block::input(at.stage);
    const u64 from = u64{k} * kGemmStageBytes + chunk * 16;
    CROSSDOCK_NO_UNROLL
    for (u32 first = 0; first < kFoursHere; first += kAtOnce) {
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 row = own_row((first + i) * 4 + lane / 8);
        if (kFours % (kWarps * kAtOnce) != 0 && row >= kConfig.tile_rows) break;
        const u8* source = Block::sources()[row].row;
        ptx::copy_async_16(
            to + ptx::swizzled(ptx::Swizzle::k128, row * kGemmStageBytes + chunk * 16),
            source == nullptr ? block.p.input_rows : source + from, source == nullptr ? 0 : 16);
      }
    }
  }
  CROSSDOCK_DEVICE void copy_scales(u32 k) const {
    for (u32 i = lane; i < kFoursHere * 4; i += kWarpSize) {
      const u32 row = own_row(i);
      if (row >= kConfig.tile_rows) break;
      const float* source = Block::sources()[row].scales;
      ptx::copy_async_4(Block::input_scales(at.stage) + row,
                        source == nullptr
                            ? block.p.input_scales
                            : source + gemm_scale_row<kConfig>(k) * block.p.input_scale_columns,
                        source == nullptr ? 0 : 4);
    }
  }
};

template <GroupedGemmConfig kConfig>
struct GemmLoadRole {
  static constexpr u32 kWarps = kGemmLoadWarps;
  static constexpr u32 kRegisters = gemm_unpacks_apart(kConfig) ? 40 : 72;
  CROSSDOCK_DEVICE static void run(const GemmBlock<kConfig>& block, u32 warp) {
    constexpr u32 kFirstGather = kWarps - GemmBlock<kConfig>::kGatherWarps;
    if (warp == 0) {
      if (lane_index() == 0) GemmTileLoader<kConfig>{block}.run();
    } else if (warp < kFirstGather) {
      if (lane_index() == 0) GemmPackedLoader<kConfig>{block}.run();
    } else if (block.gathers()) {
      GemmGather<kConfig>(block, warp - kFirstGather).run();
    } else if constexpr (GemmBlock<kConfig>::kHandsOver) {
      if (warp == kFirstGather && block.hands_over()) GemmOutputs<kConfig>{block}.run();
    }
  }
};

}  // namespace crossdock::device
