// Proof that a peer is a certain process of this host, for a transport that will touch that
// process's memory. An IP address proves nothing; what counts is that both sit in one boot and PID
// namespace and that the process holds the token which the peer told:
//
//   peer: memfd with a random token ── address (fd number, inode, token) ──> handshake ──> here
//   here: pidfd of the PID; start time; /proc/<pid>/fd/<number> is that memfd and holds the token
//
// Stateless functions and two owners of descriptors; thread-compatible. Never signals a process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <crossdock/core/result.hpp>

#include "base/fd.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport::shm {

// A memfd as another process names it. Numbers from a peer: checked before anything is mapped.
struct MemfdName {
  std::uint32_t fd = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
};

// This process's side of the proof: the memfd with the token.
class ControlBlock {
 public:
  static constexpr std::size_t kTokenBytes = 32;
  using Token = std::array<std::byte, kTokenBytes>;

  static Result<ControlBlock> create();
  // What Transport::local_address() tells.
  [[nodiscard]] const std::string& address() const noexcept { return address_; }

 private:
  base::UniqueFd fd_;
  std::string address_;
};

// The name of an open memfd of this process.
Result<MemfdName> name_memfd(int fd);

// Opens the memfd that process `pid` holds, for reading or also for writing, and returns it when it
// is the one named and bears all of `seals`. kUnreachable: the system does not let this process
// look; kDenied: it is something else than the peer said.
struct OpenMemfd {
  std::uint32_t pid = 0;
  MemfdName name;
  bool writable = false;
  int seals = 0;
};
Result<base::UniqueFd> open_memfd(const OpenMemfd& what);

// In clock ticks since boot. kPeerLost when there is no such process.
Result<std::uint64_t> process_start_time(std::uint32_t pid);

// The pidfd of the peer, when everything above holds; kUnreachable says what does not.
Result<base::UniqueFd> prove_peer(const HostIdentity& self, const PeerInfo& peer);

}  // namespace crossdock::transport::shm
