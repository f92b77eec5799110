// Parameters, configuration and shared memory of ep_combine. Plain data and constexpr functions,
// shared by host, kernel and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep.cuh>

namespace crossdock::device {

struct EpCombineConfig {
  u32 warps;        // each pulls and adds by itself
  u32 stages;       // parts of tokens that a warp has in flight
  u32 stage_bytes;  // of all rows of a part, a multiple of 128
  CROSSDOCK_HOST_DEVICE constexpr u32 threads() const { return warps * kWarpSize; }
};

// Expert outputs at the rank that made them: offsets in its input block. The rows are those of the
// dispatch, in the same order.
struct EpInputLayout {
  u64 rows;     // bf16 [capacity][row_bytes / 2]
  u64 weights;  // f32 [capacity][top_k]
  u64 bytes;
  u32 row_bytes;  // a multiple of 16
};
CROSSDOCK_HOST_DEVICE constexpr EpInputLayout ep_input_layout(u32 capacity, u32 row_bytes,
                                                              u32 top_k) {
  SymmetricLayout block;
  EpInputLayout out{};
  out.row_bytes = row_bytes;
  out.rows = block.add("rows", u64{capacity} * row_bytes);
  out.weights = block.add("weights", u64{capacity} * top_k * 4);
  out.bytes = block.bytes;
  return out;
}

// How a row is cut: a part of all rows of one token fits into a stage.
struct EpParts {
  u32 bytes;       // of a part of a row, a multiple of 16; the last may be shorter
  u32 count;       // of a row
  u32 per_ticket;  // parts that a warp takes at once

  // `most_rows`: that a token can have: the smaller of ranks and top_k.
  CROSSDOCK_HOST_DEVICE static constexpr EpParts make(u32 stage_bytes, u32 row_bytes,
                                                      u32 most_rows) {
    const u32 fits = stage_bytes / most_rows / 16 * 16;
    EpParts out{};
    out.count = ceil_div(row_bytes, fits);
    out.bytes = round_up(ceil_div(row_bytes, out.count), 16u);
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
  u64 input_offset;  // of this rank's input block in its window
  EpParts parts;
  EpCombineOutput output;
  u32 top_k;
  u32 slot;  // of the input block, for dispatch to know when it is free; kNoSlot: none
  EpState* state;
  u8 source_blocks[kEpMaxRanks];  // of this kernel at every rank
};

// Shared memory of a block: stages, mbarriers, and what each stage holds.
struct EpStageNote {
  u32 token;
  u32 part;
  u32 rows;
  u32 unused;
};
struct EpCombineShared {
  u32 barriers;
  u32 notes;
  u32 epoch;
  u32 bytes;
};
CROSSDOCK_HOST_DEVICE constexpr EpCombineShared ep_combine_shared(EpCombineConfig c) {
  EpCombineShared s{};
  s.barriers = c.warps * c.stages * c.stage_bytes;
  s.notes = s.barriers + round_up(c.warps * c.stages * 8, 16u);
  s.epoch = s.notes + c.warps * c.stages * u32{sizeof(EpStageNote)};
  s.bytes = round_up(s.epoch + 4, 128u);
  return s;
}

}  // namespace crossdock::device
