// The unpack warpgroup of grouped_gemm, of tiles of many rows with weights in e2m1: it makes of
// each packed stage the tile of e4m3 that a tensor map would have brought, once for all rows.
//
//   load warps    packed weights -> packed_full[p]; input -> full[s]
//   these warps   wait packed_full[p], empty[s]; unpack -> packed_empty[p]
//                 wait full[s] -> unpacked[s]
//   math warps    wait unpacked[s]; the rest as with weights in e4m3
//
// Each warp has 16 of every 64 columns. A lane has a column of these and every second group of 32
// values, since a group's codes are looked up once: four words, which other lanes read in another
// order, so that neither the words of 32 lanes nor what is made of them share a bank.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/block.cuh>
#include <crossdock/gemm/fp4.cuh>

namespace crossdock::device {

template <GroupedGemmConfig kConfig>
struct GemmUnpack {
  using Block = GemmBlock<kConfig>;
  static constexpr u32 kUnits = kGemmColumns / 64;  // of 16 columns, for each warp
  static constexpr u32 kWords = 4;                  // of a group
  static constexpr u32 kUnitBytes = 64 * kGemmStageBytes;

  const Block& block;
  u32 parity;  // of the thread's groups
  // Where the thread's first word and its shifts are in a packed stage, and where what is made of
  // that word goes in one of e4m3.
  u32 own_words, own_shifts, own_bytes;
  typename Block::Cursor at = {};
  typename Block::PackedCursor packed = {};

  CROSSDOCK_DEVICE GemmUnpack(const Block& of, u32 warp) : block(of) {
    const u32 lane = lane_index(), row = warp * 16 + lane % 16;
    parity = lane / 16;
    const u32 first = row % 8 / 2 ^ (parity * 3 ^ row / 8 % 2);
    own_words = ptx::forgotten(fp4_word_offset(row, parity, first));
    own_shifts = ptx::forgotten(fp4_shift_offset(row, 0));
    const u32 offset = row * kGemmStageBytes + parity * kFp4Group;
    own_bytes = ptx::forgotten(ptx::swizzled(ptx::Swizzle::k128, offset) + first * 4);
  }
  CROSSDOCK_DEVICE void run() {
    const u32 stages = ptx::warp_constant(block.experts.own_tiles() * block.p.shape.k_stages);
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < stages; ++i) {
      block.wait_packed(packed);
      block.wait_multiplied(at);
      unpack();
      ptx::fence_proxy_async_shared();
      ptx::sync_warp(kFullMask);
      const bool leader = lane_index() == 0;
      ptx::mbarrier_arrive_if(Block::packed_empty(packed.stage), leader);
      block.wait_input(at);
      ptx::mbarrier_arrive_if(Block::unpacked(at.stage), leader);
      at.advance();
      packed.advance();
    }
  }

 private:
  struct Group {
    u32 words[kWords];
    U32x2 codes;
  };
  // Groups `parity` of all units, then those two further on.
  CROSSDOCK_DEVICE void unpack() const {
    const auto words = ptx::shared_place(Block::packed(packed.stage) + own_words);
    const auto bytes = ptx::shared_place(Block::weights(at.stage) + own_bytes);
    ptx::SharedPlace from[kWords], to[kWords][2];
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kWords; ++i) {
      from[i] = ptx::exchanged(words, i * fp4_word_offset(0, 0, 1));
      to[i][0] = ptx::exchanged(bytes, i * 4);
      to[i][1] = ptx::exchanged(bytes, i * 4 + 16);
    }
    u32 shifts[kUnits];
    CROSSDOCK_UNROLL
    for (u32 unit = 0; unit < kUnits; ++unit)
      shifts[unit] = ptx::ld_shared(reinterpret_cast<const u32*>(
                         Block::packed(packed.stage) + own_shifts + block_of(unit) +
                         fp4_shift_offset(unit * 64 % kFp4BlockRows, 0) - kFp4CodeBytes)) >>
                     parity * 8;
    // A load does not pass a store before it: a group is read before the one in front is stored.
    Group now = read(from, shifts, 0);
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 2 * kUnits; ++i) {
      const Group next = i + 1 < 2 * kUnits ? read(from, shifts, i + 1) : now;
      if (i == kUnits) {
        CROSSDOCK_UNROLL
        for (u32 j = 0; j < kWords * 2; ++j)
          to[j / 2][j % 2] = ptx::exchanged(to[j / 2][j % 2], 2 * kFp4Group);
      }
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kWords; ++j) {
        const U32x2 v = fp4_unpack(now.words[j], now.codes);
        ptx::st_shared(to[j][0], i % kUnits * kUnitBytes, v.x);
        ptx::st_shared(to[j][1], i % kUnits * kUnitBytes, v.y);
      }
      now = next;
    }
  }
  CROSSDOCK_DEVICE static constexpr u32 block_of(u32 unit) {
    return unit * 64 / kFp4BlockRows * kFp4BlockBytes;
  }
  CROSSDOCK_DEVICE Group read(const ptx::SharedPlace (&from)[kWords], const u32 (&shifts)[kUnits],
                              u32 number) const {
    const u32 unit = number % kUnits, step = number / kUnits * 2;
    Group g;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kWords; ++i)
      g.words[i] = ptx::ld_shared(
          from[i], block_of(unit) + fp4_word_offset(unit * 64 % kFp4BlockRows, step, 0));
    g.codes = ptx::ld_shared_table(Block::fp4_table(), shifts[unit], step);
    return g;
  }
};

template <GroupedGemmConfig kConfig>
struct GemmUnpackRole {
  static constexpr u32 kWarps = kGemmUnpackWarps;
  static constexpr u32 kRegisters = 40;
  CROSSDOCK_DEVICE static void run(const GemmBlock<kConfig>& block, u32 warp) {
    GemmUnpack<kConfig>(block, warp).run();
  }
};

}  // namespace crossdock::device
