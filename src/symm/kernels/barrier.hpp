// Host side of grid_sync_bench and barrier: arguments checked, buffers held, results read. Both
// time themselves on the GPU. Single-owner; the Launcher outlives them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <vector>

#include <crossdock/layout/probe.cuh>

#include "symm/launch.hpp"

namespace crossdock::symm {

// What a timed kernel left behind on one rank.
struct TimedOutcome {
  u64 elapsed_ns = 0;  // of all rounds, by the GPU's clock; virtual time in the twin
  u32 mismatches = 0;  // verify: reads that saw another value than the barrier promises
};

struct GridSyncOptions {
  bool verify = false;
  u32 max_blocks = 1;
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};  // the longest single wait
};

// Rounds of grid sync on one rank; no peer takes part.
class GridSync {
 public:
  static Result<GridSync> create(Launcher& launcher, const GridSyncOptions& options,
                                 Deadline deadline);
  struct Run {
    u32 blocks = 1;
    u32 rounds = 1;
    u32 counter = 0;  // which of the four
  };
  Result<> launch(const Rank& rank, const Run& run);
  // After synchronize(): the slowest block's time, and all mismatches so far.
  Result<TimedOutcome> outcome(const Rank& rank, Deadline deadline) const;

 private:
  struct Buffers {
    u32 rank;
    LocalMemory words, elapsed, mismatches;
  };
  GridSync(Launcher& launcher, const GridSyncOptions& options,
           Prepared<device::GridSyncBenchParams> kernel)
      : launcher_(&launcher), options_(options), kernel_(std::move(kernel)) {}
  [[nodiscard]] const Buffers& of(const Rank& rank) const;

  Launcher* launcher_;
  GridSyncOptions options_;
  Prepared<device::GridSyncBenchParams> kernel_;
  std::vector<Buffers> buffers_;
};

struct BarrierOptions {
  bool grid_sync = false;  // all blocks of all ranks meet; else one block of each rank
  bool verify = false;
  u32 blocks = 1;  // of a rank, the same on all; 1 without grid_sync
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
};

// Offsets in the window. A rank counts its barriers in its control block, so a window has one peer
// barrier that all kernels share: add it once, with device::add_peer_barrier.
struct BarrierAreas {
  device::PeerBarrierLayout barrier;
  u64 words = 0;  // verify only
};
// The words that `verify` checks.
u64 add_barrier_words(device::SymmetricLayout& layout, u32 world, const BarrierOptions& options);

// Rounds of the barrier across all ranks. Launched on every rank of the world.
class Barrier {
 public:
  static Result<Barrier> create(Launcher& launcher, const BarrierAreas& areas,
                                const BarrierOptions& options, Deadline deadline);
  Result<> launch(const Rank& rank, u32 rounds);
  Result<TimedOutcome> outcome(const Rank& rank, Deadline deadline) const;

 private:
  struct Buffers {
    u32 rank;
    LocalMemory elapsed, mismatches;
  };
  Barrier(Launcher& launcher, const BarrierAreas& areas, const BarrierOptions& options,
          Prepared<device::BarrierParams> kernel)
      : launcher_(&launcher), areas_(areas), options_(options), kernel_(std::move(kernel)) {}
  [[nodiscard]] const Buffers& of(const Rank& rank) const;

  Launcher* launcher_;
  BarrierAreas areas_;
  BarrierOptions options_;
  Prepared<device::BarrierParams> kernel_;
  std::vector<Buffers> buffers_;
};

}  // namespace crossdock::symm
