// Parameters of the kernels that look at received rows expert by expert: ep_group_rows,
// ep_expand_rows and ep_reduce_rows. Plain data and constexpr functions, shared by host, kernels
// and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep.cuh>
#include <crossdock/layout/ep_payload.cuh>
#include <crossdock/ptx/memory.cuh>

namespace crossdock::device {

// What a dispatch has delivered to this rank.
struct EpArrived {
  const u32* source_ends;    // [world]: where the rows of each source end
  const u32* expert_counts;  // [experts]
  const i32* ids;            // [rows][top_k], local experts or -1
  const float* weights;      // [rows][top_k]
  u32 world;
  u32 experts;  // of this rank
  u32 top_k;
  u32 stride;  // places from source to source; 0: rows without gaps

  // All rows are below it; by its number a row tells whether it is one.
  CROSSDOCK_DEVICE u32 bound() const {
    return stride != 0 ? world * stride : ptx::ld_weak(source_ends + world - 1);
  }
  CROSSDOCK_DEVICE bool holds(u32 row) const {
    return stride == 0 || row < ptx::ld_weak(source_ends + row / stride);
  }
};

// Places for the choices of every expert, one expert after the other, each beginning at a multiple
// of `alignment`.
struct EpGrouping {
  u32* offsets;    // [experts + 1]: where the places of each expert begin; the last is the end
  u32* aligned;    // [experts]: its places, with padding
  i32* rows;       // [places]: the received row of each place, in order; -1 where there is none
  u32* positions;  // [rows][top_k]: the place of each choice that is one of this rank
  float* weights;  // [places]: the weight of the choice; null: not wanted
  u32 alignment;
};
// The most places that `capacity` rows can need.
CROSSDOCK_HOST_DEVICE constexpr u64 ep_most_places(u32 capacity, u32 top_k, u32 experts,
                                                   u32 alignment) {
  return u64{capacity} * top_k + u64{experts} * (alignment - 1);
}

// Where a choice is in a masked layout, in which every expert has `rows_per_expert` rows; `begin`:
// of the expert's places. With rows_per_expert = 0 places are what they are.
CROSSDOCK_HOST_DEVICE constexpr u64 ep_target(u32 place, u32 expert, u32 begin,
                                              u32 rows_per_expert) {
  return rows_per_expert == 0 ? place : u64{expert} * rows_per_expert + (place - begin);
}

// Making lists: a block takes experts in turns of so many, and needs this much shared memory.
inline constexpr u32 kEpListRange = 256;
CROSSDOCK_HOST_DEVICE constexpr u32 ep_list_shared_bytes(u32 warps, u32 experts) {
  return ((warps + 3) * min_of(experts, kEpListRange) + 1) * 4;
}
// Choices that are worth a block of their own, and the most words of counts by block and expert.
inline constexpr u32 kEpListPiece = 4096;
inline constexpr u32 kEpListWords = 16384;
// How many blocks take a piece each of the choices that `capacity` rows can have.
CROSSDOCK_HOST_DEVICE constexpr u32 ep_list_pieces(u64 choices, u32 experts, u32 most) {
  const u64 wanted = ceil_div(choices, u64{kEpListPiece});
  const u32 counted = kEpListWords / max_of(experts, 1u);
  return static_cast<u32>(max_of(min_of(wanted, u64{min_of(counted, most)}), u64{1}));
}

struct EpGroupRowsConfig {
  u32 threads;  // of a block, which takes a piece of the choices
};
enum class EpGroupStep : u32 { kAll, kCount, kWrite };
struct EpGroupRowsParams {
  LaunchCommon common;
  EpArrived arrived;
  EpGrouping grouping;
  u32* pieces;  // [blocks][experts]: choices in the piece of each block
  EpGroupStep step;
};

struct EpReduceRowsConfig {
  u32 warps;   // of a block; each takes a row at a time
  bool packs;  // the sums are compressed
};
struct EpReduceRowsParams {
  LaunchCommon common;
  SymmetricView view;
  EpArrived arrived;
  const u32* positions;  // null: a row for every received row, which is compressed as it is
  const u32* offsets;
  const u8* outputs;  // bf16, a row for every place, or of a masked layout
  u64 output_stride;
  u32 rows_per_expert;  // masked; else 0
  u8* input;            // what combine will pull, a row for every received row
  EpPayload payload;    // of `input`
  EpFree free;          // of `input`
  u32 row_bytes;        // of bf16
  bool weighted;        // each choice times its weight; else a plain sum
};

struct EpExpandRowsConfig {
  u32 warps;        // of a block, each moves parts of rows by itself
  u32 stages;       // of a warp, in shared memory
  u32 stage_bytes;  // of a part, a multiple of 128
  CROSSDOCK_HOST_DEVICE constexpr u32 threads() const { return warps * kWarpSize; }
  CROSSDOCK_HOST_DEVICE constexpr u32 shared_bytes() const {
    return round_up(warps * stages * (stage_bytes + 8), 128u);
  }
};
// A place's token: both -1 in padding.
struct EpSource {
  i32 rank;
  i32 token;
};
// The received rows, as dispatch has put them.
struct EpReceivedRows {
  const u8* rows;
  const u8* scales;
  const u32* tokens;
  u32 row_bytes;
  u32 scale_bytes;
  u32 scale_columns;  // 0: by row
};
// Copies by place; null planes are not wanted.
struct EpExpanded {
  u8* rows;
  u8* scales;
  float* weights;
  EpSource* sources;
  u64 row_stride;
  u64 scale_stride;  // by row: bytes; by column: words
  u64 places;        // there is room for
  u32 rows_per_expert;
  bool scales_by_column;
};
struct EpExpandRowsParams {
  LaunchCommon common;
  EpArrived arrived;
  EpGrouping grouping;
  EpReceivedRows from;
  EpExpanded to;
  u32 parts;       // of a row
  u32 part_bytes;  // ep_part_bytes; the last may be shorter
};

}  // namespace crossdock::device
