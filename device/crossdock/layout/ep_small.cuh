// Dispatch of few tokens: parameters, configuration, symmetric areas, and the state a rank keeps.
// Plain data and constexpr functions, shared by host, kernel and twin.
//
// Rows of source s begin at place s * stride of the receiver's slot, so no source needs anything
// from the others before it stores. All ranks use the same slot of this path, in turns, so the
// place is known beforehand too; that it is free is told by the words of `free`.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_dispatch.cuh>
#include <crossdock/layout/ep_mask.cuh>

namespace crossdock::device {

inline constexpr u32 kEpMaxSmallTokens = 1024;
inline constexpr u32 kEpMaxSmallSlots = 4;
inline constexpr u32 kEpMaxSendBlocks = 32;  // of a launch: a lane waits for each

struct EpSmallConfig {
  u32 warps;  // that move rows, each one at a time
  bool cast;  // bf16 in, e4m3 and one scale per 128 values out
  CROSSDOCK_HOST_DEVICE constexpr u32 threads() const { return warps * kWarpSize; }
};

// What a source tells a destination first: an epoch word with
//
//   | given up | scale_mark's parity | by column | row_bytes / 16, 12 | blocks, 6 | rows, 11 bits |
//
// `blocks` of the source raise a flag each when their rows are here. Given up: the rest is the
// abort word with the culprit.
struct EpHeader {
  static constexpr u32 kGivenUp = 1u << 31;
  static constexpr u32 kRowBits = 11;
  static constexpr u32 kBlockBits = 6;
  u32 value;

  CROSSDOCK_HOST_DEVICE static constexpr u32 shape_of(const EpOutputLayout& o) {
    const u32 mark = u32{o.scale_mark};
    const u32 parity = (mark ^ mark >> 1) & 1u;
    return o.row_bytes / 16 | (o.scale_columns != 0 ? 1u << 12 : 0u) | parity << 13;
  }
  CROSSDOCK_HOST_DEVICE static constexpr EpHeader make(u32 rows, u32 blocks,
                                                       const EpOutputLayout& o) {
    return {rows | blocks << kRowBits | shape_of(o) << (kRowBits + kBlockBits)};
  }
  CROSSDOCK_HOST_DEVICE static constexpr EpHeader give_up(u32 culprit) {
    return {kGivenUp | abort_word(culprit)};
  }
  CROSSDOCK_HOST_DEVICE constexpr bool given_up() const { return (value & kGivenUp) != 0; }
  CROSSDOCK_HOST_DEVICE constexpr u32 culprit() const { return abort_peer(value & ~kGivenUp); }
  CROSSDOCK_HOST_DEVICE constexpr u32 rows() const { return value & ((1u << kRowBits) - 1); }
  CROSSDOCK_HOST_DEVICE constexpr u32 blocks() const {
    return value >> kRowBits & ((1u << kBlockBits) - 1);
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 shape() const { return value >> (kRowBits + kBlockBits); }
  CROSSDOCK_HOST_DEVICE constexpr u32 row_bytes() const { return (shape() & 0xfffu) * 16; }
};

// Of one slot: offsets in every rank's window.
struct EpSmallAreas {
  u64 headers;       // [source] epoch words
  u64 flags;         // [source][kEpMaxSendBlocks] epochs: the block's rows are here
  u64 counts;        // [source][most_experts] epoch words: selections of each local expert
  u64 free;          // [destination]: so many uses of the slot there are over
  u64 inputs;        // [2][destination] announced words of combine
  u64 reads;         // [source] epochs: of the last combine whose rows it has read here
  u32 most_experts;  // of any rank
};
CROSSDOCK_HOST_DEVICE constexpr EpSmallAreas add_ep_small(SymmetricLayout& layout, u32 world,
                                                          u32 experts) {
  EpSmallAreas out{};
  out.most_experts = EpExperts::make(experts, world).most();
  SymmetricLayout block;
  out.headers = block.add("headers", u64{world} * 8);
  out.flags = block.add("flags", u64{world} * kEpMaxSendBlocks * 4);
  out.counts = block.add("counts", u64{world} * out.most_experts * 8);
  out.free = block.add("free", u64{world} * 4);
  out.inputs = block.add("inputs", u64{2} * world * 8);
  out.reads = block.add("reads", u64{world} * 4);
  const u64 at = layout.add("ep.small.control", block.bytes);
  out.headers += at;
  out.flags += at;
  out.counts += at;
  out.free += at;
  out.inputs += at;
  out.reads += at;
  return out;
}

// What a rank keeps of a slot between launches, in its device memory; zero before the first launch
// and after a reset.
struct EpSmallState {
  EpochState dispatch;  // uses of the slot so far
  PaddedWord released;  // of them, those that all peers have been told are over
};

struct EpSmallParams {
  LaunchCommon common;
  SymmetricView view;
  EpSmallAreas areas;
  EpExperts experts;
  u32 tokens;
  u32 stride;  // places of a source in a slot
  // The grid: blocks that send rows, one that tells what comes, one that waits for all of it.
  u32 send_blocks;
  bool sends;     // with the block that tells
  bool receives;  // with the block that waits
  bool wide_ids;  // expert ids are 64 bits
  EpDispatchInput input;
  EpOutputLayout output;
  u64 output_offset;  // of the slot's block in every window
  EpDispatchResult result;
  EpStatistics statistics;
  EpSmallState* state;
  EpMasking masking;
};

// Waits until what combines of a slot have announced has been read by all.
struct EpAwaitReadsConfig {
  u32 threads;
};
struct EpAwaitReadsParams {
  LaunchCommon common;
  SymmetricView view;
  EpSmallAreas areas;
  const EpState* state;  // of the slot's combines
  EpMasking masking;
};

// Changes a rank's mask, and tells what it is.
struct EpMaskConfig {
  u32 threads;
};
struct EpMaskParams {
  EpMask* mask;
  u32 set;    // ranks to mask; not this one
  u32 clear;  // ranks to let in again
  i32* told;  // [world], then: 1 for a masked rank, else 0; may be null
  SymmetricView view;
  EpAreas areas;
  EpState* state;
  u32 combine_blocks;  // of this rank
  u32 slots;           // small ones
  EpSmallState* small[kEpMaxSmallSlots];
};

// Shared memory of a block.
struct EpSmallShared {
  u32 stages;  // [warps] rows
  u32 stage_bytes;
  u32 casts;  // [warps] rows with their scales
  u32 cast_bytes;
  u32 barriers;   // [warps] mbarriers
  u32 routes;     // [groups][world] words: which tokens of the group go there
  u32 histogram;  // [experts] words, of the blocks that tell and receive
  u32 headers;    // [world] words, of the block that receives
  u32 epoch;
  u32 bytes;
};
CROSSDOCK_HOST_DEVICE constexpr EpSmallShared ep_small_shared(EpSmallConfig c, u32 input_row_bytes,
                                                              u32 world, u32 experts, u32 tokens) {
  EpSmallShared s{};
  const u32 values = input_row_bytes / 2;
  s.stage_bytes = round_up(input_row_bytes, 128u);
  s.casts = c.warps * s.stage_bytes;
  s.cast_bytes =
      c.cast ? round_up(values + round_up(ceil_div(values, kEpScaleGroup) * 4, 16u), 128u) : 0;
  s.barriers = s.casts + c.warps * s.cast_bytes;
  s.routes = s.barriers + c.warps * 8;
  s.histogram = s.routes + ceil_div(tokens, kWarpSize) * world * 4;
  s.headers = s.histogram + experts * 4;
  s.epoch = s.headers + world * 4;
  s.bytes = round_up(s.epoch + 4, 128u);
  return s;
}

}  // namespace crossdock::device
