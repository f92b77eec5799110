// See region_table.hpp. Registrations copy the snapshot (they are rare); lookups only copy a
// pointer. Releases mark the region, and whoever asks next for a snapshot pays for all of them: an
// owner of tens of thousands of regions releases them one by one.
// SPDX-License-Identifier: Apache-2.0
#include "mem/region_table.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>

#include "base/futex.hpp"

namespace crossdock::mem {
namespace {

using Record = std::shared_ptr<RegionRecord>;

std::string range_text(std::uint64_t address, std::uint64_t length) {
  return fmt::format("[{:#x}, +{})", address, length);
}

bool by_address(const Record& a, const Record& b) {
  return a->address < b->address;
}

Result<> check_range(const NewRegion& region) {
  const auto address = reinterpret_cast<std::uint64_t>(region.address);
  if (region.address == nullptr)
    return invalid_argument("region address is null; pass the start of mapped memory");
  if (address % transfer::kRegionAlignment != 0)
    return invalid_argument(
        fmt::format("region address {:#x} is not a multiple of {}; register the allocation it lies "
                    "in (requests may name any bytes of a region)",
                    address, transfer::kRegionAlignment));
  if (region.length == 0)
    return invalid_argument(
        fmt::format("region at {:#x} has length 0; a region has at least 1 byte", address));
  if (region.length > (std::uint64_t{1} << 47) || address + region.length < address)
    return invalid_argument(
        fmt::format("region {} does not fit the address space; check the length",
                    range_text(address, region.length)));
  return {};
}

// Precondition: sorted by address.
Result<> check_disjoint(const RegionTable::Snapshot& all) {
  for (std::size_t i = 1; i < all.size(); ++i) {
    const auto& a = *all[i - 1];
    const auto& b = *all[i];
    if (b.address - a.address < a.length)
      return invalid_argument(fmt::format(
          "region {} overlaps region {}; release the one before, or register their union once",
          range_text(b.address, b.length), range_text(a.address, a.length)));
  }
  return {};
}

// "the nearest region is ..." for messages about addresses that hit none.
std::string nearest_text(const RegionTable::Snapshot& snapshot, std::uint64_t address) {
  if (snapshot.empty()) return "no region is registered";
  auto after = std::upper_bound(snapshot.begin(), snapshot.end(), address,
                                [](std::uint64_t a, const Record& r) { return a < r->address; });
  const Record& near = after == snapshot.begin() ? *after : *std::prev(after);
  return fmt::format("the nearest region is {}{}", range_text(near->address, near->length),
                     near->label.empty() ? "" : " '" + near->label + "'");
}

bool allows(transfer::Access access, transfer::Op op) {
  if (op == transfer::Op::kRead) return access != transfer::Access::kLocalOnly;
  return access == transfer::Access::kRemoteReadWrite;
}

}  // namespace

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    reset();
    region_ = std::move(other.region_);
  }
  return *this;
}

void Lease::reset() {
  // Release: what the holder wrote is visible to whoever sees the region free (finish_release()).
  if (region_ && region_->leases.fetch_sub(1) == 1 && region_->closing.load())
    base::futex_wake_all(region_->leases);
  region_.reset();
}

const Record* find_region(const RegionTable::Snapshot& snapshot, std::uint64_t address) noexcept {
  auto after = std::upper_bound(snapshot.begin(), snapshot.end(), address,
                                [](std::uint64_t a, const Record& r) { return a < r->address; });
  if (after == snapshot.begin()) return nullptr;
  const Record& record = *std::prev(after);
  return address - record->address < record->length ? &record : nullptr;
}

Result<std::vector<Record>> RegionTable::add(std::span<const NewRegion> regions,
                                             const transfer::RegionOptions& options) {
  if (options.label.size() > 64)
    return invalid_argument(fmt::format("region label '{}...' has {} bytes; at most 64 are allowed",
                                        options.label.substr(0, 16), options.label.size()));
  for (const auto& region : regions)
    CROSSDOCK_CHECK_OK(check_range(region));

  const std::lock_guard lock(mutex_);
  const auto& before = *current();
  auto next = std::make_shared<Snapshot>();
  next->reserve(before.size() + regions.size());
  std::vector<Record> added;
  added.reserve(regions.size());
  RegionId id = next_id_;
  for (const auto& region : regions) {
    auto record = std::make_shared<RegionRecord>();
    record->id = id++;
    record->address = reinterpret_cast<std::uint64_t>(region.address);
    record->length = region.length;
    record->access = options.access;
    record->label = options.label;
    record->backing = region.backing;
    added.push_back(std::move(record));
  }
  std::vector<Record> sorted = added;
  std::sort(sorted.begin(), sorted.end(), by_address);
  std::merge(before.begin(), before.end(), sorted.begin(), sorted.end(), std::back_inserter(*next),
             by_address);
  CROSSDOCK_CHECK_OK(check_disjoint(*next));
  snapshot_ = std::move(next);
  next_id_ = id;
  ++version_;
  return added;
}

void RegionTable::begin_release(RegionRecord& region) {
  // Sequentially consistent with lease(): either the lease sees `closing`, or finish_release() sees
  // the lease.
  region.closing.store(true);
}

Result<bool> RegionTable::finish_release(RegionRecord& region) {
  const std::lock_guard lock(mutex_);
  if (const auto leases = region.leases.load(); leases != 0)
    return Error{
        .code = Code::kBusy,
        .retry = Retry::kLater,
        .message = fmt::format("region {} is in use by {} transfers; wait for them or cancel them",
                               range_text(region.address, region.length), leases)};
  if (region.released) return false;
  region.released = true;
  stale_ = true;
  ++version_;
  return true;
}

const std::shared_ptr<const RegionTable::Snapshot>& RegionTable::current() const {
  if (!stale_) return snapshot_;
  auto next = std::make_shared<Snapshot>();
  next->reserve(snapshot_->size());
  std::copy_if(snapshot_->begin(), snapshot_->end(), std::back_inserter(*next),
               [](const Record& record) { return !record->released; });
  snapshot_ = std::move(next);
  stale_ = false;
  return snapshot_;
}

std::shared_ptr<const RegionTable::Snapshot> RegionTable::snapshot() const {
  const std::lock_guard lock(mutex_);
  return current();
}

std::uint64_t RegionTable::version() const noexcept {
  const std::lock_guard lock(mutex_);
  return version_;
}

Result<Lease> RegionTable::lease(std::uint64_t address, std::uint64_t length) const {
  const auto table = snapshot();
  const Record* found = find_region(*table, address);
  if (found == nullptr)
    return invalid_argument(fmt::format("{} is not registered; {}", range_text(address, length),
                                        nearest_text(*table, address)));
  if (!(*found)->contains(address, length))
    return invalid_argument(
        fmt::format("{} reaches past the end of region {}; shorten it by {} bytes",
                    range_text(address, length), range_text((*found)->address, (*found)->length),
                    length - ((*found)->length - (address - (*found)->address))));
  (*found)->leases.fetch_add(1);
  Lease lease(*found);
  if ((*found)->closing.load())
    return make_error(Code::kClosed, fmt::format("region {} is being released",
                                                 range_text((*found)->address, (*found)->length)));
  return lease;
}

Result<Lease> RegionTable::lease_inbound(std::uint64_t address, std::uint64_t length,
                                         transfer::Op op) const {
  CROSSDOCK_TRY(held, lease(address, length));
  if (!allows(held.region()->access, op))
    return make_error(
        Code::kDenied,
        fmt::format("region {} does not allow remote {}; register it with another access",
                    range_text(held.region()->address, held.region()->length),
                    op == transfer::Op::kRead ? "reads" : "writes"));
  return held;
}

Result<Lease> RegionTable::lease_local(std::uint64_t address, std::uint64_t length) const {
  return lease(address, length);
}

}  // namespace crossdock::mem
