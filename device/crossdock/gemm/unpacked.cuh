// The main loop for weights in e2m1: like that of few rows (swapped.cuh), but a thread takes its
// part of the weights from shared memory, makes e4m3 of it in registers (gemm/fp4.cuh) and
// multiplies from there. There are two sets of registers for what is made:
//
//   tensor core     stage s                      s + 1
//   integer units   unpack s + 1                 unpack s + 2
//                   read s + 2     promote s     read s + 3     promote s + 1
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/fp4.cuh>
#include <crossdock/gemm/swapped.cuh>

namespace crossdock::device {

template <GroupedGemmConfig kConfig>
struct GemmUnpacked : GemmSwapped<kConfig> {
  using Base = GemmSwapped<kConfig>;
  using Block = GemmBlock<kConfig>;
  static constexpr u32 kPieces = Base::kPieces;
  // Parts of an address and of a word as products of bytes, not by the integer units.
  static constexpr bool kByProducts = kConfig.spare_integers;

  GemmFp4Words words[kPieces];
  u32 fragments[2][kPieces][kFp4Steps][4];
  typename Block::Cursor ahead = {};  // the next stage to be read; in the end, the last one
  u32 unread;                         // stages, of all tiles
  bool odd = false;                   // the next stage is in the second set
  u32 own_words, own_shifts;          // where the thread's are in a stage
  u32 input_low;

  CROSSDOCK_DEVICE GemmUnpacked(const Block& of, u32 warp) : Base(of, warp) {
    const u32 lane = lane_index(), first = warp / 4 * kFp4BlockBytes;
    own_words = ptx::forgotten(first + fp4_word_offset(warp % 4 * 16 + lane / 4, 0, lane % 4));
    own_shifts = ptx::forgotten(first + fp4_shift_offset(warp % 4 * 16 + lane / 4, 0));
    input_low = gemm_descriptor_low(Block::input(0));
    unread = ptx::warp_constant(of.experts.own_tiles() * of.p.shape.k_stages);
  }

  CROSSDOCK_DEVICE void start() {
    read();
    unpack<0>();
    read();
  }
  CROSSDOCK_DEVICE void run(bool) {
    const u32 stages = this->block.p.shape.k_stages;
    u32 k = 0;
    if (odd) run_stage<1>(k++);
    CROSSDOCK_NO_UNROLL
    for (; k + 1 < stages; k += 2) {
      run_stage<0>(k);
      run_stage<1>(k + 1);
    }
    odd = k < stages;
    if (odd) run_stage<0>(k);
    if (this->block.p.bias.values != nullptr) this->add_bias();
  }

 private:
  template <u32 kSet>
  CROSSDOCK_DEVICE void run_stage(u32 k) {
    const u32 stage = this->at.stage;
    multiply<kSet>(stage);
    unpack<1 - kSet>();  // of the next stage; after the last one, of what there was
    read();
    if (k % kWarpSize == 0) this->weight_scales.turn(k);
    const auto scales = this->load_scales(stage, k);
    Base::wait(this->part);
    pin_fragments<kSet>();
    this->promote(scales);
    ptx::sync_warp(kFullMask);  // all lanes have read their scales
    gemm_release<kConfig>(stage, this->weight_scales.turns);
    this->at.advance();
  }
  // What the thread needs of the next stage; after the last one, the same again.
  CROSSDOCK_DEVICE void read() {
    constexpr u32 kPieceWords = fp4_word_offset(64, 0, 0);
    constexpr u32 kPieceShifts = fp4_shift_offset(64, 0) - kFp4CodeBytes;
    if (unread != 0) {
      --unread;
      this->block.wait_full(ahead);
    }
    const u8* weights = Block::weights(ahead.stage);
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece)
      words[piece].read(weights + own_words + piece * kPieceWords,
                        weights + own_shifts + piece * kPieceShifts);
    if (unread != 0) ahead.advance();
  }
  template <u32 kSet>
  CROSSDOCK_DEVICE void unpack() {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kPieces * kFp4Steps * 2; ++i) {
      const u32 piece = i / 2 / kFp4Steps, step = i / 2 % kFp4Steps, second = i % 2;
      const U32x2 v = words[piece].template unpack<kByProducts>(Block::fp4_table(), step, second);
      fragments[kSet][piece][step][second] = v.x;
      fragments[kSet][piece][step][second + 2] = v.y;
    }
  }
  template <u32 kSet>
  CROSSDOCK_DEVICE void multiply(u32 stage) {
    const u64 b = gemm_descriptor(input_low + stage * (Block::kShared.input_bytes / 16));
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece)
      ptx::pin_accumulators(this->part[piece]);
    pin_fragments<kSet>();
    ptx::wgmma_fence();
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kPieces * kFp4Steps; ++i) {
      const u32 piece = i / kFp4Steps, step = i % kFp4Steps;
      ptx::wgmma_e4m3(this->part[piece], fragments[kSet][piece][step], ptx::advanced(b, 32 * step),
                      step != 0);
    }
    ptx::wgmma_commit();
  }
  template <u32 kSet>
  CROSSDOCK_DEVICE void pin_fragments() {
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kPieces * kFp4Steps; ++i)
      ptx::pin_registers(fragments[kSet][i / kFp4Steps][i % kFp4Steps]);
  }
};

}  // namespace crossdock::device
