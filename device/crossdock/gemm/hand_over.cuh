// Outputs that the math warps of grouped_gemm leave to another warp, which stores them by tensor
// map: the math warps go on with the next tile while 64 KiB leave the multiprocessor, which takes
// some 2000 cycles. That many bytes have room only where the tile's last stage was:
//
//   math warps                                 warp 1
//     last stage multiplied -> empty[last]
//     wait stored, of the tile before
//     wait empty[last]: all have
//     piece 0 in place of the input -> handed    wait handed
//     pieces 1, 2 in place of the weights        store each piece by tensor map
//     piece 3 in the staging memory -> handed    pieces 0 to 2 read -> returned: the loader goes on
//                                                all read -> stored
//
// A loader that waited for the place would keep all stages behind it waiting. So for one turn the
// ring goes round without that place, which then takes the seventh stage of the next tile:
//
//   places   ... d a (b) | c d a [b] c d a b c ...
//                     |          |
//                     |          sits out its turn: outputs are still being stored
//                     the tile's last stage, then its outputs
//
// A piece is 64 rows of 128 bytes of a warpgroup, with the swizzle of wgmma's tiles, a quarter of
// it from each warp. What SwiGLU makes is one piece, in the staging memory: no stage is needed
// then.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/store.cuh>
#include <crossdock/ptx/tensor.cuh>

namespace crossdock::device {

template <GroupedGemmConfig kConfig>
struct GemmHandOver {
  using Block = GemmBlock<kConfig>;
  static constexpr u32 kPieces = Block::kLends ? 4 : 1;
  static constexpr u32 kWarpBytes = 16 * 128;
  static constexpr u32 kPieceBytes = 4 * kWarpBytes;
  static constexpr u32 kStaged = kPieces - 1;  // the piece in the staging memory
  static_assert(!Block::kLends || (Block::kShared.input_bytes == 2 * kPieceBytes &&
                                   Block::kWeightBytes == 4 * kPieceBytes));

  // Memory of a piece; `stage` is the last one of the tile.
  CROSSDOCK_DEVICE static u8* piece(u32 stage, u32 group, u32 index) {
    if (index == kStaged) return Block::staging(group * 4);
    if (index == 0) return Block::input(stage) + group * kPieceBytes;
    return Block::weights(stage) + (group * 2 + index - 1) * kPieceBytes;
  }
  // By a math warp, which has written its part of the first piece, or of the others.
  CROSSDOCK_DEVICE static void tell(u32 warp, u32 which) {
    ptx::fence_proxy_async_shared();
    ptx::sync_warp(kFullMask);
    ptx::mbarrier_arrive_if(Block::handed(warp / 4, which), lane_index() == 0);
  }
  // By all math warps: the block's tile number `tile` as bf16, 64 columns at a time. Rows that
  // there are not go along.
  template <class Pairs>
  CROSSDOCK_DEVICE static void run(u32 warp, u32 tile, const typename Block::Cursor& last,
                                   const Pairs& pair) {
    Block::wait_stored_before(tile);
    Block::wait_finished(last);
    CROSSDOCK_UNROLL
    for (u32 pass = 0; pass < kPieces; ++pass) {
      const u32 lane = ptx::forgotten(lane_index());
      const GemmStaging part{piece(last.stage, warp / 4, pass) + warp % 4 * kWarpBytes};
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < 8; j += 2) {
        const u32 first = (pass * 8 + j) * 2;
        ptx::store_matrix_x4(part.at(lane % 16, j + lane / 16),
                             {pair(first), pair(first + 1), pair(first + 2), pair(first + 3)});
      }
      if (pass % kStaged == 0) tell(warp, pass / kStaged);
    }
  }
};

// The warp that stores.
template <GroupedGemmConfig kConfig>
struct GemmOutputs {
  using Block = GemmBlock<kConfig>;
  using HandOver = GemmHandOver<kConfig>;
  static constexpr u32 kWidth = kConfig.swiglu ? 1 : 2;  // bytes of a value

  const Block& block;

  CROSSDOCK_DEVICE void run() const {
    const u32 lane = lane_index();
    const u32 tiles = ptx::warp_constant(block.experts.own_tiles());
    typename Block::Walk walk(block.experts);
    for (u32 tile = 0, end = 0; tile < tiles; walk.next(), ++tile) {
      const Tile t = walk.tile();
      end += block.p.shape.k_stages + (Block::kLends ? 1 : 0);
      const u32 stage = (end - 1) % kConfig.stages;
      CROSSDOCK_NO_UNROLL
      for (u32 i = 0; i < 2 * HandOver::kPieces; ++i) {
        const u32 piece = i / 2, group = i % 2;
        if (piece < 2) Block::wait_handed(group, piece, tile);
        if (i == 2 * HandOver::kStaged) ptx::bulk_commit();
        store(t, group, piece, HandOver::piece(stage, group, piece), lane);
      }
      ptx::bulk_commit();
      if constexpr (Block::kLends) {
        ptx::bulk_wait_read<1>();
        ptx::sync_warp(kFullMask);
        ptx::mbarrier_arrive_if(Block::returned(), lane == 0);
      }
      ptx::bulk_wait_read<0>();
      ptx::sync_warp(kFullMask);
      ptx::mbarrier_arrive_if(Block::stored(), lane == 0);
    }
    ptx::bulk_wait<0>();
    ptx::sync_warp(kFullMask);
    if (tiles != 0 && lane == 0) block.tell_cycles();
  }

 private:
  // A piece of 64 rows at once; one that ends inside is copied row by row.
  CROSSDOCK_DEVICE void store(const Tile& t, u32 group, u32 piece, const u8* memory,
                              u32 lane) const {
    const GroupedGemmParams& p = block.p;
    const u32 byte = t.column * (kGemmColumns / (kConfig.swiglu ? 2 : 1)) * kWidth + piece * 128;
    if (byte >= p.shape.columns / (kConfig.swiglu ? 2 : 1) * kWidth) return;
    const u32 first = group * 64;
    if (first + 64 <= t.rows) {
      if (lane == 0) {
        const i32 x = static_cast<i32>(byte / kWidth), y = static_cast<i32>(t.row + first);
        ptx::tensor_store_2d(&p.output_map, x, y, memory);
      }
      return;
    }
    CROSSDOCK_NO_UNROLL
    for (u32 row = first; row < t.rows; row += 16) {
      const GemmStaging part{const_cast<u8*>(memory) + row % 64 * 128};
      part.store(p.output.rows + u64{t.row + row} * p.output.row_stride + byte, p.output.row_stride,
                 t.rows - row, lane);
    }
  }
};

}  // namespace crossdock::device
