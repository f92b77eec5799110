// Weights in e2m1 on their way to shared memory, in grouped_gemm: packed blocks by bulk loads, with
// the stages of the input or in a ring of their own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/block.cuh>
#include <crossdock/ptx/bulk.cuh>

namespace crossdock::device {

// Weights in e2m1: the blocks of a tile's columns for a stage, each one bulk load. Of the last
// tile, which may have 128 columns, the same block twice.
template <GroupedGemmConfig kConfig>
CROSSDOCK_DEVICE void gemm_load_packed(const GemmBlock<kConfig>& block, const Tile& t, u32 k,
                                       u8* to, ptx::MBarrier* full) {
  constexpr u32 kBlocks = kGemmColumns / kFp4BlockRows;
  const GemmShape& shape = block.p.shape;
  const u32 blocks = shape.columns / kFp4BlockRows;
  CROSSDOCK_UNROLL
  for (u32 i = 0; i < kBlocks; ++i) {
    const u64 row = u64{t.expert} * blocks + min_of(t.column * kBlocks + i, blocks - 1);
    ptx::bulk_load(to + i * kFp4BlockBytes,
                   block.p.weight_blocks + (row * shape.k_stages + k) * kFp4BlockBytes,
                   kFp4BlockBytes, full);
  }
}

// Of weights that other warps unpack: a ring of their own, by one thread, which does not wait for
// what the input waits for.
template <GroupedGemmConfig kConfig>
struct GemmPackedLoader {
  using Block = GemmBlock<kConfig>;
  const Block& block;
  typename Block::PackedCursor at = {};

  CROSSDOCK_DEVICE void run() {
    for (typename Block::Walk walk(block.experts); walk.valid(); walk.next()) {
      const Tile t = walk.tile();
      for (u32 k = 0; k < block.p.shape.k_stages; ++k) {
        if (!block.wait_packed_empty(at)) return settle();
        ptx::MBarrier* full = Block::packed_full(at.stage);
        ptx::mbarrier_arrive_expect_tx(full, Block::kShared.packed_bytes);
        gemm_load_packed<kConfig>(block, t, k, Block::packed(at.stage), full);
        at.advance();
      }
    }
  }

 private:
  CROSSDOCK_DEVICE void settle() const {
    for (u32 s = 0; s < kGemmPackedStages; ++s)
      settle_stage(block.p.common, Block::packed_full(s), s < at.stage ? at.parity : at.parity ^ 1);
  }
};

}  // namespace crossdock::device
