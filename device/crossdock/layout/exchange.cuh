// Parameters and symmetric areas of the kernels that exchange data: all_gather_counts and
// ring_all_to_all. Plain data and constexpr layout functions, shared by host, kernels and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fault.cuh>
#include <crossdock/layout/sync.cuh>

namespace crossdock::device {

struct AllGatherCountsConfig {
  u32 threads;  // of a block
};
// Offset of the epoch words [2 parities][world][max_counts].
struct AllGatherCountsLayout {
  u64 words;
  u32 max_counts;
};
CROSSDOCK_HOST_DEVICE constexpr AllGatherCountsLayout add_all_gather_counts(SymmetricLayout& layout,
                                                                            u32 world,
                                                                            u32 max_counts) {
  return {layout.add("all_gather.words", u64{2} * world * max_counts * sizeof(u64)), max_counts};
}
struct AllGatherCountsParams {
  LaunchCommon common;
  SymmetricView view;
  AllGatherCountsLayout layout;
  EpochState* epoch;  // device memory of this rank
  const u32* counts;  // [num_counts] of this rank
  u32* gathered;      // [world][num_counts]
  u32 num_counts;     // the same on every rank, at most layout.max_counts
};

struct RingAllToAllConfig {
  u32 warp_pairs;  // sending warps of a block, and as many receiving ones
  u32 stages;      // rows a warp has in flight through shared memory
  u32 batch;       // rows per arrival signal and per credit
};
// A ring of `slots` rows per (receiver, sender, channel); a channel is a block. `tails` and
// `credits` are one padded word each per (peer, channel), counting rows since the last reset.
struct RingLayout {
  u64 rings;
  u64 tails;    // at the receiver: rows that have arrived from the peer
  u64 credits;  // at the sender: rows that the peer has taken out
  u32 channels;
  u32 slots;
  u32 row_bytes;
};
struct RingShape {
  u32 channels;
  u32 slots;      // a multiple of the batch, at least two batches
  u32 row_bytes;  // a multiple of 16
};
CROSSDOCK_HOST_DEVICE constexpr RingLayout add_ring(SymmetricLayout& layout, u32 world,
                                                    RingShape shape) {
  const u64 rings = u64{world} * shape.channels;
  RingLayout out{};
  out.rings = layout.add("ring.rows", rings * shape.slots * shape.row_bytes);
  out.tails = layout.add("ring.tails", rings * sizeof(PaddedWord));
  out.credits = layout.add("ring.credits", rings * sizeof(PaddedWord));
  out.channels = shape.channels;
  out.slots = shape.slots;
  out.row_bytes = shape.row_bytes;
  return out;
}
CROSSDOCK_HOST_DEVICE constexpr u64 ring_index(const RingLayout& ring, u32 peer, u32 channel) {
  return u64{peer} * ring.channels + channel;
}
// Rows with index c, c + channels, ... go through channel c.
CROSSDOCK_HOST_DEVICE constexpr u32 channel_rows(const RingLayout& ring, u32 rows, u32 channel) {
  return rows > channel ? (rows - channel - 1) / ring.channels + 1 : 0;
}

// Totals that outlive a launch, [world][channels] each, in device memory of this rank.
struct RingTotals {
  u32* sent;
  u32* received;
};
struct RingAllToAllParams {
  LaunchCommon common;
  SymmetricView view;
  RingLayout ring;
  RingTotals totals;
  const u8* input;          // [world][max_rows] rows
  u8* output;               // [world][max_rows] rows
  const u32* send_rows;     // [world]: rows for each rank, at most max_rows
  const u32* receive_rows;  // [world]: rows from each rank: what that rank sends
  u32 max_rows;
};

}  // namespace crossdock::device
