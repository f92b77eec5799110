// loopback: an engine as its own peer. Its memory is at hand, so that a transfer is a copy inside
// the process. Owns the rails (and so the threads) that its endpoints share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "transport/copy_rail.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport {

struct LoopbackOptions {
  std::uint32_t rails = 1;
  CopyRailOptions rail = {.name = "xd-loop"};
};

std::unique_ptr<Transport> make_loopback(const TransportContext& context, LoopbackOptions options);

namespace loopback {

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(const TransportContext& context, LoopbackOptions options);

  [[nodiscard]] std::string_view name() const noexcept override { return "loopback"; }
  [[nodiscard]] std::string local_address() const override { return {}; }
  [[nodiscard]] std::string export_region(const mem::RegionRecord& region) const override;
  [[nodiscard]] Result<> reaches(const PeerInfo& peer) override;
  [[nodiscard]] std::uint32_t num_rails() const noexcept override;
  Result<std::unique_ptr<Endpoint>> connect(const PeerInfo& peer, std::uint32_t rail,
                                            Deadline deadline) override;
  // False: the endpoints of this same engine do the copying, and it must say when they stopped.
  bool sever_inbound(std::uint64_t session) override;
  [[nodiscard]] std::uint64_t inline_bytes() const noexcept override;

 private:
  const std::uint64_t instance_;
  const LoopbackOptions options_;
  std::vector<std::unique_ptr<CopyRail>> rails_;
};

}  // namespace loopback
}  // namespace crossdock::transport
