// Core: dispatch and combine as calls: arguments checked, a slot taken, parameters filled in,
// launched. Nothing here waits or allocates device memory. See core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "ep/handle.hpp"
#include "symm/strides.hpp"

namespace crossdock::ep {
namespace {

using symm::or_dense;

// Changes the scale_mark of rows that are cast where it has to differ from that of the same rows
// given.
constexpr device::u8 kCastMark = 2;

// Whether a warp takes whole tokens; where there are few it takes parts of them, so small that
// every warp has two.
bool whole_tokens(u32 tokens, u32 warps) {
  return tokens >= 8 * warps;
}

}  // namespace

// On the large path; for few tokens it is asked without `like_cast`. Blocks that copy rows as they
// come have to know whether scales come with them: what is cast is told apart then.
device::EpOutputLayout Core::output_of(const Tokens& t, u32 capacity) const {
  const bool copies = !expanded_variants_.empty();
  const bool like_cast = t.cast || (t.like_cast && !copies);
  auto out = device::ep_output_layout(
      {.capacity = capacity,
       .row_bytes = t.cast ? options_.hidden : t.row_bytes,
       .scale_bytes = like_cast ? cast_scale_bytes(options_.hidden, t.cast_ue8m0) : t.scale_bytes,
       .scales_by_column = t.scales_by_column,
       .top_k = options_.top_k,
       .cast_ue8m0 = like_cast && t.cast_ue8m0});
  if (!t.cast) out.scale_bytes = t.scale_bytes;  // that there are, in planes with room for more
  if (copies && t.cast) out.scale_mark ^= kCastMark;
  return out;
}

Result<symm::LaunchShape> Core::shape(const symm::Rank& rank, u32 grid, StreamPtr stream,
                                      std::optional<cuda::Stream>& kept) const {
  symm::LaunchShape shape{.grid = grid, .overlap = options_.overlap_launches};
  if (stream == nullptr || group_->backend() == symm::Backend::kCpu) return shape;
  kept.emplace(
      cuda::Stream::borrow(*rank.device().context(), static_cast<cuda::StreamHandle>(stream)));
  shape.gpu_stream = &*kept;
  return shape;
}

device::EpDispatchInput Core::input_of(const Tokens& t) const {
  return {.rows = static_cast<const u8*>(t.rows),
          .scales = static_cast<const u8*>(t.scales),
          .ids = t.ids,
          .weights = t.weights,
          .row_stride = or_dense(t.row_stride, t.row_bytes),
          .scale_stride = or_dense(t.scale_stride, t.scale_bytes),
          .row_bytes = t.row_bytes,
          .top_k = options_.top_k};
}

Result<Handle> Core::dispatch(u32 r, const Tokens& t, const DispatchOptions& how,
                              StreamPtr stream) {
  CROSSDOCK_TRY(state, find(r));
  CROSSDOCK_CHECK_OK(check_tokens(r, t, how));
  CROSSDOCK_TRY(small, takes_small(t, how));
  CROSSDOCK_TRY(like, reused(r, t, how));
  const bool weights = like != nullptr ? like->weights : t.weights != nullptr;
  if (how.expanded != nullptr) CROSSDOCK_CHECK_OK(check_expansion(r, t, weights, *how.expanded));
  if (small) {
    const u32 most = most_tokens(how);
    const bool beside = how.expanded != nullptr && copies_few(in_packets(most, t));
    CROSSDOCK_TRY(handle,
                  dispatch_small(*state, t, {most, true, beside ? how.expanded : nullptr}, stream));
    return expand_afterwards(std::move(handle), beside ? nullptr : how.expanded, stream);
  }
  const auto geometry = device::EpTokens::make(t.count, dispatch_blocks_[r]);
  CROSSDOCK_CHECK_OK(can_dispatch(t, geometry.groups));
  symm::Rank& rank = group_->rank(r);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, geometry.blocks, stream, kept));
  CROSSDOCK_TRY(placement, place(*state, t, how, launch_shape.gpu_stream));
  const Slot& slot = *placement.slot;

  device::EpDispatchParams p = state->dispatch;
  p.tokens = geometry;
  p.input = input_of(t);
  p.output = output_of(t, window_.capacity);
  p.output_offset = placement.output_offset;
  p.slot = slot.kind == SlotKind::kWindow ? placement.index : device::kNoSlot;
  p.result = {.routes = slot.routes(),
              .source_ends = slot.source_ends(),
              .sent_ends = slot.sent_ends(),
              .expert_counts = slot.expert_counts(),
              .host_rows = options_.host_counts ? slot.device_words : nullptr,
              .host_experts = options_.host_counts ? slot.device_words + 1 : nullptr,
              .host_ticket = state->tickets.next()};
  if (like != nullptr) {
    const Slot& earlier = *state->slots[like->slot];
    p.reuse = {.routes = earlier.routes(),
               .source_ends = earlier.source_ends(),
               .sent_ends = earlier.sent_ends(),
               .expert_counts = earlier.expert_counts(),
               .ids = like->received.ids};
  }
  const bool beside = how.expanded != nullptr && copy_blocks_[r] != 0;
  CROSSDOCK_CHECK_OK(
      launch_dispatch(*state, t, p, {slot, beside ? how.expanded : nullptr, like}, launch_shape));
  CROSSDOCK_CHECK_OK(copy_out(*state, placement, p, like, launch_shape));
  Handle handle = make_handle(*state, placement, {p.tokens, p.output, p.result, weights, p.stride});
  handle.state_->grouped = beside;
  return expand_afterwards(std::move(handle), beside ? nullptr : how.expanded, stream);
}

Result<> Core::combine(const Handle& handle, const Combined& c, const CombineOptions& how,
                       StreamPtr stream) {
  CROSSDOCK_TRY(h, own_received(handle, "combine"));
  return combine_halves(*h, {c, how, Halves::kBoth}, stream);
}
Result<> Core::combine_send(const Handle& handle, const CombineOptions& how, StreamPtr stream) {
  CROSSDOCK_TRY(h, own_received(handle, "combine_send"));
  CROSSDOCK_CHECK_OK(combine_halves(*h, {{}, how, Halves::kTell}, stream));
  h->told = how.payload;
  return {};
}
Result<> Core::combine_receive(const Handle& handle, const Combined& c, StreamPtr stream) {
  CROSSDOCK_TRY(h, own_received(handle, "combine_receive"));
  return combine_halves(*h, {c, {.payload = h->told}, Halves::kAdd}, stream);
}

// The halves of a combine come in turns, and those of one combine after the other: what is told is
// kept where the epoch is counted, so that a half whose handle is gone is noticed, too.
Result<u32*> Core::take_turn(RankState& state, const Handle::State& h, Halves halves) const {
  const bool small = h.placement.slot->kind == SlotKind::kSmall;
  if (halves != Halves::kBoth && !small && window_.pushes)
    return invalid_argument(
        "ep combine: a combine by push has no halves: make the group with combine = kPull");
  u32& told = small ? state.small[h.slot - options_.slots].told : state.told;
  if (halves == Halves::kAdd && told != h.ticket)
    return invalid_argument("ep combine_receive: nothing has been told: call combine_send() first");
  if (halves != Halves::kAdd && told == h.ticket)
    return invalid_argument(
        "ep combine: a combine_send() of this handle waits for its combine_receive(): call it "
        "first");
  if (halves != Halves::kAdd && told != 0)
    return invalid_argument(
        fmt::format("ep combine: a combine_send() of another handle of rank {} waits for its "
                    "combine_receive(): call it first, or reset() the group if that handle is gone",
                    h.rank));
  return &told;
}

// What has been launched of a combine.
void Core::note_turn(const Handle::State& h, Halves halves, u32& told) {
  told = halves == Halves::kTell ? h.ticket : 0;
  if (halves != Halves::kTell) h.placement.slot->uncombined = false;
}

// Where a warp cannot take whole tokens it takes parts, and every warp has two.
void Core::cut_rows(device::EpCombineParams& p, u32 blocks) const {
  const device::EpCombineConfig config = combine_variant(p.send_blocks != 0);
  const u32 warps = (blocks - p.send_blocks) * config.warps;
  const u32 tokens = std::max(p.tokens.tokens, 1u);
  const bool whole = whole_tokens(tokens, warps);
  const u32 most_rows = std::min(window_.world, options_.top_k);
  const u32 grain = p.payload == device::EpPayload::kBf16
                        ? 0
                        : device::ep_payload_grain(p.payload, config.stage_bytes, most_rows);
  p.parts = device::EpParts::make(config.stage_bytes, p.input.row_bytes, most_rows,
                                  whole ? 1 : device::ceil_div(2 * warps, tokens), grain);
  if (!whole) p.parts.per_ticket = 1;
}

Result<device::EpCombineParams> Core::combine_params(RankState& state, const Handle::State& h,
                                                     const CombineCall& call) const {
  const Combined& c = call.combined;
  const u64 dense = u64{options_.hidden} * 2;
  const bool small = h.placement.slot->kind == SlotKind::kSmall;
  device::EpCombineParams p = small ? state.small[h.slot - options_.slots].combine : state.combine;
  p.tells = call.halves != Halves::kAdd;
  p.adds = call.halves != Halves::kTell;
  p.output.rows = static_cast<u8*>(c.rows);
  p.output.row_stride = or_dense(c.row_stride, dense);
  p.output.weights = c.weights;
  for (u32 i = 0; i < 2; ++i) {
    p.output.bias[i] = static_cast<const u8*>(c.bias[i]);
    p.output.bias_stride[i] = or_dense(c.bias_stride[i], dense);
  }
  if (p.adds) CROSSDOCK_CHECK_OK(check_combined(h, p.output));
  if (!p.adds && h.input.rows == nullptr)
    return invalid_argument("ep combine_send: the dispatch was given an output and no input");
  CROSSDOCK_CHECK_OK(check_experts(h, c.experts));
  if (!p.tells && (c.experts.rows != nullptr || c.experts.weights != nullptr))
    return invalid_argument(
        "ep combine_receive: combine_send() has told the others to read expert_input(): leave "
        "Combined::experts empty");
  p.tokens = h.tokens;
  p.routes = state.slots[h.slot]->routes();
  p.input_offset = h.placement.input_offset;
  p.slot = h.placement.input_slot;
  p.source_ends = state.slots[h.slot]->source_ends();
  p.payload = payload_of(h, call.how.payload);
  if (p.payload != device::EpPayload::kBf16) p.input = ep_packed_input(p.input, p.payload);
  return p;
}

Result<> Core::combine_halves(Handle::State& h, const CombineCall& call, StreamPtr stream) {
  CROSSDOCK_TRY(state, find(h.rank));
  CROSSDOCK_TRY(told, take_turn(*state, h, call.halves));
  if (options_.mask_late && h.let_in != state->let_in)
    return invalid_argument(fmt::format(
        "ep combine: rank {} has let others in since the handle's dispatch, and a handle "
        "of a group with mask_late does not know who was left out then: dispatch again",
        h.rank));
  if (call.halves != Halves::kAdd) CROSSDOCK_CHECK_OK(check_how(h, call.how));
  CROSSDOCK_TRY(p, combine_params(*state, h, call));
  const bool packed = p.payload != device::EpPayload::kBf16;
  const u32 blocks = packed ? packed_blocks(h.rank) : combine_blocks_[h.rank];
  cut_rows(p, blocks);
  const symm::Rank& rank = group_->rank(h.rank);
  if (h.packets) {
    CROSSDOCK_CHECK_OK(combine_packets(h, p, stream));
    note_turn(h, call.halves, *told);
    return {};
  }
  if (packed && p.tells && !call.how.packed)
    CROSSDOCK_CHECK_OK(pack_input(*state, h, p.payload, stream));
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, p.adds ? blocks : 1, stream, kept));
  // A plane that the caller has elsewhere is copied from there; those of a copy always are.
  const ExpertOutput& experts = call.combined.experts;
  ExpertInput from = h.copied() ? h.input : ExpertInput{};
  if (experts.rows != nullptr) from.rows = const_cast<void*>(experts.rows);
  if (experts.weights != nullptr) from.weights = const_cast<float*>(experts.weights);
  if (p.tells) CROSSDOCK_CHECK_OK(copy_in(*state, h, from, launch_shape));
  const bool small = h.placement.slot->kind == SlotKind::kSmall;
  const auto& kernel = packed  ? packed_combines_[static_cast<u32>(p.payload)]
                       : small ? small_combine_
                               : combine_;
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, *kernel, launch_shape, p));
  h.announced = true;
  note_turn(h, call.halves, *told);
  return {};
}

}  // namespace crossdock::ep
