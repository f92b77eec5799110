// Core: received rows by expert, and the sums of what the experts made of them. See core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "ep/handle.hpp"

namespace crossdock::ep {

u64 Core::most_places() const {
  return device::ep_most_places(window_.capacity, options_.top_k, window_.areas.most_experts,
                                options_.expert_alignment);
}

Result<> Core::prepare_grouping(Deadline deadline) {
  const symm::BlockShape lists{.threads = kGroupThreads,
                               .shared_bytes = kGroupThreads / device::kWarpSize * 4};
  CROSSDOCK_TRY(group, launcher_->prepare(group_rows_kernel(), lists, deadline));
  CROSSDOCK_TRY(reduce,
                launcher_->prepare(reduce_rows_kernel(),
                                   {.threads = kReduceWarps * device::kWarpSize}, deadline));
  group_rows_.emplace(std::move(group));
  reduce_rows_.emplace(std::move(reduce));
  return {};
}

Result<> Core::add_grouping(symm::Rank& rank, Slot& slot) const {
  CROSSDOCK_TRY(offsets, rank.allocate((u64{window_.areas.most_experts} + 1) * 4));
  CROSSDOCK_TRY(places, rank.allocate(most_places() * 4));
  CROSSDOCK_TRY(positions, rank.allocate(u64{window_.capacity} * options_.top_k * 4));
  slot.offsets = std::move(offsets);
  slot.places = std::move(places);
  slot.positions = std::move(positions);
  return {};
}

device::EpArrived Core::arrived_of(const Handle& handle) const {
  const Received& got = handle.received();
  return {.source_ends = got.source_ends,
          .expert_counts = got.expert_counts,
          .ids = got.ids,
          .weights = got.weights,
          .world = window_.world,
          .experts = handle.state_->experts,
          .top_k = options_.top_k};
}

Result<Slot*> Core::grouped_slot(const Handle& handle, const char* call) {
  const Handle::State& h = *handle.state_;
  if (h.core.get() != this)
    return invalid_argument(
        fmt::format("ep {}: the handle is of another group: use the group that made it", call));
  if (options_.expert_alignment == 0)
    return invalid_argument(fmt::format(
        "ep {}: the group was made with expert_alignment = 0: give it the alignment of the rows",
        call));
  CROSSDOCK_TRY(state, find(h.rank));
  return &state->slots[h.slot];
}

Result<Grouped> Core::group_rows(const Handle& handle, StreamPtr stream) {
  CROSSDOCK_TRY(slot, grouped_slot(handle, "group_rows"));
  const symm::Rank& rank = group_->rank(handle.rank());
  device::EpGroupRowsParams p{};
  p.common = rank.common(device::KernelId::kEpGroupRows, options_.wait);
  p.arrived = arrived_of(handle);
  p.grouping = {.offsets = slot->offsets.as<u32>(),
                .rows = slot->places.as<device::i32>(),
                .positions = slot->positions.as<u32>(),
                .alignment = options_.expert_alignment};
  const u32 blocks = std::clamp(p.arrived.experts, 1u, launcher_->num_sms(rank));
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, blocks, stream, kept));
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, *group_rows_, launch_shape, p));
  return Grouped{.offsets = p.grouping.offsets,
                 .rows = p.grouping.rows,
                 .positions = p.grouping.positions,
                 .places = most_places()};
}

Result<> Core::reduce_rows(const Handle& handle, const ByPlace& outputs, StreamPtr stream) {
  CROSSDOCK_TRY(slot, grouped_slot(handle, "reduce_rows"));
  const symm::Rank& rank = group_->rank(handle.rank());
  const u32 row_bytes = options_.hidden * 2;
  const u64 stride = outputs.stride == 0 ? row_bytes : outputs.stride;
  if (outputs.rows == nullptr || reinterpret_cast<std::uintptr_t>(outputs.rows) % 16 != 0 ||
      stride % 16 != 0 || stride < row_bytes)
    return invalid_argument(
        fmt::format("ep reduce_rows: rows at {} with a stride of {} bytes must lie on multiples of "
                    "16, one row of {} bytes apart or more",
                    outputs.rows, stride, row_bytes));
  device::EpReduceRowsParams p{};
  p.common = rank.common(device::KernelId::kEpReduceRows, options_.wait);
  p.arrived = arrived_of(handle);
  p.positions = slot->positions.as<u32>();
  p.outputs = static_cast<const u8*>(outputs.rows);
  p.output_stride = stride;
  p.input = static_cast<u8*>(handle.expert_input().rows);
  p.row_bytes = row_bytes;
  p.weighted = outputs.weighted;
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, launcher_->num_sms(rank), stream, kept));
  return launcher_->launch(rank, *reduce_rows_, launch_shape, p);
}

}  // namespace crossdock::ep
