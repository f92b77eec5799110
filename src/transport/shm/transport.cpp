// See transport.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/transport.hpp"

#include <fmt/format.h>

#include "transport/shm/endpoint.hpp"

namespace crossdock::transport {
namespace shm {

ShmTransport::ShmTransport(const TransportContext& context, ShmOptions options,
                           ControlBlock control)
    : host_(context.host),
      slot_(context.slot),
      options_(std::move(options)),
      control_(std::move(control)) {
  for (std::uint32_t i = 0; i < options_.rails; ++i) {
    CopyRailOptions rail = options_.rail;
    rail.name = fmt::format("{}-{}", options_.rail.name, i);
    rails_.push_back(std::make_unique<CopyRail>(std::move(rail)));
  }
}

std::string ShmTransport::export_region(const mem::RegionRecord& region) const {
  return encode_key(region);
}

Result<> ShmTransport::reaches(const PeerInfo& peer) {
  CROSSDOCK_TRY(pidfd, prove_peer(host_, peer));
  return {};
}

std::uint32_t ShmTransport::num_rails() const noexcept {
  return options_.rails;
}

Result<std::shared_ptr<PeerProcess>> ShmTransport::process_of(const PeerInfo& peer) {
  // Proved anew for each endpoint: what was true of an instance before need not be now.
  CROSSDOCK_TRY(pidfd, prove_peer(host_, peer));
  const std::lock_guard lock(mutex_);
  std::erase_if(processes_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto known = processes_.find(peer.instance); known != processes_.end())
    if (auto process = known->second.lock();
        process != nullptr && process->pid() == peer.host.pid && process->alive())
      return process;
  auto process =
      std::make_shared<PeerProcess>(peer.name, peer.host.pid, std::move(pidfd), options_.populate);
  processes_[peer.instance] = process;
  return process;
}

Result<std::unique_ptr<Endpoint>> ShmTransport::connect(const PeerInfo& peer, std::uint32_t rail,
                                                        Deadline) {
  CROSSDOCK_TRY(process, process_of(peer));
  return std::unique_ptr<Endpoint>(
      std::make_unique<ShmEndpoint>(*rails_[rail], std::move(process), slot_, options_.copy));
}

bool ShmTransport::sever_inbound(std::uint64_t) {
  return false;
}

std::uint64_t ShmTransport::inline_bytes() const noexcept {
  return options_.rail.inline_bytes;
}

}  // namespace shm

Result<std::unique_ptr<Transport>> make_shm(const TransportContext& context, ShmOptions options) {
  CROSSDOCK_TRY(control, shm::ControlBlock::create());
  return std::unique_ptr<Transport>(
      std::make_unique<shm::ShmTransport>(context, std::move(options), std::move(control)));
}

}  // namespace crossdock::transport
