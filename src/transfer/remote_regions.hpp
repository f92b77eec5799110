// What a peer registered, as it told us: looked up by address for every request, updated by the
// control loop. Lookups copy a snapshot pointer. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "transport/transport.hpp"
#include "wire/control.hpp"

namespace crossdock::transfer::detail {

using RemoteRegionPtr = std::shared_ptr<transport::RemoteRegion>;

class RemoteRegions {
 public:
  // Of one peer: whoever announces more would fill our memory.
  static constexpr std::size_t kMost = 1u << 20;
  explicit RemoteRegions(std::size_t most = kMost) : most_(most) {}

  using Snapshot = std::vector<RemoteRegionPtr>;  // sorted by address

  // Adds regions with ids that were never told before: an engine counts upwards. kCorrupt when that
  // is not so, or when they overlap what is there: the peer lies.
  Result<> add(const std::vector<wire::RegionEntry>& entries,
               const std::vector<wire::TransportOffer>& offers);
  // Takes regions out of the lookup and marks them revoked; empty `ids` means all. Returns them.
  std::vector<RemoteRegionPtr> revoke(const std::vector<std::uint32_t>& ids);
  [[nodiscard]] std::shared_ptr<const Snapshot> snapshot() const;
  // Waits until a region has that label, `gone()` turns true, or the deadline.
  RemoteRegionPtr wait_for(std::string_view label, Deadline deadline,
                           const std::function<bool()>& gone);
  void wake();

 private:
  const std::size_t most_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const Snapshot> snapshot_ = std::make_shared<Snapshot>();
  std::uint64_t ids_end_ = 0;  // above every id so far, of regions that are gone, too
};

// The region of a snapshot that holds `address`, or null. O(log n).
const RemoteRegionPtr* find_remote(const RemoteRegions::Snapshot& snapshot,
                                   std::uint64_t address) noexcept;

}  // namespace crossdock::transfer::detail
