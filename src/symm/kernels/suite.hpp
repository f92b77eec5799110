// Suite: runs each of the first kernels on all ranks of a group and compares what it did with what
// it should have, word by word. The tests use it on GPUs and in the twin, `crossdock bench symm`
// before it measures. Collective: every process of the group makes the same calls. Single-owner;
// the
// Launcher outlives it. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "symm/kernels/barrier.hpp"
#include "symm/kernels/exchange.hpp"
#include "symm/kernels/probe.hpp"

namespace crossdock::symm {

// How large everything is. The defaults suit the twin: every ring and stage comes round three
// times.
struct SuiteShape {
  u32 blocks = 2;  // of the kernels whose blocks wait for each other
  u32 rounds = 7;  // of barriers and round trips
  u32 max_counts = 40;
  device::RingAllToAllConfig ring{.warp_pairs = 2, .stages = 2, .batch = 2};
  u32 ring_channels = 2;
  u32 ring_slots = 4;
  u32 ring_rows = 26;  // from one rank to another, at most
  device::MoveRowsConfig move{.warps = 4, .stages = 2};
  u32 move_blocks = 2;
  u32 rows_per_warp = 7;
  u32 row_bytes = 48;
  std::chrono::nanoseconds wait{std::chrono::seconds(2)};

  // For GPUs with `num_sms` multiprocessors: rows of 7168 bytes, every SM at the barriers.
  static SuiteShape for_gpu(u32 num_sms);
};

// The areas of the window.
struct SuiteAreas {
  BarrierAreas barrier;
  BarrierAreas grid_barrier;  // other words, the same barrier
  device::AllGatherCountsLayout gather{};
  device::RingLayout ring{};
  u64 flag = 0;
  MoveRowsAreas rows;
};
// Adds to `layout`; the only peer barrier in it.
SuiteAreas add_suite(device::SymmetricLayout& layout, u32 world, const SuiteShape& shape);

class Suite {
 public:
  static Result<Suite> create(Launcher& launcher, const SuiteAreas& areas, const SuiteShape& shape,
                              Deadline deadline);

  // Each: success, a fault of the group, or kInternal naming rank, place, value and expectation.
  Result<> grid_sync(Deadline deadline);
  Result<> barrier(Deadline deadline);
  Result<> grid_barrier(Deadline deadline);
  Result<> all_gather_counts(Deadline deadline);
  Result<> ring_all_to_all(Deadline deadline);
  Result<> flag_ping_pong(Deadline deadline);
  Result<> push_rows(Deadline deadline);
  Result<> pull_rows(Deadline deadline);

  struct Step {
    const char* name;
    Result<> (Suite::*run)(Deadline);
  };
  // All of the above.
  static const std::vector<Step>& steps();
  Result<> run_all(Deadline deadline);
  // After a reset of the group: counts of earlier launches start anew.
  void forget() { flag_rounds_ = 0; }
  [[nodiscard]] Barrier& plain_barrier() { return barrier_; }

 private:
  struct Kernels;
  Suite(Launcher& launcher, const SuiteAreas& areas, const SuiteShape& shape, Kernels&& kernels);
  [[nodiscard]] Group& group() const { return launcher_->group(); }
  // One round of the plain barrier on every local rank, in stream order.
  Result<> meet();
  Result<> check_timed(const char* name, const Rank& rank, const TimedOutcome& outcome) const;
  Result<> move_rows(MoveRows& kernel, Deadline deadline);
  Result<> fill_rows(Rank& rank, Deadline deadline) const;
  Result<> check_pushed(const Rank& rank, const MoveRows::Run& run, Deadline deadline) const;
  Result<> check_pulled(const Rank& rank, const MoveRows::Run& run, Deadline deadline) const;

  Launcher* launcher_;
  SuiteAreas areas_;
  SuiteShape shape_;
  GridSync grid_sync_;
  Barrier barrier_;       // verifies
  Barrier grid_barrier_;  // verifies
  AllGatherCounts gather_;
  RingAllToAll ring_;
  FlagPingPong ping_pong_;
  MoveRows push_;
  MoveRows pull_;
  u32 flag_rounds_ = 0;
  u32 seed_ = 0;  // each step has its own data
};

}  // namespace crossdock::symm
