// Core: creation, lanes, faults, reset. See core.hpp. SPDX-License-Identifier: Apache-2.0
#include "coll/core.hpp"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <utility>

#include "base/config.hpp"
#include "coll/kernels.hpp"

namespace crossdock::coll {

namespace {

// A call without one of the ranks ends by its deadline, each time, and nothing lets another in.
Result<> check_place(const symm::GroupOptions& ranks) {
  const u32 fewest = ranks.place ? ranks.place->fewest : 0;
  if (fewest == 0 || fewest == ranks.world) return {};
  return invalid_argument(fmt::format(
      "coll: place.fewest = {} of {} ranks: collectives need all ranks, and their groups "
      "cannot reform(): leave fewest = 0",
      fewest, ranks.world));
}

// After the meeting, so that what fails here is told to the others.
Result<std::unique_ptr<jit::Jit>> prepare_jit(const symm::Group& group, base::Logger& log) {
  CROSSDOCK_TRY(config, base::Config::load());
  CROSSDOCK_TRY(all, base::Logger::create(config.string("log.level")));
  log = all.component("coll");
  return symm::open_jit(group);
}

}  // namespace

Result<std::shared_ptr<Core>> Core::create(const GroupOptions& options) {
  const auto deadline = Deadline::in(options.ranks.timeout);
  CROSSDOCK_CHECK_OK(check_place(options.ranks));
  CROSSDOCK_TRY(window, make_window(options.coll, options.ranks.world));
  CROSSDOCK_TRY(group, symm::Group::create(options.ranks, window.layout));
  base::Logger log;
  auto jit = prepare_jit(*group, log);
  CROSSDOCK_TRY(core, create(std::move(group), std::move(jit), options.coll, deadline));
  core->log_ = std::move(log);
  return core;
}

Result<std::shared_ptr<Core>> Core::create(std::unique_ptr<symm::Group> group,
                                           Result<std::unique_ptr<jit::Jit>> jit,
                                           const Options& options, Deadline deadline) {
  sweep();
  std::shared_ptr<Core> core(new Core, &Core::let_go);
  core->options_ = options;
  core->patience_ = patience_of(options);
  core->group_ = std::move(group);
  u32 rank = core->group_->local_ranks().front();
  // One that fails alone would be waited for by the others until the deadline of their first call.
  const Result<> prepared = core->prepare(std::move(jit), rank, deadline);
  CROSSDOCK_CHECK_OK(core->group_->conclude(prepared, rank, "prepare their part", deadline));
  return core;
}

Result<> Core::prepare(Result<std::unique_ptr<jit::Jit>> jit, u32& current, Deadline deadline) {
  CROSSDOCK_TRY(opened, std::move(jit));
  CROSSDOCK_TRY(window, make_window(options_, group_->world()));
  CROSSDOCK_TRY(memory, sizes(options_, group_->world()));
  jit_ = std::move(opened);
  window_ = window;
  memory_ = memory;
  for (const u32 rank : group_->local_ranks()) {
    current = rank;
    CROSSDOCK_CHECK_OK(prepare_rank(rank));
  }
  CROSSDOCK_CHECK_OK(prepare_kernels(deadline));
  CROSSDOCK_CHECK_OK(grant(deadline));
  return start_watch();
}

Result<> Core::prepare_rank(u32 r) {
  symm::Rank& rank = group_->rank(r);
  RankState state;
  state.rank = r;
  state.sent.resize(window_.world);
  state.received.resize(window_.world);
  CROSSDOCK_TRY(marks, rank.allocate_host(num_sites(window_.world) * sizeof(Mark)));
  state.marks = std::move(marks);
  if (options_.reduce && options_.session_bytes > 0) {
    CROSSDOCK_TRY(parts, rank.allocate(options_.session_bytes));
    state.parts = std::move(parts);
  }
  if (options_.shard_rows > 0) {
    CROSSDOCK_TRY(zeros, rank.allocate(options_.row_bytes));
    state.zeros = std::move(zeros);
  }
  if (group_->backend() == symm::Backend::kCpu) {
    CROSSDOCK_TRY(lane, CpuLane::create(r));
    state.lane = std::move(lane);
  } else {
    for (u32 site = 0; site < num_sites(window_.world); ++site) {
      CROSSDOCK_TRY(order, SiteOrder::create(*rank.device().context()));
      state.orders.push_back(std::move(order));
    }
  }
  ranks_.push_back(std::move(state));
  return {};
}

Result<> Core::prepare_kernels(Deadline deadline) {
  auto launcher = symm::Launcher::create(*group_, jit_.get());
  // Ranks of the CPU in several processes: no kernels. The calls that need them say so.
  if (launcher.code() == Code::kUnsupported) return {};
  if (!launcher.ok()) return std::move(launcher).error();
  kernels_.emplace(Kernels{.launcher = std::move(launcher).value()});
  Kernels& k = *kernels_;
  if (options_.shard_rows > 0) {
    const device::FetchRowsConfig config = fetch_variant(options_.row_bytes, options_.wide_indices);
    k.fetch_warps = config.warps;
    CROSSDOCK_TRY(
        fetch, k.launcher.prepare(fetch_rows_kernel(config),
                                  {.threads = config.warps * device::kWarpSize,
                                   .shared_bytes = fetch_shared_bytes(config, options_.row_bytes)},
                                  deadline));
    k.fetch.emplace(std::move(fetch));
  }
  if (!options_.reduce) return {};
  CROSSDOCK_TRY(bf16, k.launcher.prepare(add_parts_kernel(DataType::kBf16),
                                         {.threads = kAddThreads}, deadline));
  CROSSDOCK_TRY(f32, k.launcher.prepare(add_parts_kernel(DataType::kF32), {.threads = kAddThreads},
                                        deadline));
  k.add_bf16.emplace(std::move(bf16));
  k.add_f32.emplace(std::move(f32));
  return {};
}

Result<> Core::start_watch() {
  std::vector<Watch::Watched> watched;
  for (const RankState& state : ranks_) {
    symm::Rank& rank = group_->rank(state.rank);
    CROSSDOCK_TRY(words, make_words(rank));
    watched.push_back({&rank, state.marks.host<Mark>(), std::move(words)});
  }
  CROSSDOCK_TRY(watch, Watch::start(window_, std::move(watched), options_.wait));
  watch_ = std::move(watch);
  return {};
}

// What peers will say once they have something to be done with has been said at first: inputs have
// been read, slots are empty, barriers passed. Peers write these words only after this rank has
// said something, so it does not matter that they may be ahead.
Result<> Core::grant(Deadline deadline) {
  const std::vector<u64> ones(u64{window_.world} * std::max(window_.inflight, 1u), 1);
  for (const RankState& state : ranks_) {
    symm::Rank& rank = group_->rank(state.rank);
    const u64 bytes = u64{window_.world} * sizeof(u64);
    CROSSDOCK_CHECK_OK(rank.write(rank.at<u64>(window_.free), ones.data(), bytes, deadline));
    CROSSDOCK_CHECK_OK(rank.write(rank.at<u64>(window_.seen), ones.data(), bytes, deadline));
    CROSSDOCK_CHECK_OK(
        rank.write(rank.at<u64>(window_.credit), ones.data(), bytes * window_.inflight, deadline));
  }
  return {};
}

Result<RankState*> Core::find(u32 rank, const char* call) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].rank != rank) continue;
    CROSSDOCK_CHECK_OK(watch_->check(i));
    CROSSDOCK_CHECK_OK(group_->check());
    return &ranks_[i];
  }
  return invalid_argument(fmt::format("coll {}: rank {} is not one of the {} ranks of this process",
                                      call, rank, ranks_.size()));
}

Result<Lane> Core::lane_of(RankState& state, StreamPtr stream) const {
  if (state.lane) return Lane(state.lane.get());
  const symm::RankDevice& device = group_->rank(state.rank).device();
  if (stream == nullptr) return Lane(device.stream());
  return Lane(cuda::Stream::borrow(*device.context(), static_cast<cuda::StreamHandle>(stream)));
}

Result<> Core::follow(const RankState& state, u32 site, const Lane& lane) {
  return lane.stream() == nullptr ? Result<>{} : state.orders[site].follow(*lane.stream());
}

Result<> Core::note(RankState& state, u32 site, const Lane& lane) {
  return lane.stream() == nullptr ? Result<>{} : state.orders[site].note(*lane.stream());
}

Steps Core::steps(const RankState& state) const {
  return {rank_of(state), window_, state.marks.device<Mark>()};
}

Result<> Core::synchronize(Deadline deadline) {
  for (const RankState& state : ranks_) {
    if (state.lane) {
      CROSSDOCK_CHECK_OK(state.lane->drain(deadline));
    } else {
      CROSSDOCK_CHECK_OK(rank_of(state).device().stream()->synchronize(deadline));
    }
  }
  return check();
}

Result<> Core::check() const {
  for (std::size_t i = 0; i < ranks_.size(); ++i)
    CROSSDOCK_CHECK_OK(watch_->check(i));
  return group_->check();
}

Result<> Core::reset(Deadline deadline) {
  for (const RankState& state : ranks_) {
    if (state.lane) {
      CROSSDOCK_CHECK_OK(state.lane->drain(deadline));
    } else {
      CROSSDOCK_CHECK_OK(rank_of(state).device().stream()->synchronize(deadline));
    }
  }
  // It would take words of before for words of after, and write there.
  CROSSDOCK_CHECK_OK(watch_->pause(deadline));
  Result<> done = reset_paused(deadline);
  watch_->resume();
  return done;
}

Result<> Core::reset_paused(Deadline deadline) {
  CROSSDOCK_CHECK_OK(group_->reset(deadline));
  for (RankState& state : ranks_) {
    state.in_session = false;
    std::fill(state.sent.begin(), state.sent.end(), 0);
    std::fill(state.received.begin(), state.received.end(), 0);
    std::memset(state.marks.host<void>(), 0, state.marks.bytes());
  }
  watch_->forget();
  ++generation_;
  return grant(deadline);
}

}  // namespace crossdock::coll
