// TcpTransport: reaches every peer over a fixed number of persistent connections, the data lanes,
// which the control port hands over connected and authenticated. It opens and binds nothing itself.
// Its threads start with the first lane. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/log.hpp"
#include "transport/tcp/lane_in.hpp"
#include "transport/tcp/options.hpp"
#include "transport/tcp/worker.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport {

std::unique_ptr<Transport> make_tcp(const TransportContext& context);

namespace tcp {

class TcpTransport final : public Transport {
 public:
  TcpTransport(const TransportContext& context, const TcpOptions& options);
  ~TcpTransport() override;

  [[nodiscard]] std::string_view name() const noexcept override { return "tcp"; }
  [[nodiscard]] std::string local_address() const override { return {}; }
  [[nodiscard]] std::string export_region(const mem::RegionRecord&) const override { return {}; }
  [[nodiscard]] Result<> reaches(const PeerInfo& peer) override;
  [[nodiscard]] std::uint32_t num_rails() const noexcept override { return options_.lanes; }
  Result<std::unique_ptr<Endpoint>> connect(const PeerInfo& peer, std::uint32_t rail,
                                            Deadline deadline) override;
  [[nodiscard]] bool takes_lanes() const noexcept override { return true; }
  Result<> accept(InboundLane lane) override;
  bool sever_inbound(std::uint64_t session) override;
  void retire_lane(std::uint64_t session, std::uint16_t lane) override;

 private:
  // Ends the inbound lanes that `which` names.
  template <class Which>
  void sever_those(Which&& which);
  const TransportContext context_;
  const TcpOptions options_;
  base::Logger log_;
  WorkerPool workers_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<LaneIn>> inbound_;
};

}  // namespace tcp
}  // namespace crossdock::transport
