// The steps of making a group. See group_builder.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/group_builder.hpp"

#include <algorithm>
#include <fmt/format.h>

namespace crossdock::symm {
namespace {

constexpr u32 kMaxWorld = 1024;
constexpr u64 kPage = 4096;

Result<> check_ranks(const GroupOptions& options) {
  std::vector<u32> seen;
  for (const LocalRank& local : options.ranks) {
    if (local.rank >= options.world)
      return invalid_argument(fmt::format("rank {} of a world of {}: ranks are 0 to {}", local.rank,
                                          options.world, options.world - 1));
    if (std::find(seen.begin(), seen.end(), local.rank) != seen.end())
      return invalid_argument(fmt::format("rank {} is given twice in this process", local.rank));
    seen.push_back(local.rank);
  }
  if (!options.exchange && !seen.empty() && seen.size() != options.world)
    return invalid_argument(
        fmt::format("{} of {} ranks are in this process and there is no exchange: give one, so "
                    "that the others can be found",
                    seen.size(), options.world));
  if (options.exchange && seen.empty())
    return invalid_argument("with an exchange GroupOptions::ranks must name this process's ranks");
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
    : deadline_(Deadline::in(options.timeout)), group_(new Group(options, layout)) {
  group_->driver_ = driver;
}

Result<> GroupBuilder::check_options() const {
  const GroupOptions& options = group_->options_;
  if (options.world == 0 || options.world > kMaxWorld)
    return invalid_argument(
        fmt::format("world = {} must be 1 to {} ranks", options.world, kMaxWorld));
  if (group_->layout_.bytes == 0)
    return invalid_argument("the layout of the window is empty: add an area");
  if (group_->layout_.overflow)
    return invalid_argument(fmt::format("the layout of the window has more than {} areas",
                                        device::SymmetricLayout::kMaxAreas));
  return check_ranks(options);
}

Result<> GroupBuilder::open_devices() {
  GroupOptions& options = group_->options_;
  if (options.ranks.empty())
    for (u32 r = 0; r < options.world; ++r)
      options.ranks.push_back({.rank = r, .device = static_cast<int>(r)});
  std::sort(options.ranks.begin(), options.ranks.end(),
            [](const LocalRank& a, const LocalRank& b) { return a.rank < b.rank; });
  if (options.backend != Backend::kCpu || options.exchange)
    return make_error(Code::kUnsupported, "only the CPU backend in one process for now");
  CROSSDOCK_TRY(world, make_world(options, group_->layout_.bytes));
  group_->twin_ = world;
  group_->heap_ = make_twin_heap(world, group_->layout_.bytes);
  for (const LocalRank& local : options.ranks) {
    group_->local_.push_back(local.rank);
    group_->ranks_.emplace_back(new Rank(make_cpu_device(local.rank, world)));
  }
  return {};
}

Result<> GroupBuilder::allocate() {
  for (std::size_t i = 0; i < group_->local_.size(); ++i) {
    const u32 rank = group_->local_[i];
    CROSSDOCK_CHECK_OK(group_->heap_->allocate(rank));
    CROSSDOCK_CHECK_OK(
        group_->ranks_[i]->prepare(rank, group_->options_.world, group_->layout_.bytes));
  }
  return {};
}

Result<> GroupBuilder::map() {
  const bool table = group_->options_.addressing == Addressing::kTable;
  for (const u32 rank : group_->local_)
    CROSSDOCK_CHECK_OK(group_->heap_->map(rank, nullptr));
  for (const auto& rank : group_->ranks_)
    CROSSDOCK_CHECK_OK(rank->look_at(*group_->heap_, table, deadline_));
  return group_->clear(deadline_);
}

Result<std::unique_ptr<Group>> GroupBuilder::build() {
  CROSSDOCK_CHECK_OK(check_options());
  CROSSDOCK_CHECK_OK(open_devices());
  CROSSDOCK_CHECK_OK(allocate());
  CROSSDOCK_CHECK_OK(map());
  return std::move(group_);
}

}  // namespace crossdock::symm
