// Core: dispatch and combine as calls: arguments checked, a slot taken, parameters filled in,
// launched. Nothing here waits or allocates device memory. See core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "ep/handle.hpp"

namespace crossdock::ep {
namespace {

bool aligned(const void* p, u64 alignment) {
  return reinterpret_cast<std::uintptr_t>(p) % alignment == 0;
}
u64 or_dense(u64 stride, u64 dense) {
  return stride == 0 ? dense : stride;
}

// Tickets a warp takes: whole tokens where there are many, parts of them where few tokens would
// leave warps without work.
u32 parts_per_ticket(u32 parts, u32 tokens, u32 warps) {
  return tokens >= 8 * warps ? parts : 1;
}

}  // namespace

Result<> Core::check_tokens(const Tokens& t) const {
  const u32 delivered = t.cast ? t.row_bytes / 2 : t.row_bytes;
  if (t.count > options_.max_tokens)
    return invalid_argument(fmt::format(
        "ep dispatch: {} tokens are more than the max_tokens = {} that the group was made for",
        t.count, options_.max_tokens));
  if (t.row_bytes == 0 || t.row_bytes % 16 != 0)
    return invalid_argument(
        fmt::format("ep dispatch: row_bytes = {} must be a positive multiple of 16: pad the rows",
                    t.row_bytes));
  if (t.cast && (!options_.cast || t.row_bytes != options_.hidden * 2))
    return invalid_argument(
        fmt::format("ep dispatch: a cast takes rows of bf16, {} bytes for hidden = {}, and a group "
                    "made with cast = true; these have {} bytes",
                    options_.hidden * 2, options_.hidden, t.row_bytes));
  if (t.cast && t.scale_bytes != 0)
    return invalid_argument("ep dispatch: a cast makes its own scales: leave scales empty");
  if (delivered > window_.row_bytes || t.scale_bytes > window_.scale_bytes)
    return invalid_argument(fmt::format(
        "ep dispatch: rows of {} and scales of {} bytes do not fit the slots, made for {} and {}",
        delivered, t.scale_bytes, window_.row_bytes, window_.scale_bytes));
  if (t.scale_bytes % 4 != 0)
    return invalid_argument(
        fmt::format("ep dispatch: scale_bytes = {} must be a multiple of 4", t.scale_bytes));
  if (t.count == 0) return {};
  const u64 stride = or_dense(t.row_stride, t.row_bytes);
  if (t.rows == nullptr || !aligned(t.rows, 16) || stride % 16 != 0 || stride < t.row_bytes)
    return invalid_argument(
        fmt::format("ep dispatch: rows at {} with a stride of {} bytes must lie on multiples of "
                    "16, one row of {} bytes apart or more",
                    t.rows, stride, t.row_bytes));
  const u64 scale_stride = or_dense(t.scale_stride, t.scale_bytes);
  if (t.scale_bytes != 0 &&
      (t.scales == nullptr || !aligned(t.scales, scale_stride % 16 == 0 ? 16 : 4) ||
       scale_stride % 4 != 0 || scale_stride < t.scale_bytes))
    return invalid_argument(
        fmt::format("ep dispatch: scales at {} with a stride of {} bytes must lie on multiples of "
                    "4 (of 16 when the stride is one), {} bytes apart or more",
                    t.scales, scale_stride, t.scale_bytes));
  if (t.ids == nullptr || !aligned(t.ids, options_.wide_ids ? 8 : 4) || !aligned(t.weights, 4))
    return invalid_argument(fmt::format("ep dispatch: ids at {} must be [tokens][{}] of {} bits",
                                        t.ids, options_.top_k, options_.wide_ids ? 64 : 32));
  return {};
}

device::EpOutputLayout Core::output_of(const Tokens& t) const {
  return device::ep_output_layout(
      {.capacity = window_.capacity,
       .row_bytes = t.cast ? options_.hidden : t.row_bytes,
       .scale_bytes = t.cast ? cast_scale_bytes(options_.hidden) : t.scale_bytes,
       .scales_by_column = t.scales_by_column,
       .top_k = options_.top_k});
}

Result<const Core::Variant*> Core::choose(const Tokens& t, u32 groups) const {
  const DispatchShape shape = shape_of(t.row_bytes, t.cast, groups);
  for (const Variant& variant : variants_)
    if (variant.config.cast == t.cast &&
        dispatch_shared_bytes(variant.config, shape) <= kMaxSharedBytes)
      return &variant;
  return make_error(
      Code::kUnsupported,
      fmt::format("ep dispatch: no kernel for rows of {} bytes was prepared", t.row_bytes));
}

Result<u32> Core::take_slot(RankState& state) const {
  for (u32 i = 0; i < options_.slots; ++i) {
    const u32 slot = (state.next_slot + i) % options_.slots;
    if (state.slots[slot].held) continue;
    state.next_slot = (slot + 1) % options_.slots;
    return slot;
  }
  return make_error(
      Code::kBusy,
      fmt::format("ep dispatch: all {} slots of rank {} hold the rows of earlier dispatches: drop "
                  "a handle, or make the group with more slots",
                  options_.slots, state.rank));
}

void Core::release(u32 rank, u32 slot) noexcept {
  for (RankState& state : ranks_)
    if (state.rank == rank) state.slots[slot].held = false;
}

Result<symm::LaunchShape> Core::shape(const symm::Rank& rank, u32 grid, StreamPtr stream,
                                      std::optional<cuda::Stream>& kept) const {
  symm::LaunchShape shape{.grid = grid};
  if (stream == nullptr || group_->backend() == symm::Backend::kCpu) return shape;
  kept.emplace(
      cuda::Stream::borrow(*rank.device().context(), static_cast<cuda::StreamHandle>(stream)));
  shape.gpu_stream = &*kept;
  return shape;
}

Result<Handle> Core::dispatch(u32 r, const Tokens& t, StreamPtr stream) {
  CROSSDOCK_TRY(state, find(r));
  CROSSDOCK_CHECK_OK(check_tokens(t));
  const auto geometry = device::EpTokens::make(t.count, dispatch_blocks_[r]);
  CROSSDOCK_TRY(variant, choose(t, geometry.groups));
  CROSSDOCK_TRY(index, take_slot(*state));
  Slot& slot = state->slots[index];
  symm::Rank& rank = group_->rank(r);

  device::EpDispatchParams p = state->dispatch;
  p.tokens = geometry;
  p.input.rows = static_cast<const u8*>(t.rows);
  p.input.row_bytes = t.row_bytes;
  p.input.row_stride = or_dense(t.row_stride, t.row_bytes);
  p.input.scales = static_cast<const u8*>(t.scales);
  p.input.scale_stride = or_dense(t.scale_stride, t.scale_bytes);
  p.input.ids = t.ids;
  p.input.weights = t.weights;
  p.output = output_of(t);
  p.output_offset = window_.output(index);
  p.slot = index;
  p.result = {.routes = slot.routes.as<device::EpRoute>(),
              .source_ends = slot.source_ends.as<u32>(),
              .expert_counts = slot.expert_counts.as<u32>(),
              .host_rows = slot.host_rows.device<u64>(),
              .host_experts = slot.host_experts.device<u64>(),
              .host_ticket = ++state->ticket};
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, geometry.blocks, stream, kept));
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, variant->kernel, launch_shape, p));
  slot.held = true;

  auto handle = std::make_unique<Handle::State>();
  handle->core = shared_from_this();
  handle->rank = r;
  handle->slot = index;
  handle->ticket = p.result.host_ticket;
  handle->experts = p.experts.count(r);
  handle->tokens = geometry;
  handle->host_rows = slot.host_rows.host<u64>();
  handle->host_experts = slot.host_experts.host<u64>();
  u8* block = rank.at<u8>(p.output_offset);
  handle->received = {.rows = block + p.output.rows,
                      .row_bytes = p.output.row_bytes,
                      .capacity = p.output.capacity,
                      .scales = p.output.scale_bytes == 0 ? nullptr : block + p.output.scales,
                      .scale_bytes = p.output.scale_bytes,
                      .scale_columns = p.output.scale_columns,
                      .ids = reinterpret_cast<std::int32_t*>(block + p.output.ids),
                      .weights = reinterpret_cast<float*>(block + p.output.weights),
                      .tokens = reinterpret_cast<u32*>(block + p.output.sources),
                      .source_ends = p.result.source_ends,
                      .expert_counts = p.result.expert_counts};
  u8* input = rank.at<u8>(window_.input(index));
  handle->input = {.rows = input + state->combine.input.rows,
                   .weights = reinterpret_cast<float*>(input + state->combine.input.weights)};
  return Handle(std::move(handle));
}

Result<> Core::combine(const Handle& handle, const Combined& c, StreamPtr stream) {
  const Handle::State& h = *handle.state_;
  if (h.core.get() != this)
    return invalid_argument(
        "ep combine: the handle is of another group: use the group that made it");
  CROSSDOCK_TRY(state, find(h.rank));
  const u64 dense = u64{options_.hidden} * 2;
  const auto good = [&](const void* rows, u64 stride) {
    return aligned(rows, 16) && stride % 16 == 0 && stride >= dense;
  };
  device::EpCombineParams p = state->combine;
  p.output.rows = static_cast<u8*>(c.rows);
  p.output.row_stride = or_dense(c.row_stride, dense);
  p.output.weights = c.weights;
  bool right = h.tokens.tokens == 0 || (c.rows != nullptr && good(c.rows, p.output.row_stride));
  for (u32 i = 0; i < 2; ++i) {
    p.output.bias[i] = static_cast<const u8*>(c.bias[i]);
    p.output.bias_stride[i] = or_dense(c.bias_stride[i], dense);
    right = right && good(c.bias[i], p.output.bias_stride[i]);
  }
  if (!right)
    return invalid_argument(
        fmt::format("ep combine: output at {} and biases must be rows of {} bytes on multiples of "
                    "16, with strides of multiples of 16",
                    c.rows, dense));
  p.tokens = h.tokens;
  p.routes = state->slots[h.slot].routes.as<device::EpRoute>();
  p.input_offset = window_.input(h.slot);
  p.slot = h.slot;
  const device::EpCombineConfig config = combine_variant();
  p.parts = device::EpParts::make(config.stage_bytes, options_.hidden * 2,
                                  std::min(window_.world, options_.top_k));
  const u32 blocks = combine_blocks_[h.rank];
  p.parts.per_ticket = parts_per_ticket(p.parts.count, h.tokens.tokens, blocks * config.warps);
  std::optional<cuda::Stream> kept;
  const symm::Rank& rank = group_->rank(h.rank);
  CROSSDOCK_TRY(launch_shape, shape(rank, blocks, stream, kept));
  return launcher_->launch(rank, *combine_, launch_shape, p);
}

}  // namespace crossdock::ep
