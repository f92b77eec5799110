// Parameters of moe_cast_rows: rows of a caller as grouped_gemm takes those of e4m3. Plain data,
// shared by host, kernel and twin. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fault.cuh>

namespace crossdock::device {

struct MoeCastRowsConfig {
  u32 warps;
};
struct MoeCastRowsParams {
  LaunchCommon common;
  const u8* rows;    // bf16; null: only scales
  u64 row_stride;    // bytes
  const u32* given;  // without rows: [count][words], to be turned
  u64 given_stride;  // bytes
  u32 count;
  u32 groups;   // of 128 values, in a row
  u32 words;    // of scales in a row: as many as groups; of ue8m0 a fourth, rounded up
  bool ue8m0;   // four scales in a word, the first in its lowest byte; else f32
  u8* codes;    // e4m3, dense
  u32* scales;  // [words][scale_columns]
  u64 scale_columns;
};

}  // namespace crossdock::device
