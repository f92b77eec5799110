// Core: received rows by expert, and the sums of what the experts made of them. See core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "ep/handle.hpp"

namespace crossdock::ep {

Result<> Core::prepare_grouping(Deadline deadline) {
  const symm::BlockShape lists{.threads = kGroupThreads,
                               .shared_bytes = device::ep_list_shared_bytes(
                                   kGroupThreads / device::kWarpSize, window_.areas.most_experts)};
  CROSSDOCK_TRY(group, launcher_->prepare(group_rows_kernel(), lists, deadline));
  CROSSDOCK_TRY(reduce,
                launcher_->prepare(reduce_rows_kernel(false),
                                   {.threads = kReduceWarps * device::kWarpSize}, deadline));
  const device::EpExpandRowsConfig expand = expand_rows_variant();
  CROSSDOCK_TRY(
      copies, launcher_->prepare(
                  expand_rows_kernel(),
                  {.threads = expand.threads(), .shared_bytes = expand.shared_bytes()}, deadline));
  expand_rows_.emplace(std::move(copies));
  group_rows_.emplace(std::move(group));
  reduce_rows_.emplace(std::move(reduce));
  return {};
}

device::EpArrived Core::arrived_of(const Handle::State& handle) const {
  const Received& got = handle.received;
  return {.source_ends = got.source_ends,
          .expert_counts = got.expert_counts,
          .ids = got.ids,
          .weights = got.weights,
          .world = window_.world,
          .experts = handle.experts,
          .top_k = options_.top_k,
          .stride = got.source_stride};
}

Result<Slot*> Core::grouped_slot(const Handle& handle, const char* call) {
  CROSSDOCK_TRY(h, own_received(handle, call));
  if (options_.expert_alignment == 0)
    return invalid_argument(fmt::format(
        "ep {}: the group was made with expert_alignment = 0: give it the alignment of the rows",
        call));
  CROSSDOCK_TRY(state, find(h->rank));
  return state->slots[h->slot].get();
}

device::EpGrouping Core::grouping_of(const Slot& slot) const {
  return {.offsets = slot.offsets(),
          .aligned = slot.aligned(),
          .rows = slot.places(),
          .positions = slot.positions(),
          .weights = nullptr,  // written by group_rows only
          .alignment = options_.expert_alignment};
}

Result<Grouped> Core::group_rows(const Handle& handle, StreamPtr stream) {
  CROSSDOCK_TRY(slot, grouped_slot(handle, "group_rows"));
  const symm::Rank& rank = group_->rank(handle.rank());
  device::EpGroupRowsParams p{};
  p.common = rank.common(device::KernelId::kEpGroupRows, options_.wait);
  p.arrived = arrived_of(*handle.state_);
  p.grouping = grouping_of(*slot);
  p.grouping.weights = handle.state_->weights ? slot->place_weights() : nullptr;
  p.pieces = slot->pieces();
  const u32 blocks = list_pieces(options_, window_, handle.received().capacity);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, blocks, stream, kept));
  if (blocks > 1) {
    p.step = device::EpGroupStep::kCount;
    CROSSDOCK_CHECK_OK(launcher_->launch(rank, *group_rows_, launch_shape, p));
    p.step = device::EpGroupStep::kWrite;
  }
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, *group_rows_, launch_shape, p));
  handle.state_->grouped = true;
  return grouped(handle);
}

// As grouped_slot(), and its lists are of this handle, not of an earlier one with the same slot.
Result<Slot*> Core::listed_slot(const Handle& handle, const char* call) {
  CROSSDOCK_TRY(slot, grouped_slot(handle, call));
  if (handle.state_->grouped) return slot;
  return invalid_argument(fmt::format(
      "ep {}: the rows of this handle have not been listed: call group_rows() first, or dispatch "
      "with DispatchOptions::expanded",
      call));
}

Result<Grouped> Core::grouped(const Handle& handle) {
  CROSSDOCK_TRY(slot, listed_slot(handle, "grouped"));
  return Grouped{.offsets = slot->offsets(),
                 .aligned_counts = slot->aligned(),
                 .rows = slot->places(),
                 .positions = slot->positions(),
                 .weights = handle.state_->weights ? slot->place_weights() : nullptr,
                 .places = most_places(options_, window_, handle.received().capacity)};
}

device::EpExpanded Core::expanded_of(const Copied& from, const Expanded& to) {
  const u64 dense_scales =
      to.scales_by_column ? device::round_up(u64{to.places}, u64{4}) : from.scale_bytes;
  return {.rows = static_cast<u8*>(to.rows),
          .scales = static_cast<u8*>(to.scales),
          .weights = to.weights,
          .sources = reinterpret_cast<device::EpSource*>(to.sources),
          .row_stride = to.row_stride == 0 ? from.row_bytes : to.row_stride,
          .scale_stride = to.scale_stride == 0 ? dense_scales : to.scale_stride,
          .places = to.places,
          .rows_per_expert = to.rows_per_expert,
          .scales_by_column = to.scales_by_column};
}

Result<> Core::expand_rows(const Handle& handle, const Expanded& to, StreamPtr stream) {
  CROSSDOCK_TRY(slot, listed_slot(handle, "expand_rows"));
  const symm::Rank& rank = group_->rank(handle.rank());
  const Received& got = handle.received();
  const Copied copied{handle.rank(), got.row_bytes, got.scales == nullptr ? 0 : got.scale_bytes,
                      handle.state_->weights};
  CROSSDOCK_CHECK_OK(check_expanded(copied, to));
  device::EpExpandRowsParams p{};
  p.common = rank.common(device::KernelId::kEpExpandRows, options_.wait);
  p.arrived = arrived_of(*handle.state_);
  p.grouping = grouping_of(*slot);
  p.from = {.rows = static_cast<const u8*>(got.rows),
            .scales = static_cast<const u8*>(got.scales),
            .tokens = got.tokens,
            .row_bytes = got.row_bytes,
            .scale_bytes = got.scale_bytes,
            .scale_columns = got.scale_columns};
  p.to = expanded_of(copied, to);
  const u32 stage_bytes = expand_rows_variant().stage_bytes;
  p.parts = device::ceil_div(got.row_bytes, stage_bytes);
  p.part_bytes = device::ep_part_bytes(got.row_bytes, p.parts);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, launcher_->num_sms(rank), stream, kept));
  return launcher_->launch(rank, *expand_rows_, launch_shape, p);
}

Result<> Core::reduce_rows(const Handle& handle, const ByPlace& outputs, StreamPtr stream) {
  CROSSDOCK_TRY(slot, listed_slot(handle, "reduce_rows"));
  const symm::Rank& rank = group_->rank(handle.rank());
  const u32 row_bytes = options_.hidden * 2;
  const u64 stride = outputs.row_stride == 0 ? row_bytes : outputs.row_stride;
  CROSSDOCK_CHECK_OK(check_by_place(handle, outputs, stride));
  CROSSDOCK_CHECK_OK(check_payload(*handle.state_, outputs.payload, "reduce_rows"));
  CROSSDOCK_TRY(state, find(handle.rank()));
  CROSSDOCK_CHECK_OK(check_not_told(*state, *handle.state_));
  device::EpReduceRowsParams p{};
  p.common = rank.common(device::KernelId::kEpReduceRows, options_.wait);
  p.arrived = arrived_of(*handle.state_);
  if (outputs.ids != nullptr) p.arrived.ids = outputs.ids;
  p.positions = slot->positions();
  p.offsets = slot->offsets();
  p.rows_per_expert = outputs.rows_per_expert;
  p.outputs = static_cast<const u8*>(outputs.rows);
  p.output_stride = stride;
  p.view = rank.view();
  p.input = static_cast<u8*>(handle.expert_input().rows);
  // A copy's own memory is read by this rank only, in the order of the stream.
  if (!handle.copied()) p.free = free_of(*state, handle.state_->placement);
  p.payload = payload_of(*handle.state_, outputs.payload);
  const bool packs = p.payload != device::EpPayload::kBf16;
  if (packs) p.input = packed_rows(*state, *handle.state_);
  p.row_bytes = row_bytes;
  p.weighted = outputs.weighted;
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, launcher_->num_sms(rank), stream, kept));
  CROSSDOCK_CHECK_OK(await_reads(*state, *handle.state_, stream));
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, packs ? *pack_rows_ : *reduce_rows_, launch_shape, p));
  handle.state_->packed = outputs.payload;
  return {};
}

}  // namespace crossdock::ep
