// shm: engines in other processes of this host. Regions that the peer's engine allocated are mapped
// and copied plainly; any other memory goes through process_vm_readv and process_vm_writev. The
// initiator does all the copying, on the rails this transport owns; the peer's CPU does nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/copy_rail.hpp"
#include "transport/shm/identity.hpp"
#include "transport/shm/peer_process.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport {

struct ShmOptions {
  std::uint32_t rails = 1;
  shm::CopyMode copy = shm::CopyMode::kAuto;
  std::chrono::nanoseconds populate = std::chrono::seconds(1);  // for each peer
  CopyRailOptions rail = {.name = "xd-shm"};
};

Result<std::unique_ptr<Transport>> make_shm(const TransportContext& context, ShmOptions options);

namespace shm {

class ShmTransport final : public Transport {
 public:
  ShmTransport(const TransportContext& context, ShmOptions options, ControlBlock control);

  [[nodiscard]] std::string_view name() const noexcept override { return "shm"; }
  [[nodiscard]] std::string local_address() const override { return control_.address(); }
  [[nodiscard]] bool maps_memory() const noexcept override { return true; }
  [[nodiscard]] std::string export_region(const mem::RegionRecord& region) const override;
  [[nodiscard]] Result<> reaches(const PeerInfo& peer) override;
  [[nodiscard]] std::uint32_t num_rails() const noexcept override;
  Result<std::unique_ptr<Endpoint>> connect(const PeerInfo& peer, std::uint32_t rail,
                                            Deadline deadline) override;
  // False: peers copy by themselves, and must say that they stopped, or die.
  bool sever_inbound(std::uint64_t session) override;
  [[nodiscard]] std::uint64_t inline_bytes() const noexcept override;

 private:
  // The endpoints of one peer instance share what is known of its process.
  Result<std::shared_ptr<PeerProcess>> process_of(const PeerInfo& peer);

  const HostIdentity host_;
  const std::size_t slot_;
  const ShmOptions options_;
  const ControlBlock control_;
  std::vector<std::unique_ptr<CopyRail>> rails_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<PeerProcess>> processes_;  // by instance
};

}  // namespace shm
}  // namespace crossdock::transport
