// Slots: their memory, and which one a dispatch takes. See slots.hpp and core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "ep/slots.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <optional>

#include "ep/core.hpp"

namespace crossdock::ep {
namespace {

// Slots that share an allocation of host words: pinned memory comes in pages.
constexpr u32 kSlotsPerHostBlock = 32;

u64 host_words(const Window& window) {
  return 1 + u64{window.areas.most_experts};
}
const SlotLayout& layout_of(const RankState& state, SlotKind kind) {
  return kind == SlotKind::kSmall ? state.small_layout : state.layout;
}

}  // namespace

u64 most_places(const Options& options, const Window& window, u32 capacity) {
  return device::ep_most_places(capacity, options.top_k, window.areas.most_experts,
                                options.expert_alignment);
}

u32 list_pieces(const Options& options, const Window& window, u32 capacity) {
  return device::ep_list_pieces(u64{capacity} * options.top_k, window.areas.most_experts,
                                kMostListPieces);
}

namespace {

// Without rows and inputs.
SlotLayout local_layout(const Options& options, const Window& window, u32 capacity, u64 routes) {
  const u64 experts = window.areas.most_experts;
  device::SymmetricLayout block;
  SlotLayout out;
  out.routes = block.add("routes", routes);
  out.source_ends = block.add("source ends", u64{window.world} * 4);
  out.sent_ends = block.add("sent ends", u64{window.world} * 4);
  out.expert_counts = block.add("expert counts", experts * 4);
  if (options.expert_alignment != 0) {
    out.offsets = block.add("offsets", (experts + 1) * 4);
    out.aligned = block.add("aligned counts", experts * 4);
    out.places = block.add("places", most_places(options, window, capacity) * 4);
    out.positions = block.add("positions", u64{capacity} * options.top_k * 4);
    out.place_weights = block.add("weights of places", most_places(options, window, capacity) * 4);
    const u32 pieces = list_pieces(options, window, capacity);
    out.pieces = block.add("choices of pieces", pieces > 1 ? u64{pieces} * experts * 4 : 0);
  }
  out.local_bytes = block.bytes;
  return out;
}

}  // namespace

SlotLayout slot_layout(const Options& options, const Window& window, u32 rank) {
  SlotLayout out =
      local_layout(options, window, window.capacity, routes_bytes(options, window, rank));
  device::SymmetricLayout block;
  block.bytes = out.local_bytes;
  out.rows = block.add("rows", window.output_bytes);
  out.input = block.add("input", window.input_bytes);
  out.copy_bytes = block.bytes;
  return out;
}
SlotLayout small_slot_layout(const Options& options, const Window& window) {
  const u64 routes = device::EpTokens::most_routes(options.small_tokens, 1, window.world);
  return local_layout(options, window, window.small_capacity, routes * sizeof(device::EpRoute));
}

// Gives a slot its words for the host. Blocks are made ahead, so that this allocates rarely.
Result<> Core::add_host_words(RankState& state, Slot& slot) const {
  const u64 words = host_words(window_);
  const std::size_t index = state.slots.size();
  if (index / kSlotsPerHostBlock >= state.host_blocks.size()) {
    CROSSDOCK_TRY(block,
                  group_->rank(state.rank).allocate_host(kSlotsPerHostBlock * words * sizeof(u64)));
    state.host_blocks.push_back(std::move(block));
  }
  const symm::HostMemory& block = state.host_blocks[index / kSlotsPerHostBlock];
  const u64 first = index % kSlotsPerHostBlock * words;
  slot.host_words = block.host<u64>() + first;
  slot.device_words = block.device<u64>() + first;
  return {};
}

Result<u32> Core::add_slot(RankState& state, SlotKind kind, symm::LocalMemory memory) const {
  auto slot = std::make_unique<Slot>(kind, layout_of(state, kind), std::move(memory));
  CROSSDOCK_CHECK_OK(add_host_words(state, *slot));
  state.slots.push_back(std::move(slot));
  return static_cast<u32>(state.slots.size() - 1);
}

namespace {

u64 bytes_of(const RankState& state, SlotKind kind) {
  const SlotLayout& layout = layout_of(state, kind);
  return kind == SlotKind::kCopy ? layout.copy_bytes : layout.local_bytes;
}

}  // namespace

// Before any dispatch: may wait for the rank's own stream.
Result<u32> Core::prepare_slot(RankState& state, SlotKind kind) const {
  CROSSDOCK_TRY(memory, group_->rank(state.rank).allocate(bytes_of(state, kind)));
  return add_slot(state, kind, std::move(memory));
}

Result<bool> Core::in_capture(u32 rank, const cuda::Stream* stream) const {
  const symm::RankDevice& device = group_->rank(rank).device();
  if (device.context() == nullptr) return false;
  return (stream != nullptr ? *stream : *device.stream()).capturing();
}

Result<> Core::refuse_in_capture(u32 rank, const cuda::Stream* stream, SlotKind kind) const {
  CROSSDOCK_TRY(capturing, in_capture(rank, stream));
  if (!capturing) return {};
  const bool copy = kind == SlotKind::kCopy;
  return make_error(
      Code::kBusy,
      fmt::format("ep dispatch: rank {} needs memory for {}, which cannot be made while the stream "
                  "is being captured: {}, or drop a handle",
                  rank, copy ? "a copy of its rows" : "its routing",
                  copy ? "reserve_copies() before the capture, make the group with more slots"
                       : "hold as many handles at a time once before the capture"));
}

// One more slot, in the middle of a call: must not wait for the GPU.
Result<u32> Core::make_slot(RankState& state, SlotKind kind, const cuda::Stream* stream) const {
  CROSSDOCK_CHECK_OK(refuse_in_capture(state.rank, stream, kind));
  symm::RankDevice& device = group_->rank(state.rank).device();
  CROSSDOCK_TRY(memory, device.allocate_in_order(bytes_of(state, kind), stream));
  return add_slot(state, kind, std::move(memory));
}

// A graph writes to its slots in every replay, when the handles of the capture are long gone. So
// those go to captures alone, which may share them: replays come one after the other.
Result<u32> Core::take_slot(RankState& state, SlotKind kind, const cuda::Stream* stream) const {
  CROSSDOCK_TRY(capturing, in_capture(state.rank, stream));
  const auto find_free = [&](bool captured) -> std::optional<u32> {
    for (u32 i = 0; i < state.slots.size(); ++i) {
      const Slot& slot = *state.slots[i];
      if (slot.kind == kind && !slot.held && slot.captured == captured) return i;
    }
    return std::nullopt;
  };
  std::optional<u32> found = capturing ? find_free(true) : std::nullopt;
  if (!found) found = find_free(false);
  if (!found) return make_slot(state, kind, stream);
  state.slots[*found]->captured = capturing;
  return *found;
}

// In turns, on all ranks alike: senders know which one it is.
Result<u32> Core::take_small_slot(RankState& state) const {
  const u32 turn = state.next_small;
  const u32 index = options_.slots + turn;
  if (state.slots[index]->held)
    return make_error(
        Code::kBusy,
        fmt::format("ep dispatch: the {} small slots of rank {} are used in turns, and the next "
                    "still holds the rows of an earlier dispatch: drop its handle, or make the "
                    "group with more small_slots",
                    options_.small_slots, state.rank));
  return index;
}

Result<u32> Core::take_window_slot(RankState& state, const cuda::Stream* stream) const {
  if (options_.slots == 0)
    return invalid_argument(
        "ep dispatch: the group was made with slots = 0, for few tokens and for outputs of the "
        "caller: give an output in user_memory(), or make it with slots");
  for (u32 i = 0; i < options_.slots; ++i) {
    const u32 slot = (state.next_slot + i) % options_.slots;
    if (state.slots[slot]->held) continue;
    state.next_slot = (slot + 1) % options_.slots;
    return slot;
  }
  if (options_.fall_back) return take_slot(state, SlotKind::kCopy, stream);
  return make_error(
      Code::kBusy,
      fmt::format("ep dispatch: all {} slots of rank {} hold the rows of earlier dispatches: drop "
                  "a handle, or make the group with more slots or with fall_back = true",
                  options_.slots, state.rank));
}

Result<> Core::reserve_copies(u32 rank, u32 copies) {
  CROSSDOCK_TRY(state, find(rank));
  if (!options_.fall_back)
    return invalid_argument(
        "ep reserve_copies: the group was made with fall_back = false and has no transit");
  CROSSDOCK_CHECK_OK(refuse_in_capture(rank, nullptr, SlotKind::kCopy));
  const auto made = std::count_if(state->slots.begin(), state->slots.end(),
                                  [](const auto& slot) { return slot->kind == SlotKind::kCopy; });
  for (auto i = static_cast<u64>(made); i < copies; ++i)
    CROSSDOCK_CHECK_OK(prepare_slot(*state, SlotKind::kCopy));
  return {};
}

void Core::release(u32 rank, u32 slot) noexcept {
  for (RankState& state : ranks_) {
    if (state.rank != rank) continue;
    Slot& freed = *state.slots[slot];
    freed.held = freed.sent = freed.uncombined = false;
  }
}

}  // namespace crossdock::ep
