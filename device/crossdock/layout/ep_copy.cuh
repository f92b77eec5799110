// Parameters of ep_copy_rows: planes of received rows from one place of a rank's memory to another.
// Plain data and constexpr functions, shared by host, kernel and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep.cuh>

namespace crossdock::device {

// Rows one after the other, or (scales by column) several columns of a word a row.
struct EpPlane {
  const u8* from;
  u8* to;
  u64 pitch;      // bytes from column to column, the same on both sides
  u32 columns;    // 1: by row
  u32 row_bytes;  // of a row in a column, a multiple of 4
};

inline constexpr u32 kEpMaxPlanes = 5;  // rows, scales, ids, weights, token numbers

struct EpCopyRowsConfig {
  u32 threads;  // of a block
};
struct EpCopyRowsParams {
  LaunchCommon common;
  SymmetricView view;
  const u32* rows;  // how many
  EpPlane planes[kEpMaxPlanes];
  u32 num_planes;
  EpFree free;  // of where the planes go
};

}  // namespace crossdock::device
