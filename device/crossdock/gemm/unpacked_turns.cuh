// The main loop for weights in e2m1 and tiles of 64 rows, whose sums leave registers for one set of
// what is unpacked: the two pieces of a stage take turns.
//
//   tensor core            piece 0 of s | piece 1 of s            | piece 0 of s + 1
//   integer units   ...                 | unpack piece 0 of s + 1 | unpack piece 1 of s + 1
//                     unpack piece 1 of s                 promote s, free it
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/fp4.cuh>
#include <crossdock/gemm/swapped.cuh>

namespace crossdock::device {

template <GroupedGemmConfig kConfig>
struct GemmUnpackedInTurns : GemmSwapped<kConfig> {
  using Base = GemmSwapped<kConfig>;
  using Block = GemmBlock<kConfig>;
  static constexpr u32 kPieces = Base::kPieces;

  GemmFp4Words words[kPieces];
  u32 fragments[kPieces][kFp4Steps][4];
  u32 own_words, own_shifts;  // where the thread's are in a stage

  CROSSDOCK_DEVICE GemmUnpackedInTurns(const Block& of, u32 warp) : Base(of, warp) {
    const u32 lane = lane_index(), first = warp / 4 * kFp4BlockBytes;
    own_words = first + fp4_word_offset(warp % 4 * 16 + lane / 4, 0, lane % 4);
    own_shifts = first + fp4_shift_offset(warp % 4 * 16 + lane / 4, 0);
  }

  CROSSDOCK_DEVICE void start() {
    this->block.wait_full(this->at);
    read();
    unpack<0>();
  }
  CROSSDOCK_DEVICE void run(bool more) {
    const u32 stages = this->block.p.shape.k_stages;
    CROSSDOCK_NO_UNROLL
    for (u32 k = 0; k < stages; ++k) {
      const u32 stage = this->at.stage;
      issue<0>(stage);
      unpack<1>();
      issue<1>(stage);
      this->at.advance();
      if (k + 1 < stages || more) {
        this->block.wait_full(this->at);
        read();
      }
      wait<0, 1>();
      unpack<0>();  // of the next stage; after the last one, of what there was
      // Not before: there are no registers for scales beside the fragments.
      if (k % kWarpSize == 0) this->weight_scales.turn(k);
      const auto scales = this->load_scales(stage, k);
      this->promote(scales, 0);
      wait<1, 0>();
      this->promote(scales, 1);
      ptx::sync_warp(kFullMask);  // all lanes have read their scales
      gemm_release<kConfig>(stage);
    }
    if (this->block.p.bias.values != nullptr) this->add_bias();
  }

 private:
  // What the thread needs of the stage that has come.
  CROSSDOCK_DEVICE void read() {
    constexpr u32 kPieceWords = fp4_word_offset(64, 0, 0);
    constexpr u32 kPieceShifts = fp4_shift_offset(64, 0) - kFp4CodeBytes;
    const u8* weights = Block::weights(this->at.stage);
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece)
      words[piece].read(weights + own_words + piece * kPieceWords,
                        weights + own_shifts + piece * kPieceShifts);
  }
  template <u32 kPiece>
  CROSSDOCK_DEVICE void unpack() {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kFp4Steps * 2; ++i) {
      const U32x2 v = words[kPiece].unpack(Block::fp4_table(), i / 2, i % 2);
      fragments[kPiece][i / 2][i % 2] = v.x;
      fragments[kPiece][i / 2][i % 2 + 2] = v.y;
    }
  }
  template <u32 kPiece>
  CROSSDOCK_DEVICE void issue(u32 stage) {
    const u64 b = ptx::matrix_descriptor(Block::input(stage), ptx::k_major(ptx::Swizzle::k128));
    ptx::pin_accumulators(this->part[kPiece]);
    pin_fragments<kPiece>();
    ptx::wgmma_fence();
    CROSSDOCK_UNROLL
    for (u32 step = 0; step < kFp4Steps; ++step)
      ptx::wgmma_e4m3(this->part[kPiece], fragments[kPiece][step], ptx::advanced(b, 32 * step),
                      step != 0);
    ptx::wgmma_commit();
  }
  // The products of a piece are done: its fragments may be overwritten.
  template <u32 kPiece, u32 kPending>
  CROSSDOCK_DEVICE void wait() {
    ptx::wgmma_wait<kPending>(this->part[kPiece]);
    pin_fragments<kPiece>();
  }
  template <u32 kPiece>
  CROSSDOCK_DEVICE void pin_fragments() {
    CROSSDOCK_UNROLL
    for (u32 step = 0; step < kFp4Steps; ++step)
      ptx::pin_registers(fragments[kPiece][step]);
  }
};

}  // namespace crossdock::device
