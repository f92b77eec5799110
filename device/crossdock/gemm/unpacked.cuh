// The main loop for weights in e2m1: like that of few rows (swapped.cuh), but a thread takes its
// part of the weights from shared memory, makes e4m3 of it in registers (layout/fp4_weights.cuh)
// and multiplies from there.
//
//   stage s      unpack | wgmma               promote, free s
//   stage s + 1           read what is packed
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

  using Base::Base;

  CROSSDOCK_DEVICE void start() {
    this->block.wait_full(this->at);
    read();
  }
  CROSSDOCK_DEVICE void run(bool more) {
    const u32 stages = this->block.p.shape.k_stages;
    CROSSDOCK_NO_UNROLL
    for (u32 k = 0; k < stages; ++k) {
      const u32 stage = this->at.stage;
      unpack();
      issue(stage);
      if (k % kWarpSize == 0) this->weight_scales.turn(k);
      const auto scales = this->load_scales(k);
      this->at.advance();
      if (k + 1 < stages || more) {
        this->block.wait_full(this->at);
        read();
      }
      Base::wait(this->part);
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kPieces * kSteps; ++i)
        ptx::pin_registers(fragments[i / kSteps][i % kSteps]);
      this->promote(scales);
      ptx::sync_warp(kFullMask);  // all lanes have read their scales
      gemm_release<kConfig>(stage);
    }
    if (this->block.p.bias.values != nullptr) this->add_bias();
  }

 private:
  // What the thread needs of the stage that has come.
  CROSSDOCK_DEVICE void read() {
    const u8* weights = Block::weights(this->at.stage) + this->group * kFp4BlockBytes;
    const u32 lane = lane_index();
    const u32 warp = thread_index() / kWarpSize % 4;
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece) {
      const u32 mine = warp * kPieces + piece;
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < 2; ++i) {
        const U32x4 v =
            ptx::ld_shared(reinterpret_cast<const U32x4*>(weights) + (mine * 2 + i) * 32 + lane);
        words[piece][4 * i] = v.x;
        words[piece][4 * i + 1] = v.y;
        words[piece][4 * i + 2] = v.z;
        words[piece][4 * i + 3] = v.w;
      }
      const U32x2 v = ptx::ld_shared(reinterpret_cast<const U32x2*>(weights + kFp4CodeBytes) +
                                     mine * 8 + lane / 4);
      shifts[piece][0] = v.x;
      shifts[piece][1] = v.y;
    }
  }
  CROSSDOCK_DEVICE void unpack() {
    const u8* table = Block::fp4_table();
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kPieces * kSteps * 2; ++i) {
      const u32 piece = i / (kSteps * 2), step = i / 2 % kSteps, second = i % 2;
      const u32 entry = ptx::permute_bytes(shifts[piece][second], 0, 0x4440 | step);
      const U32x2 codes = ptx::ld_shared(reinterpret_cast<const U32x2*>(table + entry));
      const u32 word = words[piece][step * 2 + second];
      const u32 magnitudes = word & 0x77777777u;
      fragments[piece][step][second] =
          ptx::permute_bytes(codes.x, codes.y, magnitudes) | (word & 0x80808080u);
      fragments[piece][step][second + 2] =
          ptx::permute_bytes(codes.x, codes.y, magnitudes >> 16) | (word << 4 & 0x80808080u);
    }
  }
  CROSSDOCK_DEVICE void issue(u32 stage) {
    const u64 b = ptx::matrix_descriptor(Block::input(stage), ptx::k_major(ptx::Swizzle::k128));
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece) {
      ptx::pin_accumulators(this->part[piece]);
      CROSSDOCK_UNROLL
      for (u32 step = 0; step < kSteps; ++step)
        ptx::pin_registers(fragments[piece][step]);
    }
    ptx::wgmma_fence();
    CROSSDOCK_UNROLL
    for (u32 piece = 0; piece < kPieces; ++piece) {
      CROSSDOCK_UNROLL
      for (u32 step = 0; step < kSteps; ++step)
        ptx::wgmma_e4m3(this->part[piece], fragments[piece][step], ptx::advanced(b, 32 * step),
                        step != 0);
    }
    ptx::wgmma_commit();
  }
};

}  // namespace crossdock::device
