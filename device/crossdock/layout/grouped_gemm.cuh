// Parameters of grouped_gemm: the rows of many experts times the weights of each. Plain data and
// constexpr functions, shared by host, kernels and twin.
//
//   output[row] = epilogue(input[row] * weights[expert of the row]^T)
//
// Input and weights are K-major. A tile is `tile_rows` rows of one expert by 256 columns (rows of
// the weights); a stage of shared memory holds 128 bytes of K of both: 128 values of e4m3 or 64 of
// bf16. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fault.cuh>
#include <crossdock/layout/fp4_weights.cuh>

namespace crossdock::device {

inline constexpr u32 kGemmColumns = 256;     // of a tile
inline constexpr u32 kGemmStageBytes = 128;  // of K, of each row in a stage
inline constexpr u32 kGemmScaleGroup = 128;  // values of K, and columns, that share a scale
inline constexpr u32 kGemmMathWarps = 8;     // two warpgroups
inline constexpr u32 kGemmLoadWarps = 4;     // one warpgroup
inline constexpr u32 kGemmUnpackWarps = 4;   // one warpgroup, of tiles of many rows of fp4
inline constexpr u32 kGemmRecords = 16;      // more tiles than the loader can be ahead
inline constexpr u32 kGemmMaxExperts = 512;  // of one rank: their table is in shared memory
inline constexpr u32 kGemmMathBarrier = 1;   // named barrier of the math warps
// Where the rows of an expert may begin when their scales come by tensor map: at 16 bytes of them.
inline constexpr u32 kGemmScaledBegin = 4;
inline constexpr u32 kGemmPackedStages = 3;  // of fp4 that is unpacked apart
// In the fault that tells of an expert's rows, instead of the room there is: they begin elsewhere.
inline constexpr u32 kGemmMisplaced = 0xffffffffu;

struct GroupedGemmConfig {
  u32 tile_rows;  // 128, 64; swapped: 32, 16 or 8
  u32 stages;
  bool fp8 = false;      // e4m3 with scales; else bf16
  bool swapped = false;  // the weights are wgmma's A operand: for few rows an expert
  bool swiglu = false;   // columns are gate and up; else they are stored as bf16
  bool ue8m0 = false;    // scales are powers of two in a byte; else f32
  bool fp4 = false;      // weights in e2m1; the input in e4m3
  // Tiles of 128 rows of e4m3 whose outputs another warp stores: see gemm/hand_over.cuh.
  bool hand_over = false;
  // Weights in e2m1, few rows: two of the integer units' instructions for each word go to the units
  // that multiply, and the loader asks for a tile's scales with its first stage.
  bool spare_integers = false;
};

// Tiles of many rows of fp4: a warpgroup makes e4m3 of the weights, for the math warps.
CROSSDOCK_HOST_DEVICE constexpr bool gemm_unpacks_apart(const GroupedGemmConfig& c) {
  return c.fp4 && !c.swapped;
}

// Whether outputs lie in the place of a tile's last stage until they are stored, so that this place
// sits out a turn of the ring; what SwiGLU makes of a tile has room elsewhere.
CROSSDOCK_HOST_DEVICE constexpr bool gemm_lends(const GroupedGemmConfig& c) {
  return c.hand_over && !c.swiglu;
}
// The stages of a tile that hands over: the ring must have come round before a place is lent again.
CROSSDOCK_HOST_DEVICE constexpr bool gemm_long_enough(const GroupedGemmConfig& c, u32 k_stages) {
  return k_stages >= (gemm_lends(c) ? 2 * c.stages : c.stages);
}

CROSSDOCK_HOST_DEVICE constexpr u32 gemm_threads(const GroupedGemmConfig& c) {
  return (kGemmLoadWarps + kGemmMathWarps + (gemm_unpacks_apart(c) ? kGemmUnpackWarps : 0)) *
         kWarpSize;
}

// Where the rows of each expert are.
struct GemmRows {
  const u32* offsets;  // [experts + 1]: first row of each; null: expert * expert_rows
  const u32* counts;   // [experts]; null: up to the next offset
  u32 expert_rows;
  u32 places;       // rows that there are, in the input or, if gathered, in the list
  const i32* list;  // gather: the input's row for each place, -1: none; null: places are rows
};
struct GemmShape {
  u32 experts;
  u32 columns;       // rows of an expert's weights, a multiple of 128
  u32 k_stages;      // of 128 bytes
  u32 scale_groups;  // of 128 values along K
};
struct GemmOutput {
  u8* rows;
  u32 row_stride;  // bytes
  // With swiglu and fp8: [columns / 256][scale_columns], or like those of the input.
  float* scales;
  u64 scale_columns;
};
struct GemmSwiglu {
  const float* row_weights;  // [places]: each row times its own; null: 1
  float clamp;               // infinity: none
  bool fast;                 // approximate exponential and reciprocal
};

// Added to the sums of each column before they are rounded; columns as the weights have them.
struct GemmBias {
  const u8* values;  // [experts][columns], 16-byte aligned; null: none
  bool bf16;         // else f32
};

struct GroupedGemmParams {
  LaunchCommon common;
  TensorMap input_map;        // not gathered: box tile_rows x 128 bytes, swizzle 128
  TensorMap weight_map;       // not fp4: box 256 x 128 bytes, swizzle 128
  TensorMap input_scale_map;  // fp8, not gathered: box tile_rows of [scale_groups][rows]
  const u8* input_rows;       // gathered
  u64 input_row_stride;       // bytes
  u32 input_count;            // rows that there are
  // fp8, gathered: [scale_groups][input_scale_columns]. Of ue8m0 four groups are in a word, the
  // first in its lowest byte: [scale_groups / 4, rounded up][input_scale_columns].
  const float* input_scales;
  u64 input_scale_columns;
  const void* weight_scales;  // fp8: [experts][columns / 128][scale_groups] f32 or bytes of ue8m0
  const u8* weight_blocks;    // fp4: [experts][columns / 128][k_stages] blocks
  GemmRows rows;
  GemmShape shape;
  GemmOutput output;
  GemmSwiglu swiglu;
  GemmBias bias;
  u64* cycles;  // [blocks]: how long each was at it; null: not wanted
  // Of configurations with `hand_over`: whether this call does, which has neither a list nor a bias
  // and is gemm_long_enough(); then box 64 x 128 bytes, swizzle 128.
  bool hands_over;
  u32 skipped;  // the lent stage sits out its turn before a tile's stage of this number; ~0: none
  TensorMap output_map;
};

// What the loader tells the math warps of a tile.
struct alignas(16) GemmRecord {
  u32 row;     // first place of the tile
  u32 rows;    // valid ones, at most tile_rows
  u32 column;  // first column
  u32 expert;
};

// Offsets of the parts of shared memory.
struct GemmShared {
  u32 input, weights, packed, staging, input_scales, full, empty;
  u32 packed_full, packed_empty, unpacked, handed, returned, stored, records, begin, sources,
      exchange, table, fp4_table, bytes;
  u32 input_bytes, weight_bytes, packed_bytes, input_scale_bytes;  // of a stage
};
CROSSDOCK_HOST_DEVICE constexpr GemmShared grouped_gemm_shared(const GroupedGemmConfig& c) {
  GemmShared s{};
  const bool apart = gemm_unpacks_apart(c);
  const u32 packed_stages = apart ? kGemmPackedStages : 0;
  s.packed_bytes = kGemmColumns / kFp4BlockRows * kFp4BlockBytes;
  s.input_bytes = c.tile_rows * kGemmStageBytes;
  s.weight_bytes = c.fp4 && !apart ? s.packed_bytes : kGemmColumns * kGemmStageBytes;
  s.input_scale_bytes = round_up(c.tile_rows * 4, 128u);
  s.input = 0;
  s.weights = s.input + c.stages * s.input_bytes;
  s.packed = s.weights + c.stages * s.weight_bytes;
  s.staging = s.packed + packed_stages * s.packed_bytes;
  s.fp4_table = s.staging + kGemmMathWarps * 2048;
  s.input_scales = s.fp4_table + (c.fp4 ? kFp4TableBytes : 0);
  s.full = s.input_scales + (c.fp8 ? c.stages * s.input_scale_bytes : 0);
  s.empty = s.full + c.stages * 8;
  s.packed_full = s.empty + c.stages * 8;
  s.packed_empty = s.packed_full + packed_stages * 8;
  s.unpacked = s.packed_empty + packed_stages * 8;
  s.handed = s.unpacked + (apart ? c.stages * 8 : 0);
  s.returned = s.handed + (c.hand_over ? 4 * 8 : 0);
  s.stored = s.returned + (c.hand_over ? 8 : 0);
  s.records = round_up(s.stored + (c.hand_over ? 8 : 0), 16u);
  s.begin = s.records + kGemmRecords * sizeof(GemmRecord);
  s.sources = s.begin + 16;
  s.exchange = s.sources + c.tile_rows * 16;
  const u32 exchanged = c.swapped ? c.tile_rows * kGemmMathWarps * 4 : 1024;
  s.table = s.exchange + (c.swiglu && c.fp8 ? exchanged : 0);
  s.bytes = s.table + (3 * kGemmMaxExperts + 1) * 4;
  return s;
}

}  // namespace crossdock::device
