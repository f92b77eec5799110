// The endpoint of one rail with one peer process. Copies through the transport's rail: plainly
// where the region is mapped, by process_vm calls elsewhere. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "transport/copy_rail.hpp"
#include "transport/shm/peer_process.hpp"

namespace crossdock::transport::shm {

class ShmEndpoint final : public Endpoint, private SliceCopier {
 public:
  ShmEndpoint(CopyRail& rail, std::shared_ptr<PeerProcess> peer, std::size_t slot, CopyMode mode)
      : peer_(std::move(peer)), slot_(slot), mode_(mode), port_(rail, *this) {}
  ~ShmEndpoint() override { peer_->forget(this); }

  Result<> post(Shard& shard) override { return port_.post(shard); }
  void cancel(const Shard& shard) override { port_.cancel(shard); }
  // A copy in progress ends within its window (at most 1 MiB); no other starts.
  void sever(const Error& why) override { port_.sever(why); }
  Result<RemoteAccess> attach(const RemoteRegion& region) override {
    return peer_->attach(region, mode_, this);
  }
  void detach(const RemoteRegion& region) override { peer_->detach(region.id, this); }
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept override {
    return port_.queued_bytes();
  }

 private:
  std::optional<Error> check(const Shard& shard) noexcept override;
  std::uint32_t copy(const Shard& shard, std::uint32_t first, std::uint32_t end,
                     std::optional<Error>& error) noexcept override;
  [[nodiscard]] std::uint64_t window_bytes() const noexcept override { return 1u << 20; }
  [[nodiscard]] std::uint32_t window_slices() const noexcept override;
  // The end of the run of slices from `first` that are reached the same way.
  [[nodiscard]] std::uint32_t run_end(const Shard& shard, std::uint32_t first,
                                      std::uint32_t end) const noexcept;

  const std::shared_ptr<PeerProcess> peer_;
  const std::size_t slot_;
  const CopyMode mode_;
  CopyPort port_;
};

}  // namespace crossdock::transport::shm
