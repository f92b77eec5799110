// Core: where the rows of a dispatch arrive and end up: a slot of the window, the transit and then
// a copy, or memory that the caller provides; and the copies between them. See core.hpp.
//
//   dispatch, all slots held                        combine of such a handle
//     peers -> transit rows                           experts' rows (copy) -> transit inputs, when
//     ep_copy_rows: transit rows -> copy                peers have read what was there before
//     the next dispatch into the transit comes        ep_combine of the transit inputs
//     later in the stream
//
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "ep/handle.hpp"

namespace crossdock::ep {

Result<Handle::State*> Core::own(const Handle& handle, const char* call) const {
  Handle::State* const h = handle.state_.get();
  if (h == nullptr)
    return invalid_argument(fmt::format("ep {}: the handle has been moved from", call));
  if (h->core.get() != this)
    return invalid_argument(
        fmt::format("ep {}: the handle is of another group: use the group that made it", call));
  if (h->generation != generation_)
    return invalid_argument(fmt::format(
        "ep {}: the handle is from before the group's {}: dispatch again", call, anew_));
  return h;
}

Result<Handle::State*> Core::own_received(const Handle& handle, const char* call) const {
  CROSSDOCK_TRY(h, own(handle, call));
  if (!h->arrived)
    return invalid_argument(fmt::format(
        "ep {}: the rows of the handle have only been sent: call dispatch_receive() first", call));
  return h;
}

Result<const Handle::State*> Core::reused(u32 rank, const Tokens& t,
                                          const DispatchOptions& how) const {
  if (how.routing == nullptr) return static_cast<const Handle::State*>(nullptr);
  CROSSDOCK_TRY(h, own_received(*how.routing, "dispatch with a routing"));
  if (h->placement.slot->kind == SlotKind::kSmall)
    return invalid_argument(
        "ep dispatch: the routing is of a dispatch on the small path, which places rows otherwise: "
        "dispatch with ids");
  if (h->rank != rank)
    return invalid_argument(
        fmt::format("ep dispatch: the routing is of rank {}, and this is a dispatch of rank {}: "
                    "every rank gives its own handle",
                    h->rank, rank));
  if (h->tokens.tokens != t.count)
    return invalid_argument(
        fmt::format("ep dispatch: the routing is of {} tokens, and these are {}: the same tokens "
                    "go the same ways, others need a dispatch with ids",
                    h->tokens.tokens, t.count));
  return static_cast<const Handle::State*>(h);
}

Result<std::span<std::byte>> Core::user_memory(u32 rank) {
  CROSSDOCK_TRY(state, find(rank));
  return std::span(group_->rank(state->rank).at<std::byte>(window_.user), options_.user_bytes);
}

Result<std::uint64_t> Core::output_bytes(const Tokens& tokens) const {
  CROSSDOCK_CHECK_OK(check_shape(tokens));
  return std::uint64_t{output_of(tokens, window_.capacity).bytes};
}

// The offset in the window of a block that the caller provides.
Result<u64> Core::user_offset(u32 rank, const void* block, u64 room, u64 needed,
                              const char* what) const {
  constexpr u64 kAlignment = device::SymmetricLayout::kLine;
  const auto begin = reinterpret_cast<u64>(group_->rank(rank).at<u8>(window_.user));
  const auto at = reinterpret_cast<u64>(block);
  if (at < begin || at - begin > options_.user_bytes || room > options_.user_bytes - (at - begin))
    return invalid_argument(fmt::format(
        "ep dispatch: the {} at {}, {} bytes, must lie in user_memory() of rank {}: {} "
        "bytes from {} (Options::user_bytes)",
        what, block, room, rank, options_.user_bytes, reinterpret_cast<const void*>(begin)));
  if (at % kAlignment != 0)
    return invalid_argument(fmt::format("ep dispatch: the {} at {} must lie on a multiple of {}",
                                        what, block, kAlignment));
  if (room < needed)
    return invalid_argument(
        fmt::format("ep dispatch: the {} has room for {} bytes and needs {}: the rows of {} tokens "
                    "of {} ranks with all that goes with them",
                    what, room, needed, options_.max_tokens, window_.world));
  return window_.user + (at - begin);
}

Result<Placement> Core::place(RankState& state, const Tokens& t, const DispatchOptions& how,
                              const cuda::Stream* stream) {
  symm::Rank& rank = group_->rank(state.rank);
  Placement out;
  if (how.output != nullptr) {
    CROSSDOCK_TRY(output, user_offset(state.rank, how.output, how.output_room,
                                      output_of(t, window_.capacity).bytes, "output"));
    out.output_offset = output;
    out.block = rank.at<u8>(output);
    if (how.input != nullptr) {
      CROSSDOCK_TRY(
          input, user_offset(state.rank, how.input, how.input_room, window_.input_bytes, "input"));
      out.input_offset = input;
      out.input = rank.at<u8>(input);
    }
    CROSSDOCK_TRY(index, take_slot(state, SlotKind::kBare, stream));
    out.index = index;
    out.slot = state.slots[index].get();
    return out;
  }
  if (how.input != nullptr)
    return invalid_argument(
        "ep dispatch: an input without an output: give both, or neither for a slot");
  CROSSDOCK_TRY(index, take_window_slot(state, stream));
  out.index = index;
  out.slot = state.slots[index].get();
  const bool copied = out.slot->kind == SlotKind::kCopy;
  out.input_slot = copied ? window_.slots : index;  // the transit comes last
  out.output_offset = window_.output(out.input_slot);
  out.input_offset = window_.input(out.input_slot);
  out.block = copied ? out.slot->rows() : rank.at<u8>(out.output_offset);
  out.input = copied ? out.slot->input() : rank.at<u8>(out.input_offset);
  return out;
}

Result<> Core::launch_copy(const symm::Rank& rank, std::span<const device::EpPlane> planes,
                           device::EpCopyRowsParams p, const symm::LaunchShape& shape) {
  if (planes.empty()) return {};
  p.common = rank.common(device::KernelId::kEpCopyRows, options_.wait);
  p.view = rank.view();
  p.num_planes = static_cast<u32>(planes.size());
  std::copy(planes.begin(), planes.end(), p.planes);
  symm::LaunchShape all = shape;
  all.grid = launcher_->num_sms(rank);
  return launcher_->launch(rank, *copy_rows_, all, p);
}

// After a dispatch: rows out of the transit, and for a reused routing what the earlier dispatch has
// delivered besides rows and scales.
Result<> Core::copy_out(RankState& state, const Placement& placement,
                        const device::EpDispatchParams& params, const Handle::State* like,
                        const symm::LaunchShape& shape) {
  const symm::Rank& rank = group_->rank(state.rank);
  const device::EpOutputLayout& out = params.output;
  const u8* arrived = rank.at<u8>(params.output_offset);
  const bool copied = placement.block != arrived;
  const u32 choices = options_.top_k * 4;
  std::vector<device::EpPlane> planes;
  const auto add = [&](const void* from, u64 offset, u32 row_bytes) {
    planes.push_back({static_cast<const u8*>(from), placement.block + offset, 0, 1, row_bytes});
  };
  if (copied) add(arrived + out.rows, out.rows, out.row_bytes);
  if (copied && out.scale_bytes != 0 && out.scale_columns == 0)
    add(arrived + out.scales, out.scales, out.scale_bytes);
  if (copied && out.scale_columns != 0 && out.scale_bytes != 0)
    planes.push_back({arrived + out.scales, placement.block + out.scales,
                      out.scale_columns * u64{4}, out.scale_bytes / 4, 4});
  if (copied || like != nullptr) {
    const Received* earlier = like != nullptr ? &like->received : nullptr;
    const bool weights = earlier != nullptr ? like->weights : params.input.weights != nullptr;
    add(earlier ? static_cast<const void*>(earlier->ids) : arrived + out.ids, out.ids, choices);
    if (weights)
      add(earlier ? static_cast<const void*>(earlier->weights) : arrived + out.weights, out.weights,
          choices);
    add(earlier ? static_cast<const void*>(earlier->tokens) : arrived + out.sources, out.sources,
        4);
  }
  device::EpCopyRowsParams p{};
  p.rows = params.result.source_ends + window_.world - 1;
  return launch_copy(rank, planes, p, shape);
}

// When the block of a handle that peers read may be written again. Which combine has used a block
// of the caller last is not known, so all that were made before count.
device::EpFree Core::free_of(const RankState& state, const Placement& placement) const {
  if (placement.slot->kind == SlotKind::kSmall) return {};
  const device::EpState* const kept = state.combine.state;
  const bool known = placement.input_slot != device::kNoSlot;
  return {.pulled = window_.areas.pulled,
          .at = known ? kept->free_at[placement.input_slot] : kept->pulled,
          .masking = state.combine.masking};
}

// Before a combine: what the experts have made of the rows, to where peers can read it.
Result<> Core::copy_in(RankState& state, const Handle::State& h, const ExpertInput& from,
                       const symm::LaunchShape& shape) {
  const symm::Rank& rank = group_->rank(state.rank);
  const device::EpInputLayout& layout = state.combine.input;
  u8* to = rank.at<u8>(h.placement.input_offset);
  std::vector<device::EpPlane> planes;
  const auto add = [&](const void* plane, u64 offset, u32 row_bytes) {
    if (plane != nullptr)
      planes.push_back({static_cast<const u8*>(plane), to + offset, 0, 1, row_bytes});
  };
  add(from.rows, layout.rows, layout.row_bytes);
  add(from.weights, layout.weights, options_.top_k * 4);
  device::EpCopyRowsParams p{};
  p.rows = state.slots[h.slot]->source_ends() + window_.world - 1;
  p.free = free_of(state, h.placement);
  return launch_copy(rank, planes, p, shape);
}

Handle Core::make_handle(RankState& state, const Placement& placement, const Dispatched& p) {
  Slot& slot = *placement.slot;
  slot.held = true;
  slot.uncombined = placement.input != nullptr;
  auto h = std::make_unique<Handle::State>();
  h->core = shared_from_this();
  h->generation = generation_;
  h->rank = state.rank;
  h->slot = placement.index;
  h->ticket = p.result.host_ticket;
  h->experts = state.dispatch.experts.count(state.rank);
  h->tokens = p.tokens;
  h->host_rows = slot.host_words;
  h->host_experts = slot.host_words + 1;
  h->placement = placement;
  h->let_in = state.let_in;
  h->weights = p.weights;
  u8* block = placement.block;
  h->received = {.rows = block + p.output.rows,
                 .row_bytes = p.output.row_bytes,
                 .capacity = p.output.capacity,
                 .scales = p.output.scale_bytes == 0 ? nullptr : block + p.output.scales,
                 .scale_bytes = p.output.scale_bytes,
                 .scale_columns = p.output.scale_columns,
                 .ids = reinterpret_cast<std::int32_t*>(block + p.output.ids),
                 .weights = reinterpret_cast<float*>(block + p.output.weights),
                 .tokens = reinterpret_cast<u32*>(block + p.output.sources),
                 .source_ends = p.result.source_ends,
                 .source_stride = p.stride,
                 .expert_counts = p.result.expert_counts};
  if (placement.input != nullptr) {
    const device::EpInputLayout& input =
        slot.kind == SlotKind::kSmall ? state.small[placement.index - options_.slots].combine.input
                                      : state.combine.input;
    h->input = {.rows = placement.input + input.rows,
                .weights = reinterpret_cast<float*>(placement.input + input.weights)};
  }
  return Handle(std::move(h));
}

}  // namespace crossdock::ep
