// The steps of making a group. See group_builder.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/group_builder.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <set>

#include <crossdock/core/version.hpp>

#include "base/config.hpp"
#include "symm/gpu.hpp"
#include "wire/auth.hpp"

namespace crossdock::symm {
namespace {

constexpr u32 kMaxWorld = message::kMostRanks;
constexpr u64 kPage = 4096;

// What is mapped where a rank is vacant; no process has it.
constexpr u64 kVacantToken = ~u64{0};

Result<> check_ranks(const GroupOptions& options) {
  std::set<u32> seen;
  for (const LocalRank& local : options.ranks) {
    if (local.rank >= options.world)
      return invalid_argument(fmt::format("rank {} of a world of {}: ranks are 0 to {}", local.rank,
                                          options.world, options.world - 1));
    if (!seen.insert(local.rank).second)
      return invalid_argument(fmt::format("rank {} is given twice in this process", local.rank));
  }
  if (options.place && options.exchange)
    return invalid_argument(
        "GroupOptions has an exchange and a place: an elastic group makes its "
        "own exchanges at its place");
  if (options.place && seen.empty())
    return invalid_argument("an elastic group needs this process's ranks in GroupOptions::ranks");
  if (!options.exchange && !options.place && !seen.empty() && seen.size() != options.world)
    return invalid_argument(
        fmt::format("{} of {} ranks are in this process and there is no exchange: give one, so "
                    "that the others can be found",
                    seen.size(), options.world));
  if (options.exchange && seen.empty())
    return invalid_argument("with an exchange GroupOptions::ranks must name this process's ranks");
  if ((options.exchange || options.place) && seen.size() > kMostSharedRanks)
    return invalid_argument(fmt::format("{} ranks in one of several processes: at most {}",
                                        seen.size(), kMostSharedRanks));
  return {};
}

Result<std::shared_ptr<twin::World>> make_world(const GroupOptions& options, u64 window_bytes) {
  twin::WorldOptions world;
  world.ranks = static_cast<int>(options.world);
  world.ranks_per_node = static_cast<int>(options.ranks_per_node);
  world.heap_bytes = device::round_up(window_bytes, kPage) +
                     device::round_up(std::max<u64>(options.cpu_local_bytes, kPage), kPage);
  world.stack_bytes = 32 << 10;
  CROSSDOCK_TRY(made, twin::World::create(world));
  return std::shared_ptr<twin::World>(std::move(made));
}

}  // namespace

GroupBuilder::GroupBuilder(const GroupOptions& options, const device::SymmetricLayout& layout,
                           const cuda::Driver* driver)
    : deadline_(Deadline::in(options.timeout)),
      made_(new Group(options, layout)),
      group_(made_.get()) {
  group_->driver_ = driver;
  GroupOptions& own = group_->options_;
  placed_in_order_ = own.ranks.empty() && !own.exchange && !own.place;
  if (placed_in_order_)
    for (u32 r = 0; r < std::min(own.world, kMaxWorld); ++r)
      own.ranks.push_back({.rank = r, .device = static_cast<int>(r)});
  std::sort(own.ranks.begin(), own.ranks.end(),
            [](const LocalRank& a, const LocalRank& b) { return a.rank < b.rank; });
  if (!own.ranks.empty()) current_rank_ = own.ranks.front().rank;
}

Result<> GroupBuilder::check_options() const {
  const GroupOptions& options = group_->options_;
  const device::SymmetricLayout& layout = group_->layout_;
  if (options.world == 0 || options.world > kMaxWorld)
    return invalid_argument(
        fmt::format("world = {} must be 1 to {} ranks", options.world, kMaxWorld));
  if (layout.overflow)
    return invalid_argument(fmt::format("the layout of the window has more than {} areas",
                                        device::SymmetricLayout::kMaxAreas));
  if (layout.bytes == 0) return invalid_argument("the layout of the window is empty: add an area");
  if (layout.bytes > kMaxWindowBytes || layout.bytes * options.world > kMaxHeapBytes)
    return invalid_argument(
        fmt::format("a window of {} bytes for each of {} ranks: a window has at most {} bytes and "
                    "all of them {}",
                    layout.bytes, options.world, kMaxWindowBytes, kMaxHeapBytes));
  return check_ranks(options);
}

// Ranks for which there is no GPU go round those that there are, where that is allowed.
Result<> GroupBuilder::share_gpus() {
  CROSSDOCK_TRY(config, base::Config::load());
  if (!config.boolean("symm.share_gpus")) return {};
  CROSSDOCK_TRY(count, cuda::device_count(*group_->driver_));
  for (LocalRank& local : group_->options_.ranks)
    if (count > 0) local.device %= count;
  return {};
}

Result<> GroupBuilder::open_devices() {
  const GroupOptions& options = group_->options_;
  for (const LocalRank& local : options.ranks)
    group_->local_.push_back(local.rank);
  if (options.backend == Backend::kCpu) return {};
  if (group_->driver_ == nullptr) {
    CROSSDOCK_TRY(config, base::Config::load());
    CROSSDOCK_TRY(driver, cuda::Driver::load({.library = config.string("cuda.driver")}));
    group_->driver_ = driver;
  }
  if (placed_in_order_) CROSSDOCK_CHECK_OK(share_gpus());
  for (const LocalRank& local : options.ranks) {
    current_rank_ = local.rank;
    CROSSDOCK_TRY(device, make_gpu_device(*group_->driver_, local.device));
    group_->ranks_.emplace_back(new Rank(std::move(device)));
  }
  return {};
}

Result<> GroupBuilder::begin() {
  CROSSDOCK_CHECK_OK(check_options());
  CROSSDOCK_CHECK_OK(open_devices());
  return group_->steps_->members() == 1 ? Result<>() : listen();
}

Result<> GroupBuilder::meet() {
  if (!group_->meeting_) {
    CROSSDOCK_TRY(meeting,
                  Meeting::open(*group_->options_.place, group_->options_.world,
                                {group_->local_.begin(), group_->local_.end()}, deadline_));
    group_->meeting_ = std::make_unique<Meeting>(std::move(meeting));
  }
  const u64 first = group_->generation_ == 0 ? 0 : group_->generation_ + 1;
  CROSSDOCK_TRY(roster, group_->meeting_->attend(first, deadline_));
  roster_ = std::move(roster);
  group_->generation_ = roster_.generation;
  CROSSDOCK_TRY(exchange, group_->meeting_->exchange(roster_));
  std::vector<std::vector<u32>> ranks;
  for (const message::Attendee& a : roster_.attendees) {
    auto& of = ranks.emplace_back();
    for (const message::RosterRank& r : a.ranks)
      of.push_back(r.rank);
  }
  group_->steps_ = std::make_unique<Steps>(std::move(exchange), std::move(ranks));
  return name_windows();
}

// A process that has this one's windows and is not on the roster may be alive, late only, and goes
// on writing: so those windows are given up, and what the others are given are new ones, under a
// new name. Also what a failed attempt has left half done is named anew, lest somebody takes it for
// what he has mapped.
Result<> GroupBuilder::name_windows() {
  std::set<u64> known = group_->sharers_;
  for (const message::Attendee& a : roster_.attendees)
    known.erase(a.token);
  const auto& local = group_->local_;
  const bool keeps =
      group_->heap_ && known.empty() &&
      std::all_of(local.begin(), local.end(), [&](u32 rank) { return is_named(rank); });
  if (keeps) return {};
  CROSSDOCK_TRY(token, wire::random_id());
  group_->token_ = token;
  group_->sharers_.clear();
  return {};
}

Result<> GroupBuilder::listen() {
  CROSSDOCK_TRY(passing, WindowPassing::listen(group_->steps_->members()));
  passing_ = std::make_unique<WindowPassing>(std::move(passing));
  return {};
}

message::Proposal GroupBuilder::proposal(const Result<>& begun) const {
  const GroupOptions& options = group_->options_;
  const device::SymmetricLayout& layout = group_->layout_;
  message::Proposal p{.library = std::string(kVersion),
                      .first_rank = options.ranks.empty() ? 0 : options.ranks.front().rank,
                      .world = options.world,
                      .backend = static_cast<std::uint8_t>(options.backend),
                      .window_bytes = layout.bytes,
                      .host = host_identity()};
  if (!begun.ok()) {
    p.failure = to_failure(begun.error(), current_rank_);
    return p;
  }
  for (u32 i = 0; i < layout.count; ++i)
    p.areas.push_back({layout.areas[i].name, layout.areas[i].offset, layout.areas[i].bytes});
  if (elastic()) {
    p.elastic = 1;
    p.generation = group_->generation_;
    p.token = group_->token_;
  }
  if (options.backend == Backend::kGpu) {
    const auto config = base::Config::load();
    if (!config.ok()) {
      p.failure = to_failure(config.error(), current_rank_);
      return p;
    }
    p.share_gpus = config->boolean("symm.share_gpus") ? 1 : 0;
  }
  p.fabric = 1;
  for (std::size_t i = 0; i < options.ranks.size(); ++i) {
    message::ProposedRank rank{.rank = options.ranks[i].rank};
    if (options.backend == Backend::kGpu) {
      const cuda::Device& device = group_->ranks_[i]->device().context()->device();
      rank.device = device.uuid;
      rank.model = device.name;
      rank.sm = static_cast<u32>(device.sm());
      p.fabric = p.fabric == 1 && device.fabric_handles ? 1 : 0;
    }
    p.ranks.push_back(std::move(rank));
  }
  if (passing_) p.socket = passing_->name();
  return p;
}

Result<> GroupBuilder::make_heap() {
  const GroupOptions& options = group_->options_;
  const Agreement& agreement = group_->steps_->agreement();
  const HeapOptions heap{.world = options.world,
                         .window_bytes = group_->layout_.bytes,
                         .at_stride = options.addressing == Addressing::kStride};
  if (options.backend == Backend::kGpu) {
    GpuHeapOptions gpu{.heap = heap, .sharing = agreement.sharing};
    for (std::size_t i = 0; i < group_->ranks_.size(); ++i)
      gpu.local.emplace_back(group_->local_[i], *group_->ranks_[i]->device().context());
    CROSSDOCK_CHECK_OK(check_peers(gpu.local, agreement));
    group_->heap_ = make_gpu_heap(std::move(gpu));
    return {};
  }
  if (sharing() == Sharing::kNone) {
    const auto make = [&] { return make_world(options, heap.window_bytes); };
    CROSSDOCK_TRY(world, in_one_process()
                             ? share_world(options.place->store + "\n" + options.place->name, make)
                             : make());
    group_->twin_ = std::move(world);
    group_->heap_ = make_twin_heap(group_->twin_, heap.window_bytes);
  } else {
    group_->heap_ = make_shared_heap(heap);
  }
  for (const u32 rank : group_->local_)
    group_->ranks_.emplace_back(new Rank(make_cpu_device(rank, group_->twin_)));
  return {};
}

// Members that meet at a store of this process are all in it, and their kernels run in one World.
bool GroupBuilder::in_one_process() const {
  const GroupOptions& options = group_->options_;
  return options.backend == Backend::kCpu && options.place &&
         options.place->store.starts_with("inproc://");
}

Sharing GroupBuilder::sharing() const {
  return in_one_process() ? Sharing::kNone : group_->steps_->agreement().sharing;
}

// The addresses stay; what is not mapped again is vacant.
Result<> GroupBuilder::drop() {
  if (!group_->heap_) return {};
  const Agreement& agreement = group_->steps_->agreement();
  if (sharing() != group_->sharing_)
    return make_error(Code::kUnsupported,
                      "windows of this elastic group travelled in another way before: its "
                      "processes have to stay on the hosts, and in the containers, it began with");
  for (u32 rank = 0; rank < group_->world(); ++rank) {
    u64& mapped = group_->tokens_[rank];
    const u64 now = agreement.token_of(rank);
    if (mapped == 0 || mapped == (now == 0 ? kVacantToken : now)) continue;
    mapped = 0;
    CROSSDOCK_CHECK_OK(group_->heap_->unmap(rank));
  }
  return {};
}

// What a local rank has besides its window stays.
Result<> GroupBuilder::allocate() {
  if (!group_->heap_) {
    fresh_ = true;
    group_->sharing_ = sharing();
    group_->tokens_.assign(group_->world(), 0);
    CROSSDOCK_CHECK_OK(make_heap());
  }
  for (std::size_t i = 0; i < group_->local_.size(); ++i) {
    current_rank_ = group_->local_[i];
    if (is_named(current_rank_)) {
      CROSSDOCK_CHECK_OK(take_seat_again(current_rank_));
      continue;
    }
    auto made = group_->heap_->allocate(current_rank_);
    if (made.code() == Code::kNoMemory && !fresh_) {
      Error error = std::move(made).error();
      error.message +=
          "; a process that was left out and still runs keeps the memory that windows "
          "had before: end it, then reform() again";
      return error;
    }
    CROSSDOCK_CHECK_OK(made);
    if (fresh_)
      CROSSDOCK_CHECK_OK(
          group_->ranks_[i]->prepare(current_rank_, group_->options_.world, group_->layout_.bytes));
  }
  return {};
}

Result<> GroupBuilder::take_seat_again(u32 rank) {
  if (group_->heap_->seat(rank) == Heap::Seat::kTaken)
    return make_error(
        Code::kClosed,
        fmt::format("another has taken the seat of rank {} meanwhile: destroy this group, create "
                    "another",
                    rank));
  group_->heap_->hold(rank);
  return {};
}

Result<> GroupBuilder::share(Steps::Yield& yield) {
  yield.allocated_bytes = group_->heap_->allocated_bytes();
  if (sharing() == Sharing::kNone) return {};
  for (const message::Attendee& a : roster_.attendees)
    group_->sharers_.insert(a.token);
  for (const u32 rank : group_->local_) {
    current_rank_ = rank;
    CROSSDOCK_TRY(handle, group_->heap_->share(rank));
    if (!handle.fabric.empty()) yield.windows.push_back({rank, std::move(handle.fabric)});
    if (handle.fd) descriptors_[rank] = std::move(handle.fd);
  }
  return {};
}

// First of all, so that nothing which fails here can keep others waiting for this process's
// windows; and the listener goes at once: what has not come through it by then never will, which
// peers see.
Result<Descriptors> GroupBuilder::swap_descriptors() {
  const Agreement& agreement = group_->steps_->agreement();
  if (sharing() != Sharing::kDescriptor) return Descriptors{};
  auto theirs = passing_->swap(agreement, group_->steps_->member(), descriptors_, deadline_);
  if (theirs.code() != Code::kPeerLost) passing_.reset();
  descriptors_.clear();
  return theirs;
}

Result<> GroupBuilder::reserve(const std::vector<message::Outcome>& outcomes) {
  u64 stride = 0;
  for (const message::Outcome& outcome : outcomes)
    stride = std::max<u64>(stride, outcome.allocated_bytes);
  if (stride > 2 * kMaxWindowBytes)
    return make_error(Code::kCorrupt,
                      fmt::format("a process says a window takes {} bytes", stride));
  if (!fresh_ && stride > group_->stride_)
    return make_error(
        Code::kIncompatible,
        fmt::format("the window of a newcomer takes {} bytes on its GPU, and there is "
                    "room for {}",
                    stride, group_->stride_));
  if (fresh_) {
    group_->stride_ = stride;
    CROSSDOCK_CHECK_OK(group_->heap_->reserve(stride));
  }
  for (const u32 rank : group_->local_) {
    if (is_named(rank)) continue;
    CROSSDOCK_CHECK_OK(group_->heap_->map(rank, nullptr));
    group_->tokens_[rank] = group_->token_;
  }
  return {};
}

// Unless it is mapped from before.
Result<> GroupBuilder::map_peer(u32 rank, WindowHandle handle) {
  const u64 token = group_->steps_->agreement().token_of(rank);
  if (elastic() && group_->tokens_[rank] == token) return {};
  CROSSDOCK_CHECK_OK(group_->heap_->map(rank, &handle));
  group_->tokens_[rank] = token;
  return {};
}

Result<> GroupBuilder::map_vacant() {
  group_->vacant_.clear();
  for (u32 rank = 0; rank < group_->world(); ++rank) {
    if (group_->steps_->agreement().member_of_rank[rank] != kVacant) continue;
    group_->vacant_.push_back(rank);
    if (group_->tokens_[rank] == kVacantToken) continue;
    CROSSDOCK_CHECK_OK(group_->heap_->vacate(rank));
    group_->tokens_[rank] = kVacantToken;
  }
  return {};
}

Result<> GroupBuilder::map_windows(const std::vector<message::Outcome>& outcomes) {
  CROSSDOCK_TRY(theirs, swap_descriptors());
  const Agreement& agreement = group_->steps_->agreement();
  const u32 member = group_->steps_->member();
  CROSSDOCK_CHECK_OK(reserve(outcomes));
  for (u32 m = 0; m < outcomes.size(); ++m) {
    if (m == member) continue;
    for (const message::ProposedRank& peer : agreement.members[m].ranks) {
      WindowHandle handle{.bytes = outcomes[m].allocated_bytes};
      if (const auto fd = theirs.find(peer.rank); fd != theirs.end())
        handle.fd = std::move(fd->second);
      for (const message::SharedWindow& window : outcomes[m].windows)
        if (window.rank == peer.rank) handle.fabric = window.fabric;
      CROSSDOCK_CHECK_OK(map_peer(peer.rank, std::move(handle)));
    }
  }
  return map_vacant();
}

Result<> GroupBuilder::map(const std::vector<message::Outcome>& outcomes) {
  const bool table = group_->options_.addressing == Addressing::kTable;
  current_rank_ = group_->local_.front();
  CROSSDOCK_CHECK_OK(map_windows(outcomes));
  for (const auto& rank : group_->ranks_) {
    if (!fresh_) break;  // all is where it was
    current_rank_ = rank->rank();
    CROSSDOCK_CHECK_OK(rank->look_at(*group_->heap_, table, deadline_));
  }
  return group_->clear(current_rank_, deadline_);
}

Result<> GroupBuilder::run(const Result<>& begun) {
  Steps& steps = *group_->steps_;
  const Result<> agreed = steps.propose(proposal(begun), deadline_);
  if (!begun.ok()) return begun.error();
  CROSSDOCK_CHECK_OK(agreed);
  // Before newcomers allocate, who may need the memory of those that are gone.
  if (elastic())
    CROSSDOCK_CHECK_OK(
        steps.conclude(drop(), current_rank_, "let go of old windows", {}, deadline_));
  Steps::Yield yield;
  Result<> allocated = allocate();
  if (allocated.ok()) allocated = share(yield);
  CROSSDOCK_TRY(outcomes, steps.conclude(allocated, current_rank_, "allocate their windows", yield,
                                         deadline_));
  const Result<> mapped = map(outcomes);
  CROSSDOCK_CHECK_OK(steps.conclude(mapped, current_rank_, "map all windows", {}, deadline_));
  if (elastic()) group_->meeting_->conclude(roster_, deadline_);
  return {};
}

Result<std::unique_ptr<Group>> GroupBuilder::build() {
  if (elastic()) {
    // Nobody waits for a process that has not taken its seat.
    CROSSDOCK_CHECK_OK(check_options());
    CROSSDOCK_CHECK_OK(open_devices());
    CROSSDOCK_CHECK_OK(meet());
    CROSSDOCK_CHECK_OK(run(listen()));
    return std::move(made_);
  }
  group_->steps_ = std::make_unique<Steps>(group_->options_.exchange);
  const Result<> begun = begin();
  if (!begun.ok() && group_->steps_->members() == 1) return begun.error();
  CROSSDOCK_CHECK_OK(run(begun));
  return std::move(made_);
}

// When it fails, nothing stays unmapped: a launch that nobody should make then waits in vain
// instead of ending the context of its GPU.
Result<> GroupBuilder::reform() {
  for (const u32 rank : group_->local_)
    if (group_->heap_->seat(rank) == Heap::Seat::kTaken) return take_seat_again(rank);
  CROSSDOCK_CHECK_OK(meet());
  auto done = run(listen());
  if (done.ok()) return done;
  for (u32 rank = 0; rank < group_->world(); ++rank)
    if (group_->tokens_[rank] == 0 && group_->heap_->vacate(rank).ok())
      group_->tokens_[rank] = kVacantToken;
  return done;
}

}  // namespace crossdock::symm
