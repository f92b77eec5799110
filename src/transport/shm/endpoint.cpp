// See endpoint.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/endpoint.hpp"

#include <fmt/format.h>

#include "transport/shm/vm_copy.hpp"

namespace crossdock::transport::shm {

std::optional<Error> ShmEndpoint::check(const Shard& shard) noexcept {
  if (auto outside = check_bounds(shard)) return outside;
  for (const Slice& slice : shard.slices)
    if (!slice.region->attached[slot_]) [[unlikely]]
      return make_error(
          Code::kInternal,
          fmt::format("region [{:#x}, +{}) of peer '{}' is used before it is attached",
                      slice.region->address, slice.region->length, peer_->name()));
  return std::nullopt;
}

std::uint32_t ShmEndpoint::window_slices() const noexcept {
  return kVmSlices;
}

std::uint32_t ShmEndpoint::run_end(const Shard& shard, std::uint32_t first,
                                   std::uint32_t end) const noexcept {
  const std::uint32_t mode = shard.slices[first].region->attached[slot_]->mode;
  std::uint32_t at = first + 1;
  while (at < end && shard.slices[at].region->attached[slot_]->mode == mode)
    ++at;
  return at;
}

std::uint32_t ShmEndpoint::copy(const Shard& shard, std::uint32_t first, std::uint32_t end,
                                std::optional<Error>& error) noexcept {
  const std::uint32_t until = run_end(shard, first, end);
  if (shard.slices[first].region->attached[slot_]->mode == kVm)
    return vm_copy(*peer_, shard.op, shard.slices.subspan(first, until - first), error);
  // The mapping outlives the peer; bytes for the dead are not delivered all the same.
  if (!peer_->alive()) {
    error = peer_->lost();
    return 0;
  }
  return copy_mapped(shard, first, until, slot_);
}

}  // namespace crossdock::transport::shm
