// Parameters of the kernels that measure or only synchronise: grid_sync_bench, barrier,
// flag_ping_pong, push_rows and pull_rows. Plain data, shared by host, kernels and twin; what each
// kernel does and needs is in the header of kernel/<name>.cuh.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fault.cuh>
#include <crossdock/layout/sync.cuh>

namespace crossdock::device {

struct GridSyncBenchConfig {
  u32 threads;
  bool verify;  // every block writes a word before, and reads its neighbour's after each sync
};
struct GridSyncBenchParams {
  LaunchCommon common;
  u32* words;       // verify: [2][grid] in device memory
  u64* elapsed_ns;  // [grid] device memory: time of all rounds
  u32* mismatches;  // device memory, one word, added to
  u32 rounds;
  u32 counter;  // 0..3: which of the four counters
};

struct BarrierConfig {
  u32 threads;     // of a block
  bool grid_sync;  // true: all blocks of all ranks meet; false: one block a rank
  bool verify;     // every thread writes a word to every peer before and checks what came after
};
struct BarrierParams {
  LaunchCommon common;
  SymmetricView view;
  PeerBarrierLayout barrier;
  u64 words;        // verify: offset of [2][world][grid * threads] words
  u64* elapsed_ns;  // one word in device memory
  u32* mismatches;  // one word in device memory, added to
  u32 rounds;
};

struct FlagPingPongConfig {
  bool release;  // release/acquire accesses; false: relaxed, the bare latency
};
struct FlagPingPongParams {
  LaunchCommon common;
  SymmetricView view;
  u64 flag;         // offset of a 128-byte line in every window
  u64* elapsed_ns;  // one word in device memory
  u32 first;        // the rank that serves
  u32 second;       // the rank that returns
  u32 rounds;       // round trips
  u32 start;        // value of the flags before: rounds of all earlier launches
};

struct MoveRowsConfig {
  u32 warps;   // of a block
  u32 stages;  // rows a warp has in flight
};
// Every warp of every block moves `rows_per_warp` rows. Row i of warp w goes to (push) or comes
// from (pull) the peer `row_peer` names, from slot to slot of the same number.
struct MoveRowsParams {
  LaunchCommon common;
  SymmetricView view;
  u64 source;       // offset of `slots` rows
  u64 destination;  // push: of [world][slots] rows, one part per sender; pull: of `slots` rows
  u64* elapsed_ns;  // [grid] device memory
  u32 row_bytes;    // a multiple of 16
  u32 rows_per_warp;
  u32 slots;  // rows of a window; a warp's rows wrap around
  u32 seed;
  u32 fixed_peer;  // kNoPeer: a random peer for each row, never this rank
};

// A well-mixed 32-bit value (a multiply-xorshift finaliser), the same on host and device.
CROSSDOCK_HOST_DEVICE constexpr u32 mix(u32 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
// The peer of row `row` of rank `rank`.
CROSSDOCK_HOST_DEVICE constexpr u32 row_peer(const MoveRowsParams& p, u32 row) {
  if (p.fixed_peer != kNoPeer) return p.fixed_peer;
  const u32 world = p.view.world;
  if (world == 1) return 0;
  const u32 step = 1 + mix(p.seed ^ mix(p.view.rank * 0x9e3779b9u + row)) % (world - 1);
  return (p.view.rank + step) % world;
}

}  // namespace crossdock::device
