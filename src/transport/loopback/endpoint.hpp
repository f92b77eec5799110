// The endpoint of an engine with itself: plain copies through a shared CopyRail. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "transport/copy_rail.hpp"

namespace crossdock::transport::loopback {

class LoopbackEndpoint final : public Endpoint, private SliceCopier {
 public:
  explicit LoopbackEndpoint(CopyRail& rail) : port_(rail, *this) {}

  Result<> post(Shard& shard) override { return port_.post(shard); }
  void cancel(const Shard& shard) override { port_.cancel(shard); }
  void sever(const Error& why) override { port_.sever(why); }
  Result<RemoteAccess> attach(const RemoteRegion&) override { return RemoteAccess{}; }
  void detach(const RemoteRegion&) override {}
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept override {
    return port_.queued_bytes();
  }

 private:
  std::optional<Error> check(const Shard& shard) noexcept override;
  std::uint32_t copy(const Shard& shard, std::uint32_t first, std::uint32_t end,
                     std::optional<Error>& error) noexcept override;

  CopyPort port_;
};

}  // namespace crossdock::transport::loopback
