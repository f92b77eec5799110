// See remote_regions.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/remote_regions.hpp"

#include <algorithm>
#include <fmt/format.h>

namespace crossdock::transfer::detail {
namespace {

bool by_address(const RemoteRegionPtr& a, const RemoteRegionPtr& b) {
  return a->address < b->address;
}

RemoteRegionPtr make_region(const wire::RegionEntry& entry,
                            const std::vector<wire::TransportOffer>& offers) {
  auto region = std::make_shared<transport::RemoteRegion>();
  region->id = entry.region_id;
  region->address = entry.addr;
  region->length = entry.length;
  region->access = static_cast<Access>(entry.access & 3);
  region->label = entry.label;
  for (const auto& key : entry.keys) {
    if (key.transport >= offers.size()) continue;
    region->keys.emplace_back(offers[key.transport].name, key.blob);
  }
  return region;
}

// What is above these ids, each of which is above those before. By its id a region is let go of and
// mapped: two of one id would be taken for each other, also when the first is on its way out.
Result<std::uint64_t> check_ids(const std::vector<wire::RegionEntry>& entries, std::uint64_t end) {
  std::vector<std::uint32_t> ids;
  ids.reserve(entries.size());
  for (const auto& entry : entries)
    ids.push_back(entry.region_id);
  std::sort(ids.begin(), ids.end());
  for (const auto id : ids) {
    if (id < end)
      return make_error(Code::kCorrupt,
                        fmt::format("the peer announced a region by the id {} of another", id));
    end = std::uint64_t{id} + 1;
  }
  return end;
}

}  // namespace

const RemoteRegionPtr* find_remote(const RemoteRegions::Snapshot& snapshot,
                                   std::uint64_t address) noexcept {
  auto after = std::upper_bound(
      snapshot.begin(), snapshot.end(), address,
      [](std::uint64_t a, const RemoteRegionPtr& region) { return a < region->address; });
  if (after == snapshot.begin()) return nullptr;
  const RemoteRegionPtr& region = *std::prev(after);
  return address - region->address < region->length ? &region : nullptr;
}

Result<> RemoteRegions::add(const std::vector<wire::RegionEntry>& entries,
                            const std::vector<wire::TransportOffer>& offers) {
  std::vector<RemoteRegionPtr> fresh;
  fresh.reserve(entries.size());
  for (const auto& entry : entries)
    fresh.push_back(make_region(entry, offers));
  std::sort(fresh.begin(), fresh.end(), by_address);

  const std::lock_guard lock(mutex_);
  CROSSDOCK_TRY(ids_end, check_ids(entries, ids_end_));
  if (snapshot_->size() + fresh.size() > most_)
    return make_error(Code::kCorrupt,
                      fmt::format("the peer announced more than {} regions", most_));
  auto next = std::make_shared<Snapshot>();
  next->reserve(snapshot_->size() + fresh.size());
  std::merge(snapshot_->begin(), snapshot_->end(), fresh.begin(), fresh.end(),
             std::back_inserter(*next), by_address);
  for (std::size_t i = 1; i < next->size(); ++i) {
    const auto& a = *(*next)[i - 1];
    const auto& b = *(*next)[i];
    if (b.address - a.address < a.length)
      return make_error(Code::kCorrupt,
                        fmt::format("the peer announced overlapping regions at {:#x} and {:#x}",
                                    a.address, b.address));
  }
  snapshot_ = std::move(next);
  ids_end_ = ids_end;
  changed_.notify_all();
  return {};
}

std::vector<RemoteRegionPtr> RemoteRegions::revoke(const std::vector<std::uint32_t>& ids) {
  std::vector<std::uint32_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  const std::lock_guard lock(mutex_);
  auto next = std::make_shared<Snapshot>();
  std::vector<RemoteRegionPtr> revoked;
  for (const auto& region : *snapshot_) {
    const bool hit = ids.empty() || std::binary_search(sorted.begin(), sorted.end(), region->id);
    if (hit) {
      // Sequentially consistent with the planner, which leases and then looks at this flag.
      region->revoked.store(true);
      revoked.push_back(region);
    } else {
      next->push_back(region);
    }
  }
  snapshot_ = std::move(next);
  return revoked;
}

std::shared_ptr<const RemoteRegions::Snapshot> RemoteRegions::snapshot() const {
  const std::lock_guard lock(mutex_);
  return snapshot_;
}

RemoteRegionPtr RemoteRegions::wait_for(std::string_view label, Deadline deadline,
                                        const std::function<bool()>& gone) {
  std::unique_lock lock(mutex_);
  RemoteRegionPtr found;
  changed_.wait_until(lock, deadline.when(), [&] {
    const auto hit = std::find_if(snapshot_->begin(), snapshot_->end(),
                                  [&](const RemoteRegionPtr& r) { return r->label == label; });
    if (hit != snapshot_->end()) found = *hit;
    return found != nullptr || gone();
  });
  return found;
}

void RemoteRegions::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

}  // namespace crossdock::transfer::detail
