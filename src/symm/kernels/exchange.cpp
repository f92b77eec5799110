// See exchange.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/kernels/exchange.hpp"

#include <bit>
#include <fmt/format.h>

#include "symm/kernels/buffers.hpp"
#include "symm/kernels/list.hpp"

namespace crossdock::symm {
namespace {

constexpr u32 kEpochSharedBytes = 16;

bool aligned(const void* p, u64 alignment) {
  return reinterpret_cast<u64>(p) % alignment == 0;
}

Result<> check_ring(const device::RingLayout& ring, const RingOptions& options) {
  const u32 batch = options.config.batch;
  if (ring.channels == 0)
    return invalid_argument("ring: channels = 0 must be at least 1, one block each");
  if (!std::has_single_bit(ring.slots) || ring.slots < 2 * batch || ring.slots % batch != 0)
    return invalid_argument(
        fmt::format("ring: slots = {} must be a power of two, a multiple of the batch of {} rows "
                    "and at least two batches",
                    ring.slots, batch));
  if (ring.row_bytes == 0 || ring.row_bytes % 16 != 0)
    return invalid_argument(fmt::format(
        "ring: row_bytes = {} must be a positive multiple of 16: pad the rows", ring.row_bytes));
  return {};
}

}  // namespace

Result<AllGatherCounts> AllGatherCounts::create(Launcher& launcher,
                                                const device::AllGatherCountsLayout& layout,
                                                const AllGatherOptions& options,
                                                Deadline deadline) {
  if (options.blocks == 0) return invalid_argument("all-gather: blocks = 0 must be at least 1");
  if (layout.max_counts == 0)
    return invalid_argument(
        "all-gather: the window has room for max_counts = 0; give it at least 1");
  const BlockShape block{.threads = kAllGatherThreads, .shared_bytes = kEpochSharedBytes};
  CROSSDOCK_TRY(kernel, launcher.prepare(all_gather_counts_kernel(), block, deadline));
  AllGatherCounts made(launcher, layout, options, std::move(kernel));
  for (const u32 r : launcher.group().local_ranks()) {
    CROSSDOCK_TRY(epoch, launcher.group().rank(r).allocate_state(sizeof(device::EpochState)));
    made.states_.push_back({r, std::move(epoch)});
  }
  return made;
}

Result<> AllGatherCounts::launch(const Rank& rank, const Arguments& a) {
  if (a.num_counts > layout_.max_counts)
    return invalid_argument(
        fmt::format("all-gather: num_counts = {} is more than the {} that the window has room for",
                    a.num_counts, layout_.max_counts));
  if (a.num_counts > 0 && (a.counts == nullptr || a.gathered == nullptr))
    return invalid_argument("all-gather: counts and gathered must be memory of the rank");
  device::AllGatherCountsParams p{};
  p.common = rank.common(device::KernelId::kAllGatherCounts, options_.wait);
  p.view = rank.view();
  p.layout = layout_;
  p.epoch = find_rank(states_, rank).epoch.as<device::EpochState>();
  p.counts = a.counts;
  p.gathered = a.gathered;
  p.num_counts = a.num_counts;
  return launcher_->launch(rank, kernel_, {.grid = options_.blocks}, p);
}

Result<RingAllToAll> RingAllToAll::create(Launcher& launcher, const device::RingLayout& ring,
                                          const RingOptions& options, Deadline deadline) {
  CROSSDOCK_CHECK_OK(check_ring(ring, options));
  CROSSDOCK_TRY(ref, ring_kernel(options.config));
  const BlockShape block{.threads = 2 * options.config.warp_pairs * device::kWarpSize,
                         .shared_bytes = ring_shared_bytes(options.config, ring.row_bytes)};
  CROSSDOCK_TRY(kernel, launcher.prepare(ref, block, deadline));
  RingAllToAll made(launcher, ring, options, std::move(kernel));
  const u64 bytes = u64{launcher.group().world()} * ring.channels * sizeof(u32);
  for (const u32 r : launcher.group().local_ranks()) {
    Rank& rank = launcher.group().rank(r);
    CROSSDOCK_TRY(sent, rank.allocate_state(bytes));
    CROSSDOCK_TRY(received, rank.allocate_state(bytes));
    made.states_.push_back({r, std::move(sent), std::move(received)});
  }
  return made;
}

Result<> RingAllToAll::launch(const Rank& rank, const Arguments& a) {
  if (a.input == nullptr || a.output == nullptr || a.send_rows == nullptr ||
      a.receive_rows == nullptr || !aligned(a.input, 16) || !aligned(a.output, 16))
    return invalid_argument(
        "ring: input and output must be 16-byte aligned memory of the rank, send_rows and "
        "receive_rows [world] counts there");
  const State& state = find_rank(states_, rank);
  device::RingAllToAllParams p{};
  p.common = rank.common(device::KernelId::kRingAllToAll, options_.wait);
  p.view = rank.view();
  p.ring = ring_;
  p.totals = {state.sent.as<u32>(), state.received.as<u32>()};
  p.input = a.input;
  p.output = a.output;
  p.send_rows = a.send_rows;
  p.receive_rows = a.receive_rows;
  p.max_rows = a.max_rows;
  // Senders of one rank feed receivers of another, so a channel's block must not wait for an SM.
  return launcher_->launch(rank, kernel_, {.grid = ring_.channels, .resident = true}, p);
}

}  // namespace crossdock::symm
