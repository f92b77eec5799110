// Suite: creation, and the steps that only synchronise or count. The steps that move rows are in
// suite_rows.cpp. SPDX-License-Identifier: Apache-2.0
#include "symm/kernels/suite.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "symm/copy.hpp"
#include "symm/kernels/suite_data.hpp"

namespace crossdock::symm {

SuiteShape SuiteShape::for_gpu(u32 num_sms) {
  SuiteShape shape;
  shape.blocks = num_sms;
  shape.rounds = 101;
  shape.max_counts = 1024;
  shape.ring = {.warp_pairs = 4, .stages = 4, .batch = 8};
  shape.ring_channels = 8;
  shape.ring_slots = 32;
  shape.ring_rows = 1000;
  shape.move = {.warps = 8, .stages = 2};
  shape.move_blocks = 16;
  shape.rows_per_warp = 20;
  shape.row_bytes = 7168;
  return shape;
}

SuiteAreas add_suite(device::SymmetricLayout& layout, u32 world, const SuiteShape& shape) {
  SuiteAreas areas;
  areas.barrier.barrier = device::add_peer_barrier(layout, world);
  areas.barrier.words = add_barrier_words(layout, world, {.verify = true});
  areas.grid_barrier.barrier = areas.barrier.barrier;
  areas.grid_barrier.words =
      add_barrier_words(layout, world, {.grid_sync = true, .verify = true, .blocks = shape.blocks});
  areas.gather = device::add_all_gather_counts(layout, world, shape.max_counts);
  areas.ring =
      device::add_ring(layout, world, {shape.ring_channels, shape.ring_slots, shape.row_bytes});
  areas.flag = layout.add("flag", device::SymmetricLayout::kLine);
  areas.rows = add_move_rows(layout, world, suite_rows(shape), shape.row_bytes);
  return areas;
}

struct Suite::Kernels {
  GridSync grid_sync;
  Barrier barrier;
  Barrier grid_barrier;
  AllGatherCounts gather;
  RingAllToAll ring;
  FlagPingPong ping_pong;
  MoveRows push;
  MoveRows pull;
};

Suite::Suite(Launcher& launcher, const SuiteAreas& areas, const SuiteShape& shape,
             Kernels&& kernels)
    : launcher_(&launcher),
      areas_(areas),
      shape_(shape),
      grid_sync_(std::move(kernels.grid_sync)),
      barrier_(std::move(kernels.barrier)),
      grid_barrier_(std::move(kernels.grid_barrier)),
      gather_(std::move(kernels.gather)),
      ring_(std::move(kernels.ring)),
      ping_pong_(std::move(kernels.ping_pong)),
      push_(std::move(kernels.push)),
      pull_(std::move(kernels.pull)) {}

Result<Suite> Suite::create(Launcher& launcher, const SuiteAreas& areas, const SuiteShape& shape,
                            Deadline deadline) {
  const auto wait = shape.wait;
  CROSSDOCK_TRY(
      grid, GridSync::create(launcher, {.verify = true, .max_blocks = shape.blocks, .wait = wait},
                             deadline));
  CROSSDOCK_TRY(barrier,
                Barrier::create(launcher, areas.barrier, {.verify = true, .wait = wait}, deadline));
  const BarrierOptions all_blocks{
      .grid_sync = true, .verify = true, .blocks = shape.blocks, .wait = wait};
  CROSSDOCK_TRY(grid_barrier, Barrier::create(launcher, areas.grid_barrier, all_blocks, deadline));
  CROSSDOCK_TRY(gather, AllGatherCounts::create(launcher, areas.gather,
                                                {.blocks = shape.blocks, .wait = wait}, deadline));
  CROSSDOCK_TRY(ring, RingAllToAll::create(launcher, areas.ring,
                                           {.config = shape.ring, .wait = wait}, deadline));
  CROSSDOCK_TRY(ping_pong, FlagPingPong::create(launcher, areas.flag,
                                                {.release = true, .wait = wait}, deadline));
  MoveRowsOptions rows{.direction = Direction::kPush,
                       .config = shape.move,
                       .row_bytes = shape.row_bytes,
                       .max_blocks = shape.move_blocks,
                       .wait = wait};
  CROSSDOCK_TRY(push, MoveRows::create(launcher, areas.rows, rows, deadline));
  rows.direction = Direction::kPull;
  CROSSDOCK_TRY(pull, MoveRows::create(launcher, areas.rows, rows, deadline));
  return Suite(launcher, areas, shape,
               {std::move(grid), std::move(barrier), std::move(grid_barrier), std::move(gather),
                std::move(ring), std::move(ping_pong), std::move(push), std::move(pull)});
}

const std::vector<Suite::Step>& Suite::steps() {
  static const std::vector<Step> all = {{"grid_sync", &Suite::grid_sync},
                                        {"barrier", &Suite::barrier},
                                        {"barrier with grid sync", &Suite::grid_barrier},
                                        {"all_gather_counts", &Suite::all_gather_counts},
                                        {"ring_all_to_all", &Suite::ring_all_to_all},
                                        {"flag_ping_pong", &Suite::flag_ping_pong},
                                        {"push_rows", &Suite::push_rows},
                                        {"pull_rows", &Suite::pull_rows}};
  return all;
}

Result<> Suite::run_all(Deadline deadline) {
  for (const Step& step : steps())
    CROSSDOCK_CHECK_OK((this->*step.run)(deadline));
  return {};
}

Result<> Suite::meet() {
  for (const u32 r : group().local_ranks())
    CROSSDOCK_CHECK_OK(barrier_.launch(group().rank(r), 1));
  return {};
}

Result<> Suite::check_timed(const char* name, const Rank& rank, const TimedOutcome& outcome) const {
  if (outcome.mismatches != 0)
    return make_error(Code::kInternal,
                      fmt::format("{}: {} words of rank {} were not what the others wrote before",
                                  name, outcome.mismatches, rank.rank()));
  if (outcome.elapsed_ns == 0)
    return make_error(Code::kInternal, fmt::format("{}: rank {} took no time", name, rank.rank()));
  return {};
}

Result<> Suite::grid_sync(Deadline deadline) {
  for (u32 counter = 0; counter < device::kGridSyncCounters; ++counter)
    for (const u32 r : group().local_ranks())
      CROSSDOCK_CHECK_OK(grid_sync_.launch(
          group().rank(r), {.blocks = shape_.blocks, .rounds = shape_.rounds, .counter = counter}));
  CROSSDOCK_CHECK_OK(launcher_->synchronize(deadline));
  for (const u32 r : group().local_ranks()) {
    CROSSDOCK_TRY(outcome, grid_sync_.outcome(group().rank(r), deadline));
    CROSSDOCK_CHECK_OK(check_timed("grid_sync", group().rank(r), outcome));
  }
  return {};
}

Result<> Suite::barrier(Deadline deadline) {
  for (const u32 r : group().local_ranks())
    CROSSDOCK_CHECK_OK(barrier_.launch(group().rank(r), shape_.rounds));
  CROSSDOCK_CHECK_OK(launcher_->synchronize(deadline));
  for (const u32 r : group().local_ranks()) {
    CROSSDOCK_TRY(outcome, barrier_.outcome(group().rank(r), deadline));
    CROSSDOCK_CHECK_OK(check_timed("barrier", group().rank(r), outcome));
  }
  return {};
}

Result<> Suite::grid_barrier(Deadline deadline) {
  for (const u32 r : group().local_ranks())
    CROSSDOCK_CHECK_OK(grid_barrier_.launch(group().rank(r), shape_.rounds));
  CROSSDOCK_CHECK_OK(launcher_->synchronize(deadline));
  for (const u32 r : group().local_ranks()) {
    CROSSDOCK_TRY(outcome, grid_barrier_.outcome(group().rank(r), deadline));
    CROSSDOCK_CHECK_OK(check_timed("barrier with grid sync", group().rank(r), outcome));
  }
  return {};
}

namespace {

// Both sides of the counts of one rank, for all launches of a step.
struct GatherBuffers {
  u32 rank;
  LocalMemory counts;
  LocalMemory gathered;
};

// How many counts each launch of a step has: most, one, none and something between.
std::vector<u32> gather_launches(u32 max_counts) {
  return {max_counts, 1, 0, std::max(1u, max_counts / 3), max_counts};
}

Result<> check_gathered(const Rank& rank, const std::vector<u32>& got, u32 counts, u32 seed) {
  for (u32 from = 0; from < rank.world(); ++from)
    for (u32 i = 0; i < counts; ++i) {
      const u32 value = got[u64{from} * counts + i];
      const u32 want = suite_word(seed, from, i, 0);
      if (value != want)
        return make_error(
            Code::kInternal,
            fmt::format("all_gather_counts: rank {} has {:#x} as count {} of rank {}, "
                        "which sent {:#x}",
                        rank.rank(), value, i, from, want));
    }
  return {};
}

}  // namespace

// Launches in a row with nothing between them, as the epochs allow.
Result<> Suite::all_gather_counts(Deadline deadline) {
  const u32 first_seed = seed_;
  const auto launches = gather_launches(shape_.max_counts);
  std::vector<std::vector<GatherBuffers>> buffers(launches.size());
  for (std::size_t launch = 0; launch < launches.size(); ++launch) {
    const u32 counts = launches[launch];
    const u32 seed = ++seed_;
    for (const u32 r : group().local_ranks()) {
      Rank& rank = group().rank(r);
      std::vector<u32> values(counts);
      for (u32 i = 0; i < counts; ++i)
        values[i] = suite_word(seed, r, i, 0);
      const u64 bytes = std::max(1u, counts) * sizeof(u32);
      CROSSDOCK_TRY(sent, rank.allocate(bytes));
      CROSSDOCK_TRY(gathered, rank.allocate(bytes * rank.world()));
      CROSSDOCK_CHECK_OK(upload(rank, sent.as<u32>(), values, deadline));
      buffers[launch].push_back({r, std::move(sent), std::move(gathered)});
    }
  }
  for (std::size_t launch = 0; launch < launches.size(); ++launch)
    for (const GatherBuffers& b : buffers[launch])
      CROSSDOCK_CHECK_OK(gather_.launch(group().rank(b.rank), {.counts = b.counts.as<u32>(),
                                                               .gathered = b.gathered.as<u32>(),
                                                               .num_counts = launches[launch]}));
  CROSSDOCK_CHECK_OK(launcher_->synchronize(deadline));
  for (std::size_t launch = 0; launch < launches.size(); ++launch)
    for (const GatherBuffers& b : buffers[launch]) {
      const Rank& rank = group().rank(b.rank);
      const u64 words = u64{launches[launch]} * rank.world();
      CROSSDOCK_TRY(got, download(rank, b.gathered.as<u32>(), words, deadline));
      CROSSDOCK_CHECK_OK(
          check_gathered(rank, got, launches[launch], first_seed + static_cast<u32>(launch) + 1));
    }
  return {};
}

Result<> Suite::flag_ping_pong(Deadline deadline) {
  const u32 last = group().world() - 1;
  for (const u32 r : group().local_ranks())
    CROSSDOCK_CHECK_OK(ping_pong_.launch(
        group().rank(r),
        {.first = 0, .second = last, .rounds = shape_.rounds, .start = flag_rounds_}));
  flag_rounds_ += shape_.rounds;
  CROSSDOCK_CHECK_OK(launcher_->synchronize(deadline));
  for (const u32 r : group().local_ranks()) {
    if (r != 0 && r != last) continue;
    const Rank& rank = group().rank(r);
    CROSSDOCK_TRY(flag, download(rank, rank.at<u32>(areas_.flag), 1, deadline));
    if (flag[0] != flag_rounds_)
      return make_error(Code::kInternal, fmt::format("flag_ping_pong: the flag of rank {} is {} "
                                                     "after {} rounds",
                                                     r, flag[0], flag_rounds_));
  }
  return {};
}

}  // namespace crossdock::symm
