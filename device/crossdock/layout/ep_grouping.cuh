// Parameters of the kernels that look at received rows expert by expert: ep_group_rows and
// ep_reduce_rows. Plain data and constexpr functions, shared by host, kernels and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep.cuh>

namespace crossdock::device {

// What a dispatch has delivered to this rank.
struct EpArrived {
  const u32* source_ends;    // [world]; the last is the number of rows
  const u32* expert_counts;  // [experts]
  const i32* ids;            // [rows][top_k], local experts or -1
  const float* weights;      // [rows][top_k]
  u32 world;
  u32 experts;  // of this rank
  u32 top_k;
};

// Places for the choices of every expert, one expert after the other, each beginning at a multiple
// of `alignment`.
struct EpGrouping {
  u32* offsets;    // [experts + 1]: where the places of each expert begin; the last is the end
  i32* rows;       // [places]: the received row of each place, in order; -1 where there is none
  u32* positions;  // [rows][top_k]: the place of each choice that is one of this rank
  u32 alignment;
};
// The most places that `capacity` rows can need.
CROSSDOCK_HOST_DEVICE constexpr u64 ep_most_places(u32 capacity, u32 top_k, u32 experts,
                                                   u32 alignment) {
  return u64{capacity} * top_k + u64{experts} * (alignment - 1);
}

struct EpGroupRowsConfig {
  u32 threads;  // of a block, which takes an expert at a time
};
struct EpGroupRowsParams {
  LaunchCommon common;
  EpArrived arrived;
  EpGrouping grouping;
};

struct EpReduceRowsConfig {
  u32 warps;  // of a block; each takes a row at a time
};
struct EpReduceRowsParams {
  LaunchCommon common;
  EpArrived arrived;
  const u32* positions;
  const u8* outputs;  // bf16, a row for every place
  u64 output_stride;
  u8* input;  // bf16: what combine will pull, a row for every received row
  u32 row_bytes;
  bool weighted;  // each choice times its weight; else a plain sum
};

}  // namespace crossdock::device
