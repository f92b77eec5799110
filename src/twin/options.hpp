// What a run of the twin is told (Schedule), what is launched (LaunchConfig) and what comes back
// (Report). Plain values, used by every layer that launches kernels on the twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace crossdock::twin {

// Who runs next. Each finds bugs that others miss, so tests go through seeds with kBySeed.
enum class Policy : std::uint8_t {
  kBySeed,
  kWarps,     // a random warp, all its ready lanes: the fastest
  kThreads,   // a random lane of a random warp: breaks every assumption of lockstep
  kStarve,    // as kWarps, but one rank, block or warp is held back for a long time
  kPriority,  // random priorities with rare changes: long runs of few warps
  kInOrder,   // round robin: close to a GPU at rest
};

// When bulk copies and wgmma take effect.
enum class AsyncMode : std::uint8_t {
  kBySeed,
  kEarly,      // at once
  kRandom,     // at random times, in random pieces
  kLate,       // only when nothing else can run: as late as is legal
  kLateReads,  // reads of shared memory (stores, wgmma) late, loads at random times
};

struct Schedule {
  std::uint64_t seed = 1;
  Policy policy = Policy::kBySeed;
  AsyncMode async_mode = AsyncMode::kBySeed;
  bool weak = false;        // stores stay in store buffers until a release of enough scope
  bool stale = false;       // loads may return values that the thread need not know overwritten
  bool proxy_check = true;  // generic/async proxy and in-flight hazards in shared memory
  bool fire_deadlines =
      false;                  // when all threads wait, let virtual time run until a deadline fires
  unsigned preempt_log2 = 4;  // a hook gives way with probability 2^-n; 32 and more: never
  std::uint64_t max_steps = 400'000'000;
};

struct LaunchConfig {
  int rank = 0;
  int stream = 0;  // kernels of one rank and stream run one after the other, others side by side
  std::uint32_t grid = 1;
  std::uint32_t block = 32;
  std::size_t shared_bytes = 0;
  // On the GPU it may start before the kernel ahead of it has ended: a thread that touches global
  // memory before it has called grid_dependency_wait breaks a rule.
  bool overlap = false;
  const char* name = "kernel";  // appears in reports; a literal
};

enum class Outcome : std::uint8_t {
  kCompleted,
  kDeadlock,   // every live thread waits for something that cannot come
  kViolation,  // a rule of the device was broken: `kind` says which
  kStepLimit,  // a livelock, or max_steps is too small
};

struct Report {
  Outcome outcome = Outcome::kCompleted;
  std::string kind;  // "deadlock", "proxy", "out-of-bounds", "barrier", ...; empty when completed
  std::string message;  // rank/block/thread, waiting operation, file:line
  std::uint64_t seed = 0;
  std::uint64_t steps = 0;         // switches to a fiber
  std::uint64_t hooks = 0;         // primitives executed (approximate)
  std::uint64_t async_events = 0;  // pieces of asynchronous operations and drained stores
  std::uint64_t virtual_ns = 0;
  std::uint64_t schedule_hash = 0;  // equal for equal schedules: proves that a seed replays
  [[nodiscard]] bool ok() const noexcept { return outcome == Outcome::kCompleted; }
};

struct WorldOptions {
  int ranks = 1;
  int ranks_per_node = 0;                           // 0: all ranks on one node
  std::size_t heap_bytes = std::size_t{64} << 20;   // per rank
  std::size_t stack_bytes = std::size_t{64} << 10;  // per CUDA thread; only touched pages count
};

// What kBySeed stands for in a given seed; exposed so that a test can say what it has covered.
Policy policy_of(const Schedule& schedule);
AsyncMode async_mode_of(const Schedule& schedule);

}  // namespace crossdock::twin
