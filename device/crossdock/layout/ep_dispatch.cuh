// Parameters, configuration and shared memory of ep_dispatch. Plain data and constexpr functions,
// shared by host, kernel and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep.cuh>
#include <crossdock/layout/ep_mask.cuh>

namespace crossdock::device {

struct EpDispatchConfig {
  u32 dispatch_warps;  // each moves rows through `stages` places in shared memory
  u32 stages;
  u32 notify_warps;
  bool cast;      // bf16 in, e4m3 and one fp32 scale per 128 values out, from a place of its own
  bool wide_ids;  // expert ids are 64 bits
  // Of ep_dispatch_expanded: a warp that raises flags of rows, and what each warp of a block that
  // copies has in shared memory.
  u32 flag_warps = 0;
  u32 copy_stages = 0;
  u32 copy_stage_bytes = 0;
  CROSSDOCK_HOST_DEVICE constexpr u32 warps() const {
    return dispatch_warps + notify_warps + flag_warps;
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 threads() const { return warps() * kWarpSize; }
};
// Of the tokens of a block, those dealt to its warps: a quarter, or all when that is not enough to
// start every warp. The rest of all blocks is one pool.
CROSSDOCK_HOST_DEVICE constexpr u32 ep_dealt(u32 dispatch_warps, u32 per_block) {
  const u32 start = 2 * dispatch_warps;
  return per_block <= start ? per_block : max_of(start, per_block / 4);
}

// Rows that a dispatch warp has stored and whose flags have not been raised, at most.
inline constexpr u32 kEpNotes = 8;

// What the sources of a dispatch tell besides rows, in every rank's window: a word of each of their
// blocks, and a flag of each row, which are the epoch when it is there. [2] is its parity.
enum class EpTold : u32 {
  kSelections,  // ids, weights and token numbers of all rows of the block
  kScales,      // and the scales that no row brings itself
};
struct EpFlagAreas {
  u64 rows;  // [2][capacity]
  u64 told;  // [2][EpTold][source][most_blocks]
  u32 capacity;
};
CROSSDOCK_HOST_DEVICE constexpr EpFlagAreas add_ep_flags(SymmetricLayout& layout, u32 world,
                                                         u32 capacity, u32 most_blocks) {
  EpFlagAreas out{};
  out.capacity = capacity;
  out.rows = layout.add("ep.row_flags", u64{2} * capacity * 4);
  out.told = layout.add("ep.told", u64{4} * world * most_blocks * 4);
  return out;
}

inline constexpr u32 kEpScaleGroup = 128;  // values of a row that share a scale

// The rows of one dispatch at a destination: offsets in its output block. All rows are there once,
// `capacity` of them.
struct EpOutputLayout {
  u64 rows;           // [capacity] rows of row_bytes
  u64 scales;         // row-major: [capacity] of scale_bytes; column-major: [words][scale_columns]
  u64 ids;            // i32 [capacity][top_k]: local expert, or -1
  u64 weights;        // f32 [capacity][top_k]
  u64 sources;        // u32 [capacity]: the token's number at its source
  u64 bytes;          // of the block
  u32 row_bytes;      // delivered, a multiple of 16
  u32 scale_bytes;    // of a row, a multiple of 4; 0: no scales
  u32 scale_columns;  // 0: row-major; else the row stride of the column-major plane, in words
  u32 capacity;
  bool cast_ue8m0;  // a cast makes scales of one byte
  u8 scale_mark;    // two bits of what the scales of a row are, for ranks to compare
};
struct EpOutputShape {
  u32 capacity;
  u32 row_bytes;
  u32 scale_bytes;
  bool scales_by_column;
  u32 top_k;
  bool cast_ue8m0 = false;
};
// Scales of one byte differ from those of four that a cast makes of the same rows, in both bits
// together and in their parity; other sizes may look alike.
CROSSDOCK_HOST_DEVICE constexpr u8 ep_scale_mark(EpOutputShape s) {
  u32 words = s.cast_ue8m0 ? round_up(ceil_div(s.row_bytes, kEpScaleGroup), 4u) : s.scale_bytes / 4;
  for (u32 shift = 16; shift != 1; shift /= 2)
    words ^= words >> shift;
  return static_cast<u8>((words ^ (s.cast_ue8m0 ? 1u : 0u)) & 3u);
}
CROSSDOCK_HOST_DEVICE constexpr EpOutputLayout ep_output_layout(EpOutputShape s) {
  SymmetricLayout block;
  EpOutputLayout out{};
  out.row_bytes = s.row_bytes;
  out.scale_bytes = s.scale_bytes;
  out.capacity = s.capacity;
  out.cast_ue8m0 = s.cast_ue8m0;
  out.scale_mark = ep_scale_mark(s);
  out.scale_columns = s.scales_by_column ? round_up(s.capacity, 4u) : 0;
  out.rows = block.add("rows", u64{s.capacity} * s.row_bytes);
  out.scales = block.add("scales", u64{round_up(s.capacity, 4u)} * s.scale_bytes);
  out.ids = block.add("ids", u64{s.capacity} * s.top_k * 4);
  out.weights = block.add("weights", u64{s.capacity} * s.top_k * 4);
  out.sources = block.add("sources", u64{s.capacity} * 4);
  out.bytes = block.bytes;
  return out;
}

// Where a destination's rows go and what they look like to it, in the 48 bits of an announced word:
//
//   | scale_mark, 2 bits | by column | row_bytes / 16, 12 bits | offset / 128, 33 bits |
//
// Sources compare the shape with their own: ranks that disagree learn it before they store.
struct EpPlaceWord {
  static constexpr u32 kUnit = 128;
  static constexpr u32 kOffsetBits = 33;
  u64 value;

  CROSSDOCK_HOST_DEVICE static constexpr u64 shape_of(const EpOutputLayout& o) {
    const u32 mark = u32{o.scale_mark} << 13;
    return u64{o.row_bytes / 16 | (o.scale_columns != 0 ? 1u << 12 : 0u) | mark};
  }
  CROSSDOCK_HOST_DEVICE static constexpr EpPlaceWord make(u64 offset, const EpOutputLayout& o) {
    return {offset / kUnit | shape_of(o) << kOffsetBits};
  }
  CROSSDOCK_HOST_DEVICE constexpr u64 offset() const {
    return (value & ((u64{1} << kOffsetBits) - 1)) * kUnit;
  }
  CROSSDOCK_HOST_DEVICE constexpr u64 shape() const { return value >> kOffsetBits; }
  CROSSDOCK_HOST_DEVICE constexpr u32 row_bytes() const {
    return static_cast<u32>(shape() & 0xfffu) * 16;
  }
};

// This rank's tokens.
struct EpDispatchInput {
  const u8* rows;  // 16-byte aligned; bf16 with `cast`
  const u8* scales;
  const void* ids;       // [tokens][top_k], i32 or i64; -1: masked
  const float* weights;  // [tokens][top_k]; null: none are sent
  u64 row_stride;        // bytes, multiples of 16
  u64 scale_stride;
  u32 row_bytes;
  u32 top_k;
};

// What a dispatch leaves behind in this rank's memory: the routing, and what has arrived.
struct EpDispatchResult {
  EpRoute* routes;     // EpTokens::most_routes; what combine follows
  u32* source_ends;    // [world]: the end of each source's rows; the last is the number of rows
  u32* sent_ends;      // [world]: the end of this rank's rows at each destination
  u32* expert_counts;  // [local experts]: selections, not padded
  u64* host_rows;      // pinned, may be null: {ticket, rows} as an epoch word, before the rows come
                       // (with late masks: at the end)
  u64* host_experts;   // pinned, may be null: [local experts] {ticket, selections}
  u32 host_ticket;
};

// What an earlier dispatch has left behind, for one that sends tokens the same ways: no ids are
// read and nothing is counted. `routes` null: none.
struct EpReuse {
  const EpRoute* routes;
  const u32* source_ends;
  const u32* sent_ends;
  const u32* expert_counts;
  const i32* ids;  // [capacity][top_k], of the rows that came then
};

// Kept for the caller over many launches; any may be null.
struct EpStatistics {
  u64* expert_selections;  // [local experts], added to
  u64* source_wait_ns;     // [world], added to: waiting for the rows of each source
};

struct EpDispatchParams {
  LaunchCommon common;
  SymmetricView view;
  EpAreas areas;
  EpExperts experts;
  EpTokens tokens;
  EpDispatchInput input;
  EpOutputLayout output;
  u64 output_offset;  // of this rank's output block in its window
  u32 slot;           // whose combine input goes with the output; kNoSlot: none
  EpReuse reuse;
  EpDispatchResult result;
  EpStatistics statistics;
  EpState* state;
  u32* expert_previous;  // [2][most_experts]; without masks
  EpMasking masking;
  EpFlagAreas flags;  // of ep_dispatch_expanded
  u32 stride;         // with masks: places from source to source; 0: rows lie one after the other
  u8 source_blocks[kEpMaxRanks];
  u32 most_blocks;  // the largest of source_blocks
};

// Shared memory of a block.
struct EpDispatchShared {
  u32 barriers;       // [dispatch_warps][stages] mbarriers
  u32 note_barriers;  // [2][dispatch_warps][kEpNotes] mbarriers, as far as there are flag warps
  u32 notes;          // [dispatch_warps][kEpNotes][world] words, likewise
  u32 stages;         // [dispatch_warps][stages] rows
  u32 stage_bytes;
  u32 casts;  // [dispatch_warps] rows with their scales
  u32 cast_bytes;
  u32 stage_rows;  // [dispatch_warps][stages][32] words: the lane's row of what the stage holds
  u32 routes;      // [groups][world] EpRoute, rows relative to the block
  u32 partial;     // [dispatch_warps][32] words
  u32 outputs;     // [world] 64-bit addresses
  u32 histogram;   // [experts] words
  u32 members;     // [notify_warps][32] words
  u32 epoch;       // one word
  u32 bytes;
};
CROSSDOCK_HOST_DEVICE constexpr EpDispatchShared ep_dispatch_shared(EpDispatchConfig c,
                                                                    u32 input_row_bytes, u32 world,
                                                                    u32 experts, u32 groups) {
  EpDispatchShared s{};
  const u32 stages = c.dispatch_warps * c.stages;
  const u32 values = input_row_bytes / 2;
  s.stage_bytes = round_up(input_row_bytes, 128u);
  s.casts = stages * s.stage_bytes;
  s.cast_bytes =
      c.cast ? round_up(values + round_up(ceil_div(values, kEpScaleGroup) * 4, 16u), 128u) : 0;
  s.barriers = s.casts + c.dispatch_warps * s.cast_bytes;
  const u32 notes = c.flag_warps == 0 ? 0 : c.dispatch_warps * kEpNotes;
  s.note_barriers = s.barriers + stages * 8;
  s.routes = s.note_barriers + 2 * notes * 8;
  s.outputs = s.routes + groups * world * 8;
  s.stage_rows = s.outputs + world * 8;
  s.partial = s.stage_rows + stages * kWarpSize * 4;
  s.histogram = s.partial + c.dispatch_warps * kWarpSize * 4;
  s.members = s.histogram + experts * 4;
  s.notes = s.members + c.notify_warps * kWarpSize * 4;
  s.epoch = s.notes + notes * world * 4;
  s.bytes = round_up(s.epoch + 4, 128u);
  return s;
}

}  // namespace crossdock::device
