// Parameters of the kernels beside the copy engines: fetch_rows (rows of a table that is dealt to
// the ranks) and add_parts (the sums of a reduce-scatter). Plain data, shared by host, kernels and
// twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fault.cuh>
#include <crossdock/layout/symmetric.cuh>

namespace crossdock::device {

struct FetchRowsConfig {
  u32 warps;   // of a block
  u32 stages;  // rows a warp has in flight
  bool wide;   // indices of 64 bits; else of 32
};
// Row i of the output is row indices[i] of the table; zero when that is -1.
struct FetchRowsParams {
  LaunchCommon common;
  SymmetricView view;
  u64 table;  // offset of this rank's shard in every window
  const void* indices;
  const u8* zeros;  // row_bytes zero bytes in memory of this rank
  u8* output;
  u64 output_stride;  // bytes
  u64 shard_rows;     // rank r has rows r * shard_rows and on
  u32 rows;           // indices
  u32 row_bytes;      // a multiple of 16
};

struct AddPartsConfig {
  u32 threads;  // of a block
  bool bf16;    // else fp32
};
// The sum of the parts of all ranks in the order of the ranks, in fp32.
struct AddPartsParams {
  LaunchCommon common;
  const u8* parts;  // part r at r * pitch, of all ranks but this
  const u8* own;    // the part of this rank
  u8* output;
  u64 pitch;    // bytes
  u64 vectors;  // of 16 bytes in a part
  u32 world;
};

}  // namespace crossdock::device
