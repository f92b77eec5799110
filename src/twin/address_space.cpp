// Lookup of attached memory; the hot paths are inline in the header.
// SPDX-License-Identifier: Apache-2.0
#include "twin/address_space.hpp"

#include <algorithm>

namespace crossdock::twin {

void AddressSpace::set_heaps(std::uintptr_t base, std::size_t stride, int ranks) {
  heap_base_ = base;
  stride_ = stride;
  heap_bytes_ = stride * static_cast<std::size_t>(ranks);
  used_.assign(static_cast<std::size_t>(ranks), 0);
}

void AddressSpace::set_shared(std::uintptr_t base, std::size_t bytes) {
  shared_base_ = base;
  shared_bytes_ = bytes;
}

void AddressSpace::attach(int rank, void* base, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  // Keep the offset inside a page, so that granules stay granules.
  constexpr std::uintptr_t kPage = 4096;
  Region region{address, bytes, rank, next_canonical_ + address % kPage};
  next_canonical_ += (bytes / kPage + 2) * kPage;
  attached_.push_back(region);
}

bool AddressSpace::detach(void* base) {
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  return std::erase_if(attached_, [&](const Region& r) { return r.base == address; }) > 0;
}

bool AddressSpace::overlaps(const void* base, std::size_t bytes) const {
  const auto a = reinterpret_cast<std::uintptr_t>(base);
  if (a < heap_base_ + heap_bytes_ && heap_base_ < a + bytes) return true;
  return std::any_of(attached_.begin(), attached_.end(),
                     [&](const Region& r) { return a < r.base + r.bytes && r.base < a + bytes; });
}

const Region* AddressSpace::find_attached(std::uintptr_t a) const {
  for (const Region& region : attached_)
    if (region.contains(a, 1)) return &region;
  return nullptr;
}

int AddressSpace::owner_attached(const void* p, std::size_t n) const {
  const auto a = reinterpret_cast<std::uintptr_t>(p);
  const Region* region = find_attached(a);
  return region != nullptr && region->contains(a, n) ? region->rank : -1;
}

std::uintptr_t AddressSpace::canonical_attached(std::uintptr_t a) const {
  const Region* region = find_attached(a);
  return region != nullptr ? region->canonical + (a - region->base) : a;
}

}  // namespace crossdock::twin
