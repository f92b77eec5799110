// Core: dispatches of few tokens: slots of their own, used in turns by all ranks alike, so that
// senders know where rows go without being told. See core.hpp and docs/design/ep.md.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
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
    SmallVariant variant{config, std::move(kernel), std::nullopt};
    if (options_.small_expand_sms != 0) {
      CROSSDOCK_TRY(copies, launcher_->prepare(small_expanded_kernel(config), block, deadline));
      variant.expanded.emplace(std::move(copies));
    }
    small_variants_.push_back(std::move(variant));
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
  CROSSDOCK_CHECK_OK(prepare_compressed(deadline));
  CROSSDOCK_CHECK_OK(prepare_reads(deadline));
  return options_.small_packets ? prepare_packets(deadline) : Result<>();
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
    d.masking = state.combine.masking;
    device::EpCombineParams& c = slot.combine;
    c = state.combine;
    c.areas = {};
    c.areas.inputs = areas.inputs;
    c.input = small_input_layout(options_, window_.small_capacity);
    c.send_blocks = 0;
    c.state = slot.combines.as<device::EpState>();
    c.free_words = areas.free;
    c.read_words = areas.reads;
    c.small = d.state;
    state.small.push_back(std::move(slot));
  }
  return {};
}

u32 Core::most_tokens(const DispatchOptions& how) const {
  return how.most_tokens != 0 ? how.most_tokens : options_.max_tokens;
}

Result<bool> Core::takes_small(const Tokens& t, const DispatchOptions& how) const {
  const u32 most = most_tokens(how);
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

Result<const Core::SmallVariant*> Core::choose_small(u32 row_bytes, bool cast, u32 tokens) const {
  for (const SmallVariant& variant : small_variants_)
    if (variant.config.cast == cast &&
        device::ep_small_shared(variant.config, row_bytes, window_.world, options_.experts, tokens)
                .bytes <= kMaxSharedBytes)
      return &variant;
  return make_error(
      Code::kUnsupported,
      fmt::format("ep dispatch: no small kernel for rows of {} bytes was prepared", row_bytes));
}

bool Core::copies_few(bool packets) const {
  return options_.small_expand_sms != 0 && !options_.mask_late && !packets;
}

// As many for each source.
u32 Core::few_copy_blocks() const {
  return std::max(options_.small_expand_sms / window_.world, 1u) * window_.world;
}

device::EpSmallExpandedParams Core::small_expanded(const device::EpSmallParams& p,
                                                   const Handle::State& h,
                                                   const Expanded& to) const {
  const Slot& slot = *h.placement.slot;
  device::EpSmallExpandedParams q{};
  q.small = p;
  q.grouping = grouping_of(slot);
  q.grouping.weights = h.weights ? slot.place_weights() : nullptr;
  q.to = expanded_of({h.rank, p.output.row_bytes, p.output.scale_bytes, h.weights}, to);
  q.copy_blocks = few_copy_blocks();
  q.parts = device::ceil_div(p.output.row_bytes, device::kEpSmallCopyStageBytes);
  q.part_bytes = device::ep_part_bytes(p.output.row_bytes, q.parts);
  return q;
}

// A dispatch, or a half of one, of the handle's tokens.
Result<> Core::launch_small(const device::EpSmallParams& p, Handle::State& h, const Expanded* to,
                            StreamPtr stream) {
  if (h.packets) return launch_packets(p, h, stream);
  CROSSDOCK_TRY(variant, choose_small(h.input_row_bytes, h.cast, p.tokens));
  const symm::Rank& rank = group_->rank(h.rank);
  const u32 blocks = p.send_blocks + (p.sends ? 1 : 0) + (p.receives ? 1 : 0);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, blocks, stream, kept));
  if (to == nullptr) return launcher_->launch(rank, variant->kernel, launch_shape, p);
  const device::EpSmallExpandedParams q = small_expanded(p, h, *to);
  launch_shape.grid += q.copy_blocks;
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, *variant->expanded, launch_shape, q));
  h.grouped = true;
  return {};
}

Result<Handle> Core::dispatch_small(RankState& state, const Tokens& given, const SmallCall& call,
                                    StreamPtr stream) {
  Tokens t = given;
  t.like_cast = false;
  t.cast_ue8m0 = given.cast && given.cast_ue8m0;
  if (!in_packets(call.most, t))
    CROSSDOCK_CHECK_OK(choose_small(t.row_bytes, t.cast, t.count));  // before a slot is taken
  CROSSDOCK_TRY(index, take_small_slot(state));
  const symm::Rank& rank = group_->rank(state.rank);
  std::uint64_t capture = 0;
  if (await_reads_) {
    CROSSDOCK_TRY(now, capture_of(rank, stream));
    capture = now;
  }
  Slot& slot = *state.slots[index];
  const u32 turn = index - options_.slots;
  device::EpSmallParams p = state.small[turn].dispatch;
  p.tokens = t.count;
  p.send_blocks = small_blocks(options_, t.count);
  p.sends = true;
  p.receives = call.receives;
  p.input = input_of(t);
  p.output = output_of(t, window_.small_capacity);
  p.result = {.routes = slot.routes(),
              .source_ends = slot.source_ends(),
              .sent_ends = slot.sent_ends(),
              .expert_counts = slot.expert_counts(),
              .host_rows = options_.host_counts ? slot.device_words : nullptr,
              .host_experts = options_.host_counts ? slot.device_words + 1 : nullptr,
              .host_ticket = state.tickets.next()};
  Placement placement;
  placement.index = index;
  placement.slot = &slot;
  placement.output_offset = p.output_offset;
  placement.input_offset = window_.small_input(turn);
  placement.block = rank.at<u8>(placement.output_offset);
  placement.input = rank.at<u8>(placement.input_offset);
  Handle handle = make_handle(
      state, placement,
      {device::EpTokens::make(t.count, 1), p.output, p.result, t.weights != nullptr, p.stride});
  Handle::State& h = *handle.state_;
  h.arrived = call.receives;
  slot.sent = !call.receives;
  h.output = p.output;
  h.result = p.result;
  h.input_row_bytes = t.row_bytes;
  h.cast = t.cast;
  h.most_tokens = call.most;
  h.packets = in_packets(call.most, t);
  h.capture = capture;
  CROSSDOCK_CHECK_OK(launch_small(p, h, call.to, stream));
  state.next_small = (turn + 1) % options_.small_slots;  // all ranks count what was launched
  return handle;
}

Result<Handle> Core::dispatch_send(u32 r, const Tokens& t, const DispatchOptions& options,
                                   StreamPtr stream) {
  CROSSDOCK_TRY(state, find(r));
  DispatchOptions how = options;
  if (how.path == Path::kAuto) how.path = Path::kSmall;
  CROSSDOCK_CHECK_OK(check_tokens(r, t, how));
  CROSSDOCK_TRY(small, takes_small(t, how));
  if (how.expanded != nullptr)
    return invalid_argument(
        "ep dispatch_send: the first half makes no copies by expert: leave "
        "DispatchOptions::expanded empty and give it to dispatch_receive()");
  if (!small)
    return invalid_argument(
        "ep dispatch_send: only the small path has halves: use Path::kSmall, or dispatch()");
  return dispatch_small(*state, t, {most_tokens(how), false, nullptr}, stream);
}

Result<> Core::dispatch_receive(const Handle& handle, const Expanded* to, StreamPtr stream) {
  CROSSDOCK_TRY(h, own(handle, "dispatch_receive"));
  if (h->arrived)
    return invalid_argument(
        "ep dispatch_receive: the rows of the handle have been received: it is the second half of "
        "one dispatch_send()");
  CROSSDOCK_TRY(state, find(h->rank));
  device::EpSmallParams p = state->small[h->slot - options_.slots].dispatch;
  p.receives = true;
  p.input.row_bytes = h->input_row_bytes;
  p.input.top_k = options_.top_k;
  p.input.weights = h->weights ? h->received.weights : nullptr;  // only whether there are any
  p.output = h->output;
  p.result = h->result;
  if (to != nullptr && options_.expert_alignment == 0)
    return invalid_argument(
        "ep dispatch_receive: the group was made with expert_alignment = 0: give it the alignment "
        "of the rows, or ask for no copies");
  if (to != nullptr)
    CROSSDOCK_CHECK_OK(
        check_expanded({h->rank, p.output.row_bytes, p.output.scale_bytes, h->weights}, *to));
  const bool beside = to != nullptr && copies_few(h->packets);
  CROSSDOCK_CHECK_OK(launch_small(p, *h, beside ? to : nullptr, stream));
  h->arrived = true;
  h->placement.slot->sent = false;
  if (to == nullptr || beside) return {};
  CROSSDOCK_CHECK_OK(group_rows(handle, stream));
  return expand_rows(handle, *to, stream);
}

}  // namespace crossdock::ep
