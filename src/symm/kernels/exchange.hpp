// Host side of all_gather_counts and ring_all_to_all: arguments checked, what outlives a launch
// held (epochs, totals; zeroed by a reset of the group). Single-owner; the Launcher outlives them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <vector>

#include <crossdock/layout/exchange.cuh>

#include "symm/launch.hpp"

namespace crossdock::symm {

struct AllGatherOptions {
  u32 blocks = 1;
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
};

// Every rank gets the counts of every rank. The same number of launches, with the same num_counts,
// on every rank of the world. One object for an area of words: each counts its own epochs, and two
// over the same words would see each other's.
class AllGatherCounts {
 public:
  // `layout`: from device::add_all_gather_counts.
  static Result<AllGatherCounts> create(Launcher& launcher,
                                        const device::AllGatherCountsLayout& layout,
                                        const AllGatherOptions& options, Deadline deadline);
  // `counts`: [num_counts] and `gathered`: [world][num_counts], memory of the rank.
  struct Arguments {
    const u32* counts = nullptr;
    u32* gathered = nullptr;
    u32 num_counts = 0;
  };
  Result<> launch(const Rank& rank, const Arguments& arguments);

 private:
  struct State {
    u32 rank;
    LocalMemory epoch;
  };
  AllGatherCounts(Launcher& launcher, const device::AllGatherCountsLayout& layout,
                  const AllGatherOptions& options, Prepared<device::AllGatherCountsParams> kernel)
      : launcher_(&launcher), layout_(layout), options_(options), kernel_(std::move(kernel)) {}

  Launcher* launcher_;
  device::AllGatherCountsLayout layout_;
  AllGatherOptions options_;
  Prepared<device::AllGatherCountsParams> kernel_;
  std::vector<State> states_;
};

struct RingOptions {
  device::RingAllToAllConfig config{.warp_pairs = 4, .stages = 4, .batch = 8};
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};
};

// Rows from every rank to every rank through rings with credits. Launched on every rank of the
// world.
class RingAllToAll {
 public:
  // `ring`: from device::add_ring.
  static Result<RingAllToAll> create(Launcher& launcher, const device::RingLayout& ring,
                                     const RingOptions& options, Deadline deadline);
  // All in memory of the rank; rows are [world][max_rows][row_bytes].
  struct Arguments {
    const u8* input = nullptr;
    u8* output = nullptr;
    const u32* send_rows = nullptr;     // [world], each at most max_rows
    const u32* receive_rows = nullptr;  // [world]: what those ranks send to this one
    u32 max_rows = 0;
  };
  Result<> launch(const Rank& rank, const Arguments& arguments);

 private:
  struct State {
    u32 rank;
    LocalMemory sent, received;
  };
  RingAllToAll(Launcher& launcher, const device::RingLayout& ring, const RingOptions& options,
               Prepared<device::RingAllToAllParams> kernel)
      : launcher_(&launcher), ring_(ring), options_(options), kernel_(std::move(kernel)) {}

  Launcher* launcher_;
  device::RingLayout ring_;
  RingOptions options_;
  Prepared<device::RingAllToAllParams> kernel_;
  std::vector<State> states_;
};

}  // namespace crossdock::symm
