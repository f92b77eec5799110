// See barrier.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/kernels/barrier.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "symm/copy.hpp"
#include "symm/kernels/buffers.hpp"
#include "symm/kernels/list.hpp"

namespace crossdock::symm {
namespace {

u64 barrier_words(u32 world, const BarrierOptions& options) {
  const u32 threads = options.grid_sync ? kGridBarrierThreads : kBarrierThreads;
  return u64{2} * world * options.blocks * threads;
}

}  // namespace

Result<GridSync> GridSync::create(Launcher& launcher, const GridSyncOptions& options,
                                  Deadline deadline) {
  if (options.max_blocks == 0)
    return invalid_argument("grid sync: max_blocks = 0 must be at least 1");
  CROSSDOCK_TRY(kernel, launcher.prepare(grid_sync_kernel(options.verify),
                                         {.threads = kGridSyncThreads}, deadline));
  GridSync made(launcher, options, std::move(kernel));
  for (const u32 r : launcher.group().local_ranks()) {
    Rank& rank = launcher.group().rank(r);
    CROSSDOCK_TRY(words, rank.allocate(2 * u64{options.max_blocks} * sizeof(u32)));
    CROSSDOCK_TRY(elapsed, rank.allocate(options.max_blocks * sizeof(u64)));
    CROSSDOCK_TRY(mismatches, rank.allocate(sizeof(u32)));
    made.buffers_.push_back({r, std::move(words), std::move(elapsed), std::move(mismatches)});
  }
  return made;
}

const GridSync::Buffers& GridSync::of(const Rank& rank) const {
  return find_rank(buffers_, rank);
}

Result<> GridSync::launch(const Rank& rank, const Run& run) {
  if (run.blocks == 0 || run.blocks > options_.max_blocks)
    return invalid_argument(fmt::format("grid sync: blocks = {} must be 1 to max_blocks = {}",
                                        run.blocks, options_.max_blocks));
  if (run.counter >= device::kGridSyncCounters)
    return invalid_argument(fmt::format("grid sync: counter = {} must be 0 to {}", run.counter,
                                        device::kGridSyncCounters - 1));
  const Buffers& b = of(rank);
  device::GridSyncBenchParams p{};
  p.common = rank.common(device::KernelId::kGridSyncBench, options_.wait);
  p.words = b.words.as<u32>();
  p.elapsed_ns = b.elapsed.as<u64>();
  p.mismatches = b.mismatches.as<u32>();
  p.rounds = run.rounds;
  p.counter = run.counter;
  return launcher_->launch(rank, kernel_, {.grid = run.blocks, .resident = true}, p);
}

Result<TimedOutcome> GridSync::outcome(const Rank& rank, Deadline deadline) const {
  const Buffers& b = of(rank);
  CROSSDOCK_TRY(elapsed, download(rank, b.elapsed.as<u64>(), options_.max_blocks, deadline));
  CROSSDOCK_TRY(mismatches, download(rank, b.mismatches.as<u32>(), 1, deadline));
  return TimedOutcome{*std::max_element(elapsed.begin(), elapsed.end()), mismatches[0]};
}

u64 add_barrier_words(device::SymmetricLayout& layout, u32 world, const BarrierOptions& options) {
  return layout.add("barrier.words", barrier_words(world, options) * sizeof(u32));
}

Result<Barrier> Barrier::create(Launcher& launcher, const BarrierAreas& areas,
                                const BarrierOptions& options, Deadline deadline) {
  if (options.blocks == 0 || (!options.grid_sync && options.blocks != 1))
    return invalid_argument(fmt::format(
        "barrier: blocks = {} must be at least 1, and 1 without grid_sync", options.blocks));
  const u32 threads = options.grid_sync ? kGridBarrierThreads : kBarrierThreads;
  CROSSDOCK_TRY(kernel, launcher.prepare(barrier_kernel(options.grid_sync, options.verify),
                                         {.threads = threads}, deadline));
  Barrier made(launcher, areas, options, std::move(kernel));
  for (const u32 r : launcher.group().local_ranks()) {
    Rank& rank = launcher.group().rank(r);
    CROSSDOCK_TRY(elapsed, rank.allocate(sizeof(u64)));
    CROSSDOCK_TRY(mismatches, rank.allocate(sizeof(u32)));
    made.buffers_.push_back({r, std::move(elapsed), std::move(mismatches)});
  }
  return made;
}

const Barrier::Buffers& Barrier::of(const Rank& rank) const {
  return find_rank(buffers_, rank);
}

Result<> Barrier::launch(const Rank& rank, u32 rounds) {
  const Buffers& b = of(rank);
  device::BarrierParams p{};
  p.common = rank.common(device::KernelId::kBarrier, options_.wait);
  p.view = rank.view();
  p.barrier = areas_.barrier;
  p.words = areas_.words;
  p.elapsed_ns = b.elapsed.as<u64>();
  p.mismatches = b.mismatches.as<u32>();
  p.rounds = rounds;
  return launcher_->launch(rank, kernel_, {.grid = options_.blocks, .resident = options_.grid_sync},
                           p);
}

Result<TimedOutcome> Barrier::outcome(const Rank& rank, Deadline deadline) const {
  const Buffers& b = of(rank);
  CROSSDOCK_TRY(elapsed, download(rank, b.elapsed.as<u64>(), 1, deadline));
  CROSSDOCK_TRY(mismatches, download(rank, b.mismatches.as<u32>(), 1, deadline));
  return TimedOutcome{elapsed[0], mismatches[0]};
}

}  // namespace crossdock::symm
