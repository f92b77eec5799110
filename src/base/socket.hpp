// Stream sockets with deadlines: connect, listen, accept, send, receive. Every descriptor made here
// is non-blocking and close-on-exec, no call raises SIGPIPE, none waits beyond its deadline, and
// every error names the address it is about. Stateless; a descriptor must not be used by two
// threads for the same direction at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "base/address.hpp"
#include "base/fd.hpp"

namespace crossdock::base {

// `interrupt`, where a call takes one, is a descriptor (an eventfd) that cuts the wait short with
// kClosed once it is readable.

// Connects to the first address of the host that answers, each getting its share of the time that
// is left. TCP_NODELAY is set. kUnreachable (nobody listens, no route), kDeadline, kNotFound
// (name).
Result<UniqueFd> connect_tcp(const HostPort& address, Deadline deadline, int interrupt = -1);
// The same for one known address; `local`, when given, is bound first (rail choice).
Result<UniqueFd> connect_tcp(const SocketAddress& address, Deadline deadline,
                             const SocketAddress* local = nullptr, int interrupt = -1);

struct Listener {
  UniqueFd fd = {};
  SocketAddress address = {};  // as bound: the port the kernel picked, when 0 was asked for
};

// Binds and listens on exactly this address, once; port 0 lets the kernel pick. Never
// SO_REUSEPORT: two processes must not share a port unnoticed. `[::]` also takes IPv4, any other
// address takes its own family only. kBusy names the address when it is in use.
Result<Listener> listen_tcp(const SocketAddress& address, int backlog = 512);
// Resolves a host first and takes its first address that is of this machine.
Result<Listener> listen_tcp(const HostPort& address, Deadline deadline, int backlog = 512);

// This machine's address on the way to the rest of the world, by the routes of `family` (AF_INET or
// AF_INET6), without a port; no packet is sent. kUnreachable when there is no such way.
Result<SocketAddress> outgoing_address(int family);

// One waiting connection; nothing when there is none (or it went away before it was taken).
// kNoMemory when descriptors ran out: the connection stays queued.
Result<std::optional<UniqueFd>> accept_tcp(int listener_fd);

// Waits until poll() reports one of `events` (or an error condition, which the next call shows).
// False when the deadline passed first.
Result<bool> wait_ready(int fd, short events, Deadline deadline, int interrupt = -1);

// Everything or an error. After an error an unknown part was sent: close the connection.
Result<> send_all(int fd, std::span<const std::byte> bytes, Deadline deadline, int interrupt = -1);
// Fills `out`; kPeerLost when the peer closes first, naming it and how much came.
Result<> recv_exact(int fd, std::span<std::byte> out, Deadline deadline);
// At least one byte; 0 when the peer closed its side.
Result<std::size_t> recv_some(int fd, std::span<std::byte> out, Deadline deadline,
                              int interrupt = -1);

// What is there now, without waiting. 0 when the peer closed; nothing when there is nothing yet.
Result<std::optional<std::size_t>> recv_now(int fd, std::span<std::byte> out);
// How much the socket took now, possibly 0.
Result<std::size_t> send_now(int fd, std::span<const std::byte> bytes);

// Makes the kernel end a TCP connection whose other end does not answer for so long (at least a
// second), whether bytes are under way or not. Best effort.
void bound_silence(int fd, std::chrono::nanoseconds silence);

// "127.0.0.1:7000" of the other end, for messages; "a closed connection" when it is gone.
std::string peer_name(int fd);

}  // namespace crossdock::base
