// The registered memory of one engine: which address ranges, who may touch them, who does now.
//
// A lease is taken for each transfer and each inbound request that uses a region, and given back
// when it no longer touches the memory; a region with leases is not released. Lookups take a
// snapshot, so they never wait for a registration in progress. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <crossdock/core/result.hpp>
#include <crossdock/transfer/types.hpp>

namespace crossdock::mem {

using RegionId = std::uint32_t;  // never reused within an engine

// Where the bytes of a region come from, as far as a transport can profit from it.
struct Backing {
  int memfd = -1;  // a memfd that holds the region from `offset`, or -1
  std::uint64_t offset = 0;
};

struct RegionRecord {
  RegionId id = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  transfer::Access access = transfer::Access::kRemoteReadWrite;
  std::string label;
  Backing backing;
  std::atomic<std::uint32_t> leases{0};
  std::atomic<bool> closing{false};  // refuses new leases
  // A read of it faulted: its owner unmapped some of it. Whoever reads looks first.
  mutable std::atomic<bool> torn{false};
  bool released = false;  // of the table alone, under its mutex

  [[nodiscard]] bool contains(std::uint64_t addr, std::uint64_t bytes) const noexcept {
    return addr >= address && bytes <= length && addr - address <= length - bytes;
  }
};

// Holds one lease; gives it back when destroyed.
class Lease {
 public:
  Lease() = default;
  explicit Lease(std::shared_ptr<RegionRecord> region) : region_(std::move(region)) {}
  Lease(Lease&& other) noexcept : region_(std::move(other.region_)) {}
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { reset(); }
  void reset();
  [[nodiscard]] const RegionRecord* region() const noexcept { return region_.get(); }
  explicit operator bool() const noexcept { return region_ != nullptr; }

 private:
  std::shared_ptr<RegionRecord> region_;
};

struct NewRegion {
  void* address = nullptr;
  std::size_t length = 0;
  Backing backing = {};
};

class RegionTable {
 public:
  using Snapshot = std::vector<std::shared_ptr<RegionRecord>>;  // sorted by address, disjoint

  // All or none. kInvalidArgument for null, zero length, wrap-around, overlap (with each other or
  // with a registered region); the message names both ranges.
  Result<std::vector<std::shared_ptr<RegionRecord>>> add(std::span<const NewRegion> regions,
                                                         const transfer::RegionOptions& options);
  // No new leases from now on; existing ones go on.
  void begin_release(RegionRecord& region);
  // Takes the region out; false when that was done before. kBusy while leased. Precondition:
  // begin_release() was called.
  Result<bool> finish_release(RegionRecord& region);

  [[nodiscard]] std::shared_ptr<const Snapshot> snapshot() const;
  // Incremented by every add and finish_release.
  [[nodiscard]] std::uint64_t version() const noexcept;

  // A lease on the region that holds [address, address + length), for an inbound request of a peer.
  // kInvalidArgument (nothing registered there, or past the end), kDenied (access), kClosed (being
  // released). The sentence names the range and the nearest region.
  Result<Lease> lease_inbound(std::uint64_t address, std::uint64_t length, transfer::Op op) const;
  // The same for local use by a transfer of this engine.
  Result<Lease> lease_local(std::uint64_t address, std::uint64_t length) const;

 private:
  Result<Lease> lease(std::uint64_t address, std::uint64_t length) const;
  // The snapshot without what was released since it was made. Precondition: mutex_ is held.
  const std::shared_ptr<const Snapshot>& current() const;

  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Snapshot> snapshot_ = std::make_shared<Snapshot>();
  mutable bool stale_ = false;  // snapshot_ still holds released regions
  std::uint64_t version_ = 0;
  RegionId next_id_ = 1;
};

// The region of a snapshot that holds `address`, or null. O(log n).
const std::shared_ptr<RegionRecord>* find_region(const RegionTable::Snapshot& snapshot,
                                                 std::uint64_t address) noexcept;

}  // namespace crossdock::mem
