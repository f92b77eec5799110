// The main loop for weights in e2m1: like that of few rows (swapped.cuh), but a thread takes its
// part of the weights from shared memory, makes e4m3 of it in registers (layout/fp4_weights.cuh)
// and multiplies from there.
//
//   tensor core            piece 0 of s | piece 1 of s            | piece 0 of s + 1
//   integer units   ...                 | unpack piece 0 of s + 1 | unpack piece 1 of s + 1
//                     unpack piece 1 of s                 promote s, free it
//
// Eight values take nine instructions: a byte of the shifts picks the eight e4m3 codes that
// magnitudes can be, from a table in shared memory; byte permutes pick four of them at a time, and
// signs are merged.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/swapped.cuh>

namespace crossdock::device {

template <GroupedGemmConfig kConfig>
struct GemmUnpacked : GemmSwapped<kConfig> {
  using Base = GemmSwapped<kConfig>;
  using Block = GemmBlock<kConfig>;
  static constexpr u32 kPieces = Base::kPieces;
  static constexpr u32 kSteps = 4;  // of 32 values of K in a stage

  u32 words[kPieces][kSteps * 2];  // [step]{row, row + 8}
  u32 shifts[kPieces][2];          // {row, row + 8}: a byte for each step
  u32 fragments[kPieces][kSteps][4];

  u32 own_words, own_shifts;  // where the thread's are in a stage

  CROSSDOCK_DEVICE GemmUnpacked(const Block& of, u32 warp) : Base(of, warp) {
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
      // Not before: with many rows there are no registers for scales beside the fragments.
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
    constexpr u32 kPieceWords = fp4_word_offset(64, 0, 0), kTwoSteps = fp4_word_offset(0, 2, 0);
    constexpr u32 kPieceShifts = fp4_shift_offset(64, 0) - kFp4CodeBytes;
    const u8* weights = Block::weights(this->at.stage);
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece) {
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < 2; ++i) {
        const u8* from = weights + own_words + piece * kPieceWords + i * kTwoSteps;
        const U32x4 v = ptx::ld_shared(reinterpret_cast<const U32x4*>(from));
        words[piece][4 * i] = v.x;
        words[piece][4 * i + 1] = v.y;
        words[piece][4 * i + 2] = v.z;
        words[piece][4 * i + 3] = v.w;
      }
      const u8* from = weights + own_shifts + piece * kPieceShifts;
      const U32x2 v = ptx::ld_shared(reinterpret_cast<const U32x2*>(from));
      shifts[piece][0] = v.x;
      shifts[piece][1] = v.y;
    }
  }
  template <u32 kPiece>
  CROSSDOCK_DEVICE void unpack() {
    const u8* table = Block::fp4_table();
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kSteps * 2; ++i) {
      const u32 step = i / 2, second = i % 2;
      const u32 entry = ptx::permute_bytes(shifts[kPiece][second], 0, 0x4440 | step);
      const U32x2 codes = ptx::ld_shared(reinterpret_cast<const U32x2*>(table + entry));
      const u32 word = words[kPiece][i];
      const u32 magnitudes = word & 0x77777777u;
      fragments[kPiece][step][second] =
          ptx::permute_bytes(codes.x, codes.y, magnitudes) | (word & 0x80808080u);
      fragments[kPiece][step][second + 2] =
          ptx::permute_bytes(codes.x, codes.y, magnitudes >> 16) | (word << 4 & 0x80808080u);
    }
  }
  template <u32 kPiece>
  CROSSDOCK_DEVICE void issue(u32 stage) {
    const u64 b = ptx::matrix_descriptor(Block::input(stage), ptx::k_major(ptx::Swizzle::k128));
    ptx::pin_accumulators(this->part[kPiece]);
    pin_fragments<kPiece>();
    ptx::wgmma_fence();
    CROSSDOCK_UNROLL
    for (u32 step = 0; step < kSteps; ++step)
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
    for (u32 step = 0; step < kSteps; ++step)
      ptx::pin_registers(fragments[kPiece][step]);
  }
};

}  // namespace crossdock::device
