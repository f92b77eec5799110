// TcpEndpoint: the contract's endpoint on one outbound data lane. Thread-safe as the contract says;
// all work is the lane's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "transport/tcp/lane_out.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport::tcp {

class TcpEndpoint final : public Endpoint {
 public:
  explicit TcpEndpoint(std::shared_ptr<LaneOut> lane) : lane_(std::move(lane)) {}
  ~TcpEndpoint() override { lane_->close(); }

  Result<> post(Shard& shard) override { return lane_->post(shard); }
  void cancel(const Shard&) override { lane_->cancel(); }
  void sever(const Error& why) override { lane_->sever(why); }
  // The target checks every address itself: nothing is to be exchanged.
  Result<RemoteAccess> attach(const RemoteRegion&) override { return RemoteAccess{}; }
  void detach(const RemoteRegion&) override {}
  [[nodiscard]] std::uint64_t queued_bytes() const noexcept override {
    return lane_->queued_bytes();
  }

 private:
  std::shared_ptr<LaneOut> lane_;  // shared with its worker
};

}  // namespace crossdock::transport::tcp
