// Core: creation. Calls are in calls.cpp. See core.hpp. SPDX-License-Identifier: Apache-2.0
#include "ep/core.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "symm/copy.hpp"

namespace crossdock::ep {

using device::KernelId;

namespace {
constexpr const char* kPrepares = "prepare their kernels";
}  // namespace

Result<std::shared_ptr<Core>> Core::create(const GroupOptions& options) {
  const auto deadline = Deadline::in(options.ranks.timeout);
  CROSSDOCK_TRY(window, make_window(options.ep, options.ranks.world));
  CROSSDOCK_TRY(group, symm::Group::create(options.ranks, window.layout));
  auto jit = symm::open_jit(*group);  // after the meeting: what fails here is told to the others
  return create(std::move(group), std::move(jit), options.ep, deadline);
}

Result<std::shared_ptr<Core>> Core::create(std::unique_ptr<symm::Group> group,
                                           Result<std::unique_ptr<jit::Jit>> jit,
                                           const Options& options, Deadline deadline) {
  std::shared_ptr<Core> core(new Core);
  core->options_ = options;
  core->group_ = std::move(group);
  core->current_rank_ = core->group_->local_ranks().front();
  // One that fails alone would be waited for by the others until the deadline of their first call.
  const Result<> prepared = core->prepare(std::move(jit), deadline);
  CROSSDOCK_CHECK_OK(core->group_->conclude(prepared, core->current_rank_, kPrepares, deadline));
  return core;
}

Result<> Core::prepare(Result<std::unique_ptr<jit::Jit>> jit, Deadline deadline) {
  const u32 world = group_->world();
  CROSSDOCK_TRY(opened, std::move(jit));
  CROSSDOCK_TRY(window, make_window(options_, world));
  CROSSDOCK_TRY(memory, sizes(options_, world));
  jit_ = std::move(opened);
  window_ = window;
  memory_ = memory;
  dispatch_blocks_ = ep::dispatch_blocks(options_, world);
  combine_blocks_ = ep::combine_blocks(options_, world);
  CROSSDOCK_TRY(launcher, symm::Launcher::create(*group_, jit_.get()));
  launcher_.emplace(std::move(launcher));
  CROSSDOCK_CHECK_OK(prepare_kernels(deadline));
  fit_copy_blocks();
  CROSSDOCK_CHECK_OK(check_resident());
  for (const u32 rank : group_->local_ranks()) {
    current_rank_ = rank;
    CROSSDOCK_CHECK_OK(prepare_rank(rank));
  }
  return mask_vacant(deadline);
}

DispatchShape Core::shape_of(u32 row_bytes, bool cast, u32 groups) const {
  return {.input_row_bytes = row_bytes,
          .cast = cast,
          .wide_ids = options_.wide_ids,
          .world = window_.world,
          .experts = options_.experts,
          .groups = groups,
          .flags = window_.copy_blocks != 0};
}

Result<> Core::prepare_variant(const DispatchShape& shape, Deadline deadline) {
  CROSSDOCK_TRY(config, choose_dispatch(shape));
  const auto is_known = [&](const auto& known) {
    return known.config.dispatch_warps == config.dispatch_warps && known.config.cast == config.cast;
  };
  const symm::BlockShape block{.threads = config.threads(), .shared_bytes = kMaxSharedBytes};
  if (shape.flags) {
    if (std::any_of(expanded_variants_.begin(), expanded_variants_.end(), is_known)) return {};
    CROSSDOCK_TRY(expanded, expanded_dispatch_kernel(config));
    CROSSDOCK_TRY(kernel, launcher_->prepare(expanded, block, deadline));
    expanded_variants_.push_back({config, std::move(kernel)});
    return {};
  }
  if (std::any_of(variants_.begin(), variants_.end(), is_known)) return {};
  CROSSDOCK_TRY(ref, dispatch_kernel(config));
  CROSSDOCK_TRY(kernel, launcher_->prepare(ref, block, deadline));
  variants_.push_back({config, std::move(kernel)});
  return {};
}

// All that calls may need: rows of bytes, of bf16, and cast ones.
Result<> Core::prepare_kernels(Deadline deadline) {
  const u32 fewest = *std::min_element(dispatch_blocks_.begin(), dispatch_blocks_.end());
  const u32 groups = device::EpTokens::make(options_.max_tokens, fewest).groups;
  for (const u32 row_bytes : {device::round_up(options_.hidden, 16u), window_.row_bytes})
    CROSSDOCK_CHECK_OK(prepare_variant(shape_of(row_bytes, false, groups), deadline));
  if (options_.cast)
    CROSSDOCK_CHECK_OK(prepare_variant(shape_of(options_.hidden * 2, true, groups), deadline));
  const device::EpCombineConfig combine = combine_variant(window_.pushes);
  const symm::BlockShape block{.threads = combine.threads(),
                               .shared_bytes = device::ep_combine_shared(combine).bytes};
  CROSSDOCK_TRY(kernel, launcher_->prepare(combine_kernel(window_.pushes), block, deadline));
  combine_.emplace(std::move(kernel));
  CROSSDOCK_TRY(mask, launcher_->prepare(mask_kernel(), {.threads = device::kWarpSize}, deadline));
  mask_.emplace(std::move(mask));
  CROSSDOCK_TRY(copy, launcher_->prepare(copy_rows_kernel(), {.threads = kCopyThreads}, deadline));
  copy_rows_.emplace(std::move(copy));
  CROSSDOCK_CHECK_OK(prepare_small(deadline));
  return options_.expert_alignment == 0 ? Result<>() : prepare_grouping(deadline);
}

Result<> Core::prepare_rank(u32 r) {
  symm::Rank& rank = group_->rank(r);
  const u64 experts = window_.areas.most_experts;
  RankState state;
  state.rank = r;
  CROSSDOCK_TRY(kept, rank.allocate_state(sizeof(device::EpState)));
  CROSSDOCK_TRY(previous, rank.allocate_state(2 * experts * 4));
  state.state = std::move(kept);
  state.previous = std::move(previous);
  CROSSDOCK_TRY(mask, rank.allocate_state(sizeof(device::EpMask)));
  state.mask = std::move(mask);
  if (window_.copy_blocks != 0) CROSSDOCK_CHECK_OK(prepare_copies(state));
  if (options_.statistics) {
    CROSSDOCK_TRY(selections, rank.allocate(experts * 8));
    CROSSDOCK_TRY(waits, rank.allocate(u64{window_.world} * 2 * 8));
    state.selections = std::move(selections);
    state.waits = std::move(waits);
  }
  state.layout = slot_layout(options_, window_, r);
  state.small_layout = small_slot_layout(options_, window_);
  for (u32 i = 0; i < options_.slots; ++i)
    CROSSDOCK_CHECK_OK(prepare_slot(state, SlotKind::kWindow));
  device::EpDispatchParams& d = state.dispatch;
  d.common = rank.common(KernelId::kEpDispatch, options_.wait);
  d.view = rank.view();
  d.areas = window_.areas;
  d.flags = window_.flags;
  d.experts = device::EpExperts::make(options_.experts, window_.world);
  d.input.top_k = options_.top_k;
  d.statistics = {state.selections.as<u64>(), state.waits.as<u64>()};
  d.state = state.state.as<device::EpState>();
  if (options_.masks) {
    d.masking = {state.mask.as<device::EpMask>(), options_.mask_late};
    d.stride = options_.max_tokens;
  }
  d.expert_previous = state.previous.as<u32>();
  d.most_blocks = window_.areas.most_blocks;
  device::EpCombineParams& c = state.combine;
  c.common = rank.common(KernelId::kEpCombine, options_.wait);
  c.view = rank.view();
  c.areas = window_.areas;
  c.input = device::ep_input_layout(window_.capacity, options_.hidden * 2, options_.top_k);
  c.staging = window_.staging;
  c.send_blocks = send_blocks(options_, window_.world, combine_blocks_[r]);
  if (window_.pushes)
    c.send_parts =
        device::EpParts::make(combine_variant(true).send_stage_bytes, options_.hidden * 2, 1);
  c.top_k = options_.top_k;
  c.state = d.state;
  c.masking = d.masking;
  if (options_.statistics) c.rank_wait_ns = state.waits.as<u64>() + window_.world;
  for (u32 peer = 0; peer < window_.world; ++peer) {
    d.source_blocks[peer] = static_cast<u8>(dispatch_blocks_[peer]);
    c.source_blocks[peer] = static_cast<u8>(combine_blocks_[peer]);
  }
  CROSSDOCK_CHECK_OK(prepare_small_rank(state));
  ranks_.push_back(std::move(state));
  return {};
}

Result<RankState*> Core::find(u32 rank) {
  for (RankState& state : ranks_)
    if (state.rank == rank) return &state;
  return invalid_argument(
      fmt::format("ep: rank {} is not one of the {} ranks of this process", rank, ranks_.size()));
}

Side* Core::side(u32 rank) {
  for (Side& side : sides_)
    if (side.rank == rank) return &side;
  return nullptr;
}

Result<Statistics> Core::statistics(u32 rank, Deadline deadline) const {
  if (!options_.statistics)
    return invalid_argument("ep: the group was made with statistics = false");
  for (const RankState& state : ranks_) {
    if (state.rank != rank) continue;
    const u32 experts = device::EpExperts::make(options_.experts, window_.world).count(rank);
    const symm::Rank& on = group_->rank(rank);
    Statistics out;
    out.expert_selections.resize(experts);
    out.source_wait_ns.resize(window_.world);
    out.combine_wait_ns.resize(window_.world);
    CROSSDOCK_CHECK_OK(on.read(out.expert_selections.data(), state.selections.address(),
                               experts * sizeof(u64), deadline));
    CROSSDOCK_CHECK_OK(on.read(out.source_wait_ns.data(), state.waits.address(),
                               window_.world * sizeof(u64), deadline));
    CROSSDOCK_CHECK_OK(on.read(out.combine_wait_ns.data(), state.waits.as<u64>() + window_.world,
                               window_.world * sizeof(u64), deadline));
    return out;
  }
  return invalid_argument(fmt::format("ep: rank {} is not in this process", rank));
}

Result<StatisticsMemory> Core::statistics_memory(u32 rank) {
  CROSSDOCK_TRY(state, find(rank));
  if (!options_.statistics) return StatisticsMemory{};
  const auto* const waits = state->waits.as<std::uint64_t>();
  return StatisticsMemory{.expert_selections = state->selections.as<std::uint64_t>(),
                          .source_wait_ns = waits,
                          .combine_wait_ns = waits + window_.world};
}

Result<u32*> Core::mask_memory(u32 rank) {
  CROSSDOCK_TRY(state, find(rank));
  if (!options_.masks)
    return invalid_argument(
        "ep mask_memory: the group was made with masks = false: make it with true");
  return &state->mask.as<device::EpMask>()->ranks;
}

// Before a reset or a reform: handles from before are refused, and windows will be zero.
void Core::begin_anew(const char* by) {
  ++generation_;
  anew_ = by;
  for (RankState& state : ranks_) {
    state.next_small = state.told = 0;
    for (SmallSlot& slot : state.small)
      slot.told = 0;
    for (const auto& slot : state.slots)
      slot->sent = slot->uncombined = false;
  }
}

Result<> Core::reset(Deadline deadline) {
  begin_anew("reset()");
  CROSSDOCK_CHECK_OK(group_->reset(deadline));
  return mask_vacant(deadline);  // masks are zero again
}

// Windows stay where they were, so all that was prepared holds. A newcomer prepares meanwhile, and
// tells in create() how that went.
Result<> Core::reform(Deadline deadline) {
  begin_anew("reform()");
  CROSSDOCK_CHECK_OK(group_->reform(deadline));
  const Result<> masked = mask_vacant(deadline);
  return group_->conclude(masked, current_rank_, kPrepares, deadline);
}

}  // namespace crossdock::ep
