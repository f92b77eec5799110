// See transport.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/transport.hpp"

#include <fmt/format.h>

#include "transport/faulty/endpoint.hpp"

namespace crossdock::transport {
namespace faulty {

FaultyTransport::FaultyTransport(std::unique_ptr<Transport> inner,
                                 std::unique_ptr<base::EventLoop> timer,
                                 const FaultyOptions& options)
    : options_(options),
      inner_(std::move(inner)),
      name_(fmt::format("faulty+{}", inner_->name())),
      timer_(std::move(timer)) {}

Result<std::unique_ptr<Endpoint>> FaultyTransport::connect(const PeerInfo& peer, std::uint32_t rail,
                                                           Deadline deadline) {
  CROSSDOCK_TRY(inner, inner_->connect(peer, rail, deadline));
  FaultyOptions options = options_;
  options.seed += connections_.fetch_add(1);
  return std::unique_ptr<Endpoint>(
      std::make_unique<FaultyEndpoint>(std::move(inner), *timer_, options));
}

std::uint64_t FaultyTransport::inline_bytes() const noexcept {
  return options_.delay_max.count() > 0 ? 0 : inner_->inline_bytes();
}

}  // namespace faulty

Result<std::unique_ptr<Transport>> make_faulty(std::unique_ptr<Transport> inner,
                                               const FaultyOptions& options) {
  CROSSDOCK_TRY(timer, base::EventLoop::create("xd-faulty"));
  return std::unique_ptr<Transport>(
      std::make_unique<faulty::FaultyTransport>(std::move(inner), std::move(timer), options));
}

}  // namespace crossdock::transport
