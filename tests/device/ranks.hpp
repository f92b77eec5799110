// What the kernel tests share: a world of ranks in the twin, each with a symmetric window of one
// layout, a control block and a fault record, and a way to run launches under many schedules.
// Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include <crossdock/layout/fault.cuh>
#include <crossdock/layout/probe.cuh>
#include <crossdock/layout/sync.cuh>

#include "twin/launch.hpp"

namespace crossdock::testing {

using namespace crossdock::device;

inline constexpr u64 kMillisecond = 1'000'000;
inline constexpr u32 kSeeds = 16;
// World sizes every kernel is tested at: one, even, odd, prime, more than a warp's worth.
inline constexpr u32 kWorlds[] = {1, 2, 3, 5, 8, 32};

// Runs `body` for a world; with 32 ranks prints the seconds of the CPU that it takes and fails
// where they are more than `most`. What else runs on the machine does not count, and instrumented
// code is as slow as it is.
template <class Body>
void bounded_at_32_ranks(u32 world, double most, const char* what, const Body& body) {
  const std::clock_t start = std::clock();
  body();
  const double took = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  if (world != 32) return;
  std::printf("%s, 32 ranks, %u seeds: %.1f s of the CPU\n", what, kSeeds, took);
#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD) || \
    defined(CROSSDOCK_SANITIZE_UNDEFINED)
  static_cast<void>(most);
#else
  EXPECT_LE(took, most) << what;
#endif
}

// Seed `seed` with every memory effect that is legal.
inline twin::Schedule schedule(u64 seed) {
  twin::Schedule s;
  s.seed = seed;
  s.weak = true;
  s.stale = true;
  return s;
}
// The same, for launches in which a peer is missing: deadlines fire when nothing else can happen.
inline twin::Schedule fault_schedule(u64 seed) {
  twin::Schedule s = schedule(seed);
  s.fire_deadlines = true;
  return s;
}

class Ranks {
 public:
  // `table`: views find the peers through an offset table instead of the stride.
  Ranks(u32 world, const SymmetricLayout& layout, bool table = false)
      : world_(world), layout_(layout) {
    EXPECT_FALSE(layout.overflow);
    twin::WorldOptions options;
    options.ranks = static_cast<int>(world);
    options.heap_bytes = round_up<u64>(layout.bytes + (u64{1} << 20), u64{1} << 20);
    options.stack_bytes = 32 << 10;
    auto made = twin::World::create(options);
    if (!made.ok()) {
      ADD_FAILURE() << made.error().describe();
      std::abort();
    }
    twin_ = std::move(made).value();
    for (u32 rank = 0; rank < world; ++rank) {
      windows_.push_back(local<u8>(rank, layout.bytes, 1024));
      control_.push_back(local<ControlBlock>(rank, 1, 128));
      faults_.push_back(make_fault(rank));
    }
    for (u32 rank = 0; rank < world; ++rank)
      tables_.push_back(table ? make_table(rank) : nullptr);
  }
  ~Ranks() {
    for (FaultRecord* fault : faults_) {
      (void)twin_->detach(fault);
      std::free(fault);
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] u32 world() const { return world_; }
  [[nodiscard]] const FaultRecord& fault(u32 rank) const { return *faults_[rank]; }
  [[nodiscard]] ControlBlock& control(u32 rank) { return *control_[rank]; }
  template <class T>
  T* window(u32 rank, u64 offset) {
    return reinterpret_cast<T*>(windows_[rank] + offset);
  }

  // Zeroed memory of a rank, outside the window.
  template <class T>
  T* local(u32 rank, u64 count, u64 alignment = 256) {
    auto got = twin_->allocate(static_cast<int>(rank), count * sizeof(T), alignment);
    if (!got.ok()) {
      ADD_FAILURE() << got.error().describe();
      std::abort();
    }
    return static_cast<T*>(got.value());
  }

  [[nodiscard]] LaunchCommon common(u32 rank, KernelId kernel) const {
    return {5 * kMillisecond, faults_[rank], control_[rank], kernel, rank};
  }
  [[nodiscard]] SymmetricView view(u32 rank) const {
    return {windows_[rank], static_cast<i64>(twin_->heap_bytes()), tables_[rank], rank, world_};
  }

  // What the host does to make a group usable again after a fault.
  void reset() {
    for (u32 rank = 0; rank < world_; ++rank) {
      std::memset(windows_[rank], 0, layout_.bytes);
      std::memset(static_cast<void*>(control_[rank]), 0, sizeof(ControlBlock));
      std::memset(static_cast<void*>(faults_[rank]), 0, sizeof(FaultRecord));
    }
  }

  struct Shape {
    u32 grid = 1;
    u32 block = 32;
    u32 shared_bytes = 0;
    const char* name = "kernel";
    bool overlap = false;
    u32 stream = 0;  // of the rank; what is in different ones runs side by side
  };
  template <class Params>
  void launch(u32 rank, const Shape& shape, void (*kernel)(const Params&), const Params& params) {
    twin::LaunchConfig config;
    config.rank = static_cast<int>(rank);
    config.grid = shape.grid;
    config.block = shape.block;
    config.shared_bytes = shape.shared_bytes;
    config.name = shape.name;
    config.overlap = shape.overlap;
    config.stream = static_cast<int>(shape.stream);
    auto done = twin_->launch(config, kernel, params);
    if (!done.ok()) ADD_FAILURE() << done.error().describe();
  }
  // Runs everything launched; the run has to end by itself and break no rule of the device.
  void run(const twin::Schedule& s) {
    auto report = twin_->run(s);
    ASSERT_TRUE(report.ok()) << report.error().describe();
    ASSERT_TRUE(report.value().ok()) << "seed " << s.seed << ": " << report.value().kind << "\n"
                                     << report.value().message;
    virtual_ns_ = report.value().virtual_ns;
  }
  // How long the last run took by the clock of its threads.
  [[nodiscard]] u64 virtual_ns() const { return virtual_ns_; }
  // As run(); and no rank has raised a fault.
  void run_clean(const twin::Schedule& s) {
    run(s);
    for (u32 rank = 0; rank < world_; ++rank)
      ASSERT_EQ(fault(rank).state, FaultRecord::kEmpty)
          << "seed " << s.seed << ": rank " << rank << " in " << phase_name(fault(rank).phase)
          << " of peer " << fault(rank).peer << " expected " << fault(rank).expected << " saw "
          << fault(rank).seen;
  }

 private:
  // Host memory, as a pinned page would be, known to the rank.
  FaultRecord* make_fault(u32 rank) {
    constexpr std::size_t kPage = 4096;
    void* page = std::aligned_alloc(kPage, kPage);
    std::memset(page, 0, kPage);
    auto done = twin_->attach(static_cast<int>(rank), page, kPage);
    if (!done.ok()) ADD_FAILURE() << done.error().describe();
    return static_cast<FaultRecord*>(page);
  }
  const i64* make_table(u32 rank) {
    i64* table = local<i64>(rank, world_);
    for (u32 peer = 0; peer < world_; ++peer)
      table[peer] = windows_[peer] - windows_[rank];
    return table;
  }

  u32 world_;
  u64 virtual_ns_ = 0;
  SymmetricLayout layout_;
  std::unique_ptr<twin::World> twin_;
  std::vector<u8*> windows_;
  std::vector<ControlBlock*> control_;
  std::vector<FaultRecord*> faults_;
  std::vector<const i64*> tables_;
};

// The fields of a fault record that a test knows.
inline void expect_fault(const FaultRecord& fault, KernelId kernel, Phase phase, u32 rank,
                         u32 peer) {
  EXPECT_EQ(fault.state, FaultRecord::kWritten);
  EXPECT_EQ(fault.kernel, kernel) << kernel_name(fault.kernel);
  EXPECT_EQ(fault.phase, phase) << phase_name(fault.phase);
  EXPECT_EQ(fault.rank, rank);
  EXPECT_EQ(fault.peer, peer);
}

}  // namespace crossdock::testing
