// File descriptors between processes of one host, over Unix sockets (SCM_RIGHTS): how allocations
// of the virtual memory management and shared segments travel. Sockets keep message boundaries, are
// non-blocking and close-on-exec; names are abstract, so nothing is left in the file system. Only
// processes of the same user are accepted. Stateless; every wait has a deadline.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "base/fd.hpp"

namespace crossdock::cuda {

inline constexpr std::size_t kMaxFdsPerMessage = 128;
inline constexpr std::size_t kMaxFdPayloadBytes = 32768;

struct FdMessage {
  std::vector<std::byte> payload;
  std::vector<base::UniqueFd> fds;
};

// A connected pair, for a parent and its child.
Result<std::pair<base::UniqueFd, base::UniqueFd>> local_socket_pair();

// `name` is at most 100 bytes; make it unguessable where several users share a host.
Result<base::UniqueFd> listen_local(const std::string& name, int backlog = 64);
Result<base::UniqueFd> accept_local(int listener, Deadline deadline);
// kUnreachable when nobody listens under this name.
Result<base::UniqueFd> connect_local(const std::string& name, Deadline deadline);

// The receiver gets descriptors of its own; the sender keeps and closes its. The payload has at
// least one byte. kPeerLost when the other end is closed.
Result<void> send_fds(int socket, std::span<const int> fds, std::span<const std::byte> payload,
                      Deadline deadline);
Result<FdMessage> receive_fds(int socket, Deadline deadline);

}  // namespace crossdock::cuda
