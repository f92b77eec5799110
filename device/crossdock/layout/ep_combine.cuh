// Parameters, configuration and shared memory of ep_combine. Plain data and constexpr functions,
// shared by host, kernel and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_mask.cuh>
#include <crossdock/layout/ep_payload.cuh>
#include <crossdock/layout/ep_small.cuh>

namespace crossdock::device {

struct EpCombineConfig {
  u32 warps;        // each loads and adds by itself
  u32 stages;       // parts of tokens that a warp has in flight
  u32 stage_bytes;  // of all rows of a part, a multiple of 128
  // By push: of the blocks that send. 0: there are none, every rank pulls the rows it needs.
  u32 send_warps = 0;
  u32 send_stages = 0;
  u32 send_stage_bytes = 0;
  u32 send_notes = 0;  // of each of them, for the warp that raises flags: more than the stages
  // Of a dispatch of few tokens (ep_small_dispatch): tells the peers that its slot is free instead
  // of counting who has read what.
  bool small = false;
  u32 payload = 0;  // EpPayload; other than bf16 with `small` only
  CROSSDOCK_HOST_DEVICE constexpr EpPayload format() const {
    return static_cast<EpPayload>(payload);
  }
  CROSSDOCK_HOST_DEVICE constexpr bool pushes() const { return send_warps != 0; }
  CROSSDOCK_HOST_DEVICE constexpr u32 all_warps() const {
    return pushes() ? max_of(warps, send_warps + 1) : warps;  // one more raises the flags
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 threads() const { return all_warps() * kWarpSize; }
};

// Which blocks send: `senders` of `blocks`, spread over the grid; the last is one of them.
struct EpCombineBlocks {
  u32 senders;
  u32 blocks;
  CROSSDOCK_HOST_DEVICE constexpr u32 senders_before(u32 block) const {
    return block * senders / blocks;
  }
  CROSSDOCK_HOST_DEVICE constexpr bool sends(u32 block) const {
    return senders_before(block + 1) > senders_before(block);
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 adders() const { return blocks - senders; }
};

// Expert outputs at the rank that made them: offsets in its input block. The rows are those of the
// dispatch, in the same order.
struct EpInputLayout {
  u64 rows;     // bf16 [capacity][row_bytes / 2]
  u64 weights;  // f32 [capacity][top_k]
  u64 packed;   // where rows may travel compressed: [capacity] at the stride of each format
  u64 bytes;
  u32 row_bytes;   // a multiple of 16
  u32 row_stride;  // of what is pulled; of bf16 the same
};
// `packed_bytes`: the longest stride of compressed rows; 0: there are none.
CROSSDOCK_HOST_DEVICE constexpr EpInputLayout ep_input_layout(u32 capacity, u32 row_bytes,
                                                              u32 top_k, u32 packed_bytes = 0) {
  SymmetricLayout block;
  EpInputLayout out{};
  out.row_bytes = out.row_stride = row_bytes;
  out.rows = block.add("rows", u64{capacity} * row_bytes);
  out.weights = block.add("weights", u64{capacity} * top_k * 4);
  out.packed = block.add("packed", u64{capacity} * packed_bytes);
  out.bytes = block.bytes;
  return out;
}
// The same block, where its compressed rows are what travels.
CROSSDOCK_HOST_DEVICE constexpr EpInputLayout ep_packed_input(EpInputLayout input,
                                                              EpPayload payload) {
  input.rows = input.packed;
  const u32 values = input.row_bytes / 2;
  input.row_bytes = ep_payload_bytes(payload, values);
  input.row_stride = ep_payload_stride(payload, values);
  return input;
}

// By push: where the rows of this rank's tokens come, at offsets of its window. Row n of a source
// is the n-th that the source has of this rank's tokens.
struct EpStaging {
  u64 rows;      // bf16 [source][capacity][row_bytes / 2]
  u64 flags;     // [source][capacity] words: the epoch in which the row has come
  u32 capacity;  // tokens of one rank
};
CROSSDOCK_HOST_DEVICE constexpr EpStaging add_ep_staging(SymmetricLayout& layout, u32 world,
                                                         u32 capacity, u32 row_bytes) {
  EpStaging out{};
  out.capacity = capacity;
  out.rows = layout.add("ep.staging.rows", u64{world} * capacity * row_bytes);
  out.flags = layout.add("ep.staging.flags", u64{world} * capacity * 4);
  return out;
}

// How a row is cut: a part of all rows of one token fits into a stage.
struct EpParts {
  u32 bytes;       // of a part of a row, whole lines; the last may be shorter
  u32 count;       // of a row
  u32 per_ticket;  // parts that a warp takes at once

  static constexpr u32 kFewest = 512;  // bytes of a part: a vector a lane

  // `most_rows`: that a token can have: the smaller of ranks and top_k. `wanted`: parts, if they
  // can be had without becoming smaller than kFewest. `grain`: what parts are multiples of, which
  // has to fit into a stage for all rows; 0: lines.
  CROSSDOCK_HOST_DEVICE static constexpr EpParts make(u32 stage_bytes, u32 row_bytes, u32 most_rows,
                                                      u32 wanted = 1, u32 grain = 0) {
    // Only stages of tests are so small that a part has no line.
    const u32 line = grain != 0 ? grain : stage_bytes / most_rows < kEpLine ? 16 : kEpLine;
    const u32 fits = stage_bytes / most_rows / line * line;
    const u32 fewest = max_of(kFewest, grain);
    EpParts out{};
    out.count = max_of(ceil_div(row_bytes, fits), min_of(wanted, max_of(row_bytes / fewest, 1u)));
    out.bytes = round_up(ceil_div(row_bytes, out.count), line);
    out.count = ceil_div(row_bytes, out.bytes);
    out.per_ticket = out.count;
    return out;
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 tickets_per_token() const {
    return ceil_div(count, per_ticket);
  }
};

struct EpCombineOutput {
  u8* rows;  // bf16, 16-byte aligned
  u64 row_stride;
  const u8* bias[2];  // bf16 rows like the output, or null
  u64 bias_stride[2];
  float* weights;  // [tokens][top_k]: the sums of the weights of the input blocks; may be null
};

struct EpCombineParams {
  LaunchCommon common;
  SymmetricView view;
  EpAreas areas;
  EpTokens tokens;        // of the dispatch
  const EpRoute* routes;  // of the dispatch
  EpInputLayout input;
  u64 input_offset;   // of this rank's input block in its window, a multiple of 16
  EpPayload payload;  // of the rows in `input`; all ranks have the same
  EpParts parts;
  EpCombineOutput output;
  // By push only.
  EpStaging staging;
  EpParts send_parts;
  const u32* source_ends;  // [world]: of the dispatch
  u32 send_blocks;
  u32 top_k;
  u32 slot;  // of the input block, for dispatch to know when it is free; kNoSlot: none
  EpState* state;
  u8 source_blocks[kEpMaxRanks];  // of this kernel at every rank
  // Halves of a combine may be launches of their own: the first tells the peers that the input is
  // ready, the second waits for them and adds up.
  bool tells;
  bool adds;
  EpMasking masking;  // by pull only
  u64* rank_wait_ns;  // [world], added to: until each rank's rows were ready; may be null
  // Few tokens only.
  u64 free_words;  // EpSmallAreas::free
  u64 read_words;  // EpSmallAreas::reads
  EpSmallState* small;
};

// Shared memory of a block that adds: stages, mbarriers, and what each stage holds.
struct EpStageNote {
  u32 token;
  u32 part;
  u32 rows;
  u32 unused;
};
// Of a block that sends: stages, mbarriers, and for each warp a ring of notes for the warp that
// raises the flags.
struct EpSendNote {
  u32 peer;  // kNoPeer: the warp has sent its last row
  u32 place;
  u32 part;
  u32 last;  // the part completes the row
};
struct EpCombineShared {
  u32 barriers;
  u32 notes;
  u32 send_barriers;  // [send_warps][send_stages] full, then [send_warps][ring] sent and taken
  u32 send_notes;     // [send_warps][ring]
  u32 epoch;
  u32 bytes;
};
CROSSDOCK_HOST_DEVICE constexpr EpCombineShared ep_combine_shared(EpCombineConfig c) {
  EpCombineShared s{};
  s.barriers = c.warps * c.stages * c.stage_bytes;
  s.notes = s.barriers + round_up(c.warps * c.stages * 8, 16u);
  const u32 add_end = s.notes + c.warps * c.stages * u32{sizeof(EpStageNote)};
  s.send_barriers = c.send_warps * c.send_stages * c.send_stage_bytes;
  s.send_notes =
      s.send_barriers + round_up(c.send_warps * (c.send_stages + 2 * c.send_notes) * 8, 16u);
  const u32 send_end = s.send_notes + c.send_warps * c.send_notes * u32{sizeof(EpSendNote)};
  s.epoch = max_of(add_end, send_end);
  s.bytes = round_up(s.epoch + 4, 128u);
  return s;
}

}  // namespace crossdock::device
