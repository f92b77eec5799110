// Core: dispatches of few tokens: slots of their own, used in turns by all ranks alike, so that
// senders know where rows go without being told. See core.hpp and docs/design/ep.md.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "ep/handle.hpp"

namespace crossdock::ep {

Result<> Core::prepare_small(Deadline deadline) {
  if (window_.small.empty()) return {};
  const auto prepare = [&](u32 row_bytes, bool cast) -> Result<> {
    CROSSDOCK_TRY(config, choose_small_dispatch(row_bytes, cast, window_.world, options_.experts,
                                                options_.small_tokens));
    for (const SmallVariant& known : small_variants_)
      if (known.config.warps == config.warps && known.config.cast == config.cast) return {};
    const symm::BlockShape block{.threads = config.threads(), .shared_bytes = kMaxSharedBytes};
    CROSSDOCK_TRY(kernel, launcher_->prepare(small_dispatch_kernel(config), block, deadline));
    small_variants_.push_back({config, std::move(kernel)});
    return {};
  };
  for (const u32 row_bytes : {device::round_up(options_.hidden, 16u), window_.row_bytes})
    CROSSDOCK_CHECK_OK(prepare(row_bytes, false));
  if (options_.cast) CROSSDOCK_CHECK_OK(prepare(options_.hidden * 2, true));
  const device::EpCombineConfig combine = combine_variant(false);
  CROSSDOCK_TRY(kernel,
                launcher_->prepare(small_combine_kernel(),
                                   {.threads = combine.threads(),
                                    .shared_bytes = device::ep_combine_shared(combine).bytes},
                                   deadline));
  small_combine_.emplace(std::move(kernel));
  return {};
}

Result<> Core::prepare_small_rank(RankState& state) {
  symm::Rank& rank = group_->rank(state.rank);
  for (const device::EpSmallAreas& areas : window_.small) {
    CROSSDOCK_CHECK_OK(prepare_slot(state, SlotKind::kSmall));
    SmallSlot slot;
    CROSSDOCK_TRY(kept, rank.allocate_state(sizeof(device::EpSmallState)));
    CROSSDOCK_TRY(combines, rank.allocate_state(sizeof(device::EpState)));
    slot.state = std::move(kept);
    slot.combines = std::move(combines);
    const auto index = static_cast<u32>(state.small.size());
    device::EpSmallParams& d = slot.dispatch;
    d.common = rank.common(device::KernelId::kEpSmallDispatch, options_.wait);
    d.view = rank.view();
    d.areas = areas;
    d.experts = state.dispatch.experts;
    d.stride = options_.small_tokens;
    d.wide_ids = options_.wide_ids;
    d.output_offset = window_.small_output(index);
    d.statistics = state.dispatch.statistics;
    d.state = slot.state.as<device::EpSmallState>();
    device::EpCombineParams& c = slot.combine;
    c = state.combine;
    c.areas = {};
    c.areas.inputs = areas.inputs;
    c.input = device::ep_input_layout(window_.small_capacity, options_.hidden * 2, options_.top_k);
    c.send_blocks = 0;
    c.state = slot.combines.as<device::EpState>();
    c.free_words = areas.free;
    c.small = d.state;
    state.small.push_back(std::move(slot));
  }
  return {};
}

Result<bool> Core::takes_small(const Tokens& t, const DispatchOptions& how) const {
  const u32 most = how.most_tokens != 0 ? how.most_tokens : options_.max_tokens;
  if (t.count > most)
    return invalid_argument(
        fmt::format("ep dispatch: {} tokens are more than most_tokens = {}, the most of any rank",
                    t.count, most));
  const bool plain = how.routing == nullptr && how.output == nullptr && how.input == nullptr;
  if (how.path == Path::kAuto)
    return plain && !window_.small.empty() && most <= options_.small_tokens;
  if (how.path == Path::kLarge) return false;
  if (window_.small.empty() || t.count > options_.small_tokens)
    return invalid_argument(fmt::format(
        "ep dispatch: Path::kSmall with {} tokens, and the group was made with small_tokens = {}",
        t.count, options_.small_tokens));
  if (!plain)
    return invalid_argument(
        "ep dispatch: Path::kSmall has neither routing nor output nor input: leave them empty, or "
        "use Path::kLarge");
  return true;
}

Result<const Core::SmallVariant*> Core::choose_small(const Tokens& t) const {
  for (const SmallVariant& variant : small_variants_)
    if (variant.config.cast == t.cast &&
        device::ep_small_shared(variant.config, t.row_bytes, window_.world, options_.experts,
                                t.count)
                .bytes <= kMaxSharedBytes)
      return &variant;
  return make_error(
      Code::kUnsupported,
      fmt::format("ep dispatch: no small kernel for rows of {} bytes was prepared", t.row_bytes));
}

Result<Handle> Core::dispatch_small(RankState& state, const Tokens& t, StreamPtr stream) {
  CROSSDOCK_TRY(variant, choose_small(t));
  symm::Rank& rank = group_->rank(state.rank);
  const u32 senders = small_blocks(options_, t.count);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, senders + 1, stream, kept));
  CROSSDOCK_TRY(index, take_small_slot(state));
  Slot& slot = *state.slots[index];
  const u32 turn = index - options_.slots;
  device::EpSmallParams p = state.small[turn].dispatch;
  p.tokens = t.count;
  p.send_blocks = senders;
  p.receives = true;
  p.input = input_of(t);
  p.output = output_of(t, window_.small_capacity);
  p.result = {.routes = slot.routes(),
              .source_ends = slot.source_ends(),
              .sent_ends = slot.sent_ends(),
              .expert_counts = slot.expert_counts(),
              .host_rows = options_.host_counts ? slot.device_words : nullptr,
              .host_experts = options_.host_counts ? slot.device_words + 1 : nullptr,
              .host_ticket = ++state.ticket};
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, variant->kernel, launch_shape, p));
  Placement placement;
  placement.index = index;
  placement.slot = &slot;
  placement.output_offset = p.output_offset;
  placement.input_offset = window_.small_input(turn);
  placement.block = rank.at<u8>(placement.output_offset);
  placement.input = rank.at<u8>(placement.input_offset);
  return make_handle(
      state, placement,
      {device::EpTokens::make(t.count, 1), p.output, p.result, t.weights != nullptr, p.stride});
}

}  // namespace crossdock::ep
