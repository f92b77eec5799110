// See probe.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/kernels/probe.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "symm/copy.hpp"
#include "symm/kernels/buffers.hpp"
#include "symm/kernels/list.hpp"

namespace crossdock::symm {
Result<FlagPingPong> FlagPingPong::create(Launcher& launcher, u64 flag,
                                          const FlagPingPongOptions& options, Deadline deadline) {
  CROSSDOCK_TRY(kernel, launcher.prepare(flag_ping_pong_kernel(options.release),
                                         {.threads = device::kWarpSize}, deadline));
  FlagPingPong made(launcher, flag, options, std::move(kernel));
  for (const u32 r : launcher.group().local_ranks()) {
    CROSSDOCK_TRY(elapsed, launcher.group().rank(r).allocate(sizeof(u64)));
    made.buffers_.push_back({r, std::move(elapsed)});
  }
  return made;
}

Result<> FlagPingPong::launch(const Rank& rank, const Run& run) {
  const u32 world = rank.world();
  if (run.first >= world || run.second >= world)
    return invalid_argument(fmt::format("ping-pong: ranks {} and {} must be below {}, the world",
                                        run.first, run.second, world));
  device::FlagPingPongParams p{};
  p.common = rank.common(device::KernelId::kFlagPingPong, options_.wait);
  p.view = rank.view();
  p.flag = flag_;
  p.elapsed_ns = find_rank(buffers_, rank).elapsed.as<u64>();
  p.first = run.first;
  p.second = run.second;
  p.rounds = run.rounds;
  p.start = run.start;
  return launcher_->launch(rank, kernel_, {}, p);
}

Result<u64> FlagPingPong::elapsed_ns(const Rank& rank, Deadline deadline) const {
  CROSSDOCK_TRY(ns, download(rank, find_rank(buffers_, rank).elapsed.as<u64>(), 1, deadline));
  return ns[0];
}

MoveRowsAreas add_move_rows(device::SymmetricLayout& layout, u32 world, u32 slots, u32 row_bytes) {
  MoveRowsAreas areas;
  areas.source = layout.add("rows.source", u64{slots} * row_bytes);
  areas.destination = layout.add("rows.destination", u64{world} * slots * row_bytes);
  areas.slots = slots;
  return areas;
}

Result<MoveRows> MoveRows::create(Launcher& launcher, const MoveRowsAreas& areas,
                                  const MoveRowsOptions& options, Deadline deadline) {
  if (options.row_bytes == 0 || options.row_bytes % 16 != 0)
    return invalid_argument(fmt::format(
        "rows: row_bytes = {} must be a positive multiple of 16: pad the rows", options.row_bytes));
  if (options.max_blocks == 0) return invalid_argument("rows: max_blocks = 0 must be at least 1");
  CROSSDOCK_TRY(ref, options.direction == Direction::kPush ? push_rows_kernel(options.config)
                                                           : pull_rows_kernel(options.config));
  const BlockShape block{.threads = options.config.warps * device::kWarpSize,
                         .shared_bytes = move_rows_shared_bytes(options.config, options.row_bytes)};
  CROSSDOCK_TRY(kernel, launcher.prepare(ref, block, deadline));
  MoveRows made(launcher, areas, options, std::move(kernel));
  for (const u32 r : launcher.group().local_ranks()) {
    CROSSDOCK_TRY(elapsed, launcher.group().rank(r).allocate(options.max_blocks * sizeof(u64)));
    made.buffers_.push_back({r, std::move(elapsed)});
  }
  return made;
}

device::MoveRowsParams MoveRows::params(const Rank& rank, const Run& run) const {
  const bool push = options_.direction == Direction::kPush;
  device::MoveRowsParams p{};
  p.common =
      rank.common(push ? device::KernelId::kPushRows : device::KernelId::kPullRows, options_.wait);
  p.view = rank.view();
  p.source = areas_.source;
  p.destination = areas_.destination;
  p.elapsed_ns = find_rank(buffers_, rank).elapsed.as<u64>();
  p.row_bytes = options_.row_bytes;
  p.rows_per_warp = run.rows_per_warp;
  p.slots = run.slots;
  p.seed = run.seed;
  p.fixed_peer = run.peer;
  return p;
}

Result<> MoveRows::launch(const Rank& rank, const Run& run) {
  if (run.blocks == 0 || run.blocks > options_.max_blocks)
    return invalid_argument(fmt::format("rows: blocks = {} must be 1 to max_blocks = {}",
                                        run.blocks, options_.max_blocks));
  if (run.slots == 0 || run.slots > areas_.slots)
    return invalid_argument(
        fmt::format("rows: slots = {} must be 1 to the {} of the window", run.slots, areas_.slots));
  if (run.peer != device::kNoPeer && run.peer >= rank.world())
    return invalid_argument(
        fmt::format("rows: peer = {} must be below {}, the world", run.peer, rank.world()));
  return launcher_->launch(rank, kernel_, {.grid = run.blocks}, params(rank, run));
}

Result<u64> MoveRows::elapsed_ns(const Rank& rank, u32 blocks, Deadline deadline) const {
  const u32 count = std::min(std::max(blocks, 1u), options_.max_blocks);
  CROSSDOCK_TRY(ns, download(rank, find_rank(buffers_, rank).elapsed.as<u64>(), count, deadline));
  return *std::max_element(ns.begin(), ns.end());
}

}  // namespace crossdock::symm
