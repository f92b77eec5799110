// Core: masks: which ranks a rank goes on without. See core.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "ep/handle.hpp"

namespace crossdock::ep {

Result<> Core::mask(u32 r, u32 peer, bool masked, StreamPtr stream) {
  if (peer >= window_.world)
    return invalid_argument(
        fmt::format("ep mask: peer = {} must be one of the {} ranks", peer, window_.world));
  if (peer == r)
    return invalid_argument(
        fmt::format("ep mask: rank {} cannot go on without itself: mask it at the others", r));
  const u32 bit = 1u << peer;
  if (!masked && (vacant_bits() & bit) != 0)
    return invalid_argument(fmt::format(
        "ep mask: no process has rank {}: it stays masked until one has joined by reform()", peer));
  return change_mask(r, {.set = masked ? bit : 0, .clear = bit}, stream);
}

u32 Core::vacant_bits() const {
  u32 bits = 0;
  for (const u32 vacant : group_->vacant_ranks())
    bits |= 1u << vacant;
  return bits;
}

// Ranks that no process has are masked, in groups that have masks.
Result<> Core::mask_vacant(Deadline deadline) {
  device::EpMask mask{};
  mask.ranks = vacant_bits();
  if (!options_.masks || mask.ranks == 0) return {};
  for (const RankState& state : ranks_) {
    current_rank_ = state.rank;
    CROSSDOCK_CHECK_OK(
        group_->rank(state.rank).write(state.mask.address(), &mask, sizeof(mask), deadline));
  }
  return {};
}

Result<> Core::change_mask(u32 r, const MaskChange& change, StreamPtr stream) {
  CROSSDOCK_TRY(state, find(r));
  if (!options_.masks)
    return invalid_argument("ep mask: the group was made with masks = false: make it with true");
  const bool lets_in = (change.clear & ~change.set) != 0;
  if (lets_in) CROSSDOCK_CHECK_OK(check_nothing_open(*state));
  device::EpMaskParams p{};
  p.view = group_->rank(r).view();
  p.areas = window_.areas;
  p.state = state->state.as<device::EpState>();
  p.mask = state->mask.as<device::EpMask>();
  p.set = change.set;
  p.clear = change.clear & ~vacant_bits();
  p.combine_blocks = combine_blocks_[r];
  p.told = change.told;
  for (const SmallSlot& slot : state->small)
    p.small[p.slots++] = slot.state.as<device::EpSmallState>();
  const symm::Rank& rank = group_->rank(r);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, 1, stream, kept));
  CROSSDOCK_CHECK_OK(launcher_->launch(rank, *mask_, launch_shape, p));
  if (lets_in) ++state->let_in;
  return {};
}

// A rank that comes back in the middle of a call has not been told of it, and would be waited for
// in vain. Between a dispatch and its combine it would be asked for rows that it has not got: a
// handle knows who was masked before its dispatch, but not who was in the middle of it.
Result<> Core::check_nothing_open(const RankState& state) const {
  const auto open = [&](const char* what) {
    return invalid_argument(
        fmt::format("ep mask: rank {}: {} before a rank is let in again", state.rank, what));
  };
  bool told = state.told != 0;
  for (const SmallSlot& slot : state.small)
    told = told || slot.told != 0;
  if (told) return open("a combine_send() waits for its combine_receive(): call it");
  for (const auto& slot : state.slots) {
    if (slot->sent)
      return open(
          "a dispatch_send() waits for its dispatch_receive(): call it, or drop the handle,");
    if (options_.mask_late && slot->uncombined)
      return open(
          "a dispatch has not been combined yet, and with mask_late its handle does not know who "
          "was left out: combine it, or drop the handle,");
  }
  return {};
}

Result<> Core::read_mask(u32 r, std::int32_t* told, StreamPtr stream) {
  if (told == nullptr || reinterpret_cast<std::uintptr_t>(told) % 4 != 0)
    return invalid_argument(fmt::format("ep read_mask: told at {} must be i32 [{}]",
                                        static_cast<const void*>(told), window_.world));
  CROSSDOCK_CHECK_OK(find(r));
  CROSSDOCK_CHECK_OK(check_memory({r, "read_mask"}, told, "words"));
  return change_mask(r, {.told = told}, stream);
}

Result<u32> Core::masked(u32 r, Deadline deadline) {
  CROSSDOCK_TRY(state, find(r));
  device::EpMask mask{};
  CROSSDOCK_CHECK_OK(group_->rank(r).read(&mask, state->mask.address(), sizeof(mask), deadline));
  return u32{mask.ranks};
}

}  // namespace crossdock::ep
