// The engine's memory: registering, telling peers, releasing once nobody touches it.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fmt/format.h>

#include "base/futex.hpp"
#include "transfer/engine_core.hpp"
#include "wire/segment.hpp"

namespace crossdock::transfer::detail {
std::vector<wire::RegionEntry> EngineCore::entries_of(
    std::span<const std::shared_ptr<mem::RegionRecord>> regions) const {
  std::vector<wire::RegionEntry> entries;
  entries.reserve(regions.size());
  for (const auto& region : regions) {
    if (region->access == Access::kLocalOnly || region->closing.load()) continue;
    wire::RegionEntry entry{.region_id = region->id,
                            .addr = region->address,
                            .length = region->length,
                            .access = static_cast<std::uint8_t>(region->access),
                            .label = region->label};
    for (std::size_t i = 0; i < transports_.size(); ++i) {
      auto key = transports_[i]->export_region(*region);
      if (!key.empty())
        entry.keys.push_back({.transport = static_cast<std::uint8_t>(i), .blob = std::move(key)});
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

Result<bool> EngineCore::maps_memory() {
  const base::Gate::Pass pass(gate_);
  if (!pass) return usable().error();
  return std::any_of(transports_.begin(), transports_.end(),
                     [](const auto& transport) { return transport->maps_memory(); });
}

wire::Welcome EngineCore::welcome(std::uint64_t data_token) const {
  wire::Welcome welcome{.engine_name = identity_.name,
                        .instance_id = identity_.instance,
                        .features = identity_.features,
                        .data_token = data_token,
                        .host = identity_.host};
  for (const auto& transport : transports_)
    welcome.transports.push_back(
        {.name = std::string(base_name(transport->name())), .address = transport->local_address()});
  return welcome;
}

std::vector<std::vector<std::byte>> EngineCore::segment_frames() const {
  const auto version = regions_.version();
  const auto entries = entries_of(*regions_.snapshot());
  auto frames = wire::encode_segment(version, entries);
  return frames.ok() ? std::move(*frames) : std::vector<std::vector<std::byte>>{};
}

Result<std::vector<std::shared_ptr<RegionCore>>> EngineCore::add_regions(
    std::span<const mem::NewRegion> regions, const RegionOptions& options) {
  CROSSDOCK_CHECK_OK(usable());
  // In one task of the loop, where sessions start as well: each gets the new regions once, in its
  // segment or as an announcement.
  Result<std::vector<std::shared_ptr<mem::RegionRecord>>> added =
      make_error(Code::kClosed, "the engine is closed");
  loop_->run([&] {
    added = regions_.add(regions, options);
    if (added.ok()) announce(*added);
  });
  if (!added.ok()) return std::move(added).error();
  std::vector<std::shared_ptr<RegionCore>> cores;
  cores.reserve(added->size());
  for (auto& record : *added)
    cores.emplace_back(new RegionCore(shared_from_this(), std::move(record)), DeleteUnlessForked{});
  counters_.regions->add(static_cast<std::int64_t>(cores.size()));
  return cores;
}

// Loop thread.
void EngineCore::announce(std::span<const std::shared_ptr<mem::RegionRecord>> regions) {
  if (sessions_.size() == 0) return;
  auto frames = wire::encode_regions_added(regions_.version(), entries_of(regions));
  if (frames.ok() && !frames->empty()) sessions_.broadcast(*frames);
}

Result<> EngineCore::release(mem::RegionRecord& region, Deadline deadline) {
  regions_.begin_release(region);
  while (const auto leases = region.leases.load()) {
    if (deadline.passed()) break;
    base::futex_wait(region.leases, leases, deadline);
  }
  // Peers first: while they may write, the region must stay known, so that it cannot be registered
  // anew under them.
  if (sessions_.size() > 0 && region.access != Access::kLocalOnly) {
    const auto revocation = sessions_.revoke({region.id});
    if (!revocation->wait(deadline))
      return Error{.code = Code::kBusy,
                   .scope = Scope::kPeer,
                   .retry = Retry::kLater,
                   .message = fmt::format("region [{:#x}, +{}) is still held by {}", region.address,
                                          region.length, revocation->holders())};
  }
  return forget_region(region);
}

Result<> EngineCore::forget_region(mem::RegionRecord& region) {
  CROSSDOCK_TRY(first, regions_.finish_release(region));
  if (first) counters_.regions->add(-1);
  return {};
}

void EngineCore::release_unattended(std::optional<mem::SharedMemory> memory,
                                    std::shared_ptr<mem::RegionRecord> record) {
  if (closed_.load()) return keep_until_the_end(std::move(memory));
  regions_.begin_release(*record);
  if (sessions_.size() == 0 && forget_region(*record).ok()) return;
  orphans_.adopt(std::move(memory), std::move(record));
}

// A closed engine cannot ask anybody any more. Once it is known that every peer let go, memory is
// freed; before, or when one did not, it must stay mapped, for it may still be written.
void EngineCore::keep_until_the_end(std::optional<mem::SharedMemory> memory) {
  if (!memory || memory->data() == nullptr || let_go_.load()) return;
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(*memory));
}

}  // namespace crossdock::transfer::detail
