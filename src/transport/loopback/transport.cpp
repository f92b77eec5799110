// See transport.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/loopback/transport.hpp"

#include <fmt/format.h>

#include "transport/loopback/endpoint.hpp"

namespace crossdock::transport {
namespace loopback {

LoopbackTransport::LoopbackTransport(const TransportContext& context, LoopbackOptions options)
    : instance_(context.instance), options_(std::move(options)) {
  for (std::uint32_t i = 0; i < options_.rails; ++i) {
    CopyRailOptions rail = options_.rail;
    rail.name = fmt::format("{}-{}", options_.rail.name, i);
    rails_.push_back(std::make_unique<CopyRail>(std::move(rail)));
  }
}

// The address of a region is all that this process needs.
std::string LoopbackTransport::export_region(const mem::RegionRecord&) const {
  return {};
}

Result<> LoopbackTransport::reaches(const PeerInfo& peer) {
  if (peer.instance == instance_) return {};
  return make_error(
      Code::kUnreachable,
      fmt::format("loopback reaches only the engine itself; peer '{}' is another one", peer.name));
}

std::uint32_t LoopbackTransport::num_rails() const noexcept {
  return options_.rails;
}

Result<std::unique_ptr<Endpoint>> LoopbackTransport::connect(const PeerInfo& peer,
                                                             std::uint32_t rail, Deadline) {
  CROSSDOCK_CHECK_OK(reaches(peer));
  return std::unique_ptr<Endpoint>(std::make_unique<LoopbackEndpoint>(*rails_[rail]));
}

bool LoopbackTransport::sever_inbound(std::uint64_t) {
  return false;
}

std::uint64_t LoopbackTransport::inline_bytes() const noexcept {
  return options_.rail.inline_bytes;
}

}  // namespace loopback

std::unique_ptr<Transport> make_loopback(const TransportContext& context, LoopbackOptions options) {
  return std::make_unique<loopback::LoopbackTransport>(context, std::move(options));
}

}  // namespace crossdock::transport
