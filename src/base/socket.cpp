// Stream sockets with deadlines. Waiting is poll() on one descriptor; no state.
// SPDX-License-Identifier: Apache-2.0
#include "base/socket.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

namespace crossdock::base {
namespace {

Error deadline_error(std::string message) {
  return Error{.code = Code::kDeadline, .retry = Retry::kLater, .message = std::move(message)};
}

Error lost_error(std::string message) {
  return Error{.code = Code::kPeerLost,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = std::move(message)};
}

Error address_error(int error_number, const char* what, const SocketAddress& address) {
  return errno_error(error_number, fmt::format("{} {}", what, address.to_string()));
}

Result<UniqueFd> stream_socket(const SocketAddress& address) {
  UniqueFd fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return address_error(errno, "make a socket for", address);
  return fd;
}

void set_flag(int fd, int level, int name, int value) {
  // Only tuning; a kernel that refuses leaves a working socket.
  (void)::setsockopt(fd, level, name, &value, sizeof value);
}

void tune(int fd, int family) {
  if (family == AF_INET || family == AF_INET6) set_flag(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

// A connect to a port of this host that nobody listens on can be given that very port as its own
// and then "succeed" by talking to itself.
bool connected_to_itself(int fd) {
  const auto local = local_address(fd);
  const auto peer = peer_address(fd);
  return local.ok() && peer.ok() && local.value() == peer.value();
}

Result<> finish_connect(int fd, const SocketAddress& address, Deadline deadline, int interrupt) {
  CROSSDOCK_TRY(ready, wait_ready(fd, POLLOUT, deadline, interrupt));
  if (!ready) return deadline_error("connect to " + address.to_string() + ": no answer in time");
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error == 0) return {};
  Error failure = address_error(error, "connect to", address);
  // The kernel's patience is over, not the caller's.
  if (error == ETIMEDOUT) failure.code = Code::kUnreachable;
  return failure;
}

// Building the text makes system calls of its own, so errno is taken before.
Error peer_errno_error(int error_number, const char* what, int fd) {
  Error error = errno_error(error_number, fmt::format("{} {}", what, peer_name(fd)));
  error.scope = Scope::kPeer;
  // The other end has not answered for so long that the kernel gave it up: see bound_silence().
  if (error_number == ETIMEDOUT) error.code = Code::kPeerLost;
  return error;
}

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

}  // namespace

std::string peer_name(int fd) {
  const auto peer = peer_address(fd);
  return peer.ok() ? peer->to_string() : "a closed connection";
}

void bound_silence(int fd, std::chrono::nanoseconds silence) {
  const auto ms = std::clamp<std::chrono::nanoseconds>(silence, std::chrono::seconds(1),
                                                       std::chrono::hours(24)) /
                  std::chrono::milliseconds(1);
  const auto probe_s = static_cast<int>(std::max<std::int64_t>(ms / 3000, 1));
  set_flag(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_flag(fd, IPPROTO_TCP, TCP_KEEPIDLE, probe_s);
  set_flag(fd, IPPROTO_TCP, TCP_KEEPINTVL, probe_s);
  set_flag(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_flag(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(ms));
}

Result<bool> wait_ready(int fd, short events, Deadline deadline, int interrupt) {
  for (;;) {
    // poll() passes over a descriptor of -1.
    std::array<pollfd, 2> items{pollfd{.fd = fd, .events = events, .revents = 0},
                                pollfd{.fd = interrupt, .events = POLLIN, .revents = 0}};
    const int n = ::poll(items.data(), items.size(), deadline.remaining_ms());
    if (n > 0 && items[1].revents != 0)
      return make_error(Code::kClosed, "the wait was cut short by the end of its owner");
    if (n > 0) return true;
    if (n == 0 && deadline.passed()) return false;
    if (n < 0 && errno != EINTR) return errno_error(errno, "poll a socket");
  }
}

Result<UniqueFd> connect_tcp(const SocketAddress& address, Deadline deadline,
                             const SocketAddress* local, int interrupt) {
  CROSSDOCK_TRY(fd, stream_socket(address));
  tune(fd.get(), address.family());
  if (local != nullptr && ::bind(fd.get(), local->get(), local->size()) != 0)
    return address_error(errno, "bind the local end to", *local);
  if (::connect(fd.get(), address.get(), address.size()) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) return address_error(errno, "connect to", address);
    CROSSDOCK_CHECK_OK(finish_connect(fd.get(), address, deadline, interrupt));
  }
  if (connected_to_itself(fd.get())) return address_error(ECONNREFUSED, "connect to", address);
  return fd;
}

Result<UniqueFd> connect_tcp(const HostPort& address, Deadline deadline, int interrupt) {
  CROSSDOCK_TRY(candidates, resolve(address, deadline));
  std::optional<Error> first_error;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const auto share = deadline.remaining() / static_cast<int>(candidates.size() - i);
    Result<UniqueFd> fd =
        connect_tcp(candidates[i], earlier(Deadline::in(share), deadline), nullptr, interrupt);
    if (fd.ok() || fd.code() == Code::kClosed) return fd;
    if (!first_error) first_error = std::move(fd).error();
  }
  return *first_error;
}

Result<Listener> listen_tcp(const SocketAddress& address, int backlog) {
  CROSSDOCK_TRY(fd, stream_socket(address));
  // Lets a restarted server have its port back while old connections linger; on Linux it never
  // lets two listeners share one. Not with port 0: the kernel shall pick a port nobody holds.
  if (address.port() != 0) set_flag(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family() == AF_INET6)
    set_flag(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, address.is_any() ? 0 : 1);
  if (::bind(fd.get(), address.get(), address.size()) != 0 || ::listen(fd.get(), backlog) != 0)
    return address_error(errno, "listen on", address);
  // Accepted connections inherit it: theirs too must not keep a successor from the port. Not before
  // listen(): until then the kernel could give a port it picked to two that allow reuse.
  set_flag(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  CROSSDOCK_TRY(bound, local_address(fd.get()));
  return Listener{std::move(fd), bound};
}

// Connecting a datagram socket only looks up the route. The destinations are reserved for examples.
Result<SocketAddress> outgoing_address(int family) {
  const HostPort far{family == AF_INET6 ? "2001:db8::1" : "203.0.113.1", 9};
  CROSSDOCK_TRY(to, resolve(far, Deadline::in(std::chrono::seconds(1)), {.numeric_only = true}));
  const UniqueFd fd(::socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd) return errno_error(errno, "socket to look up the way out");
  if (::connect(fd.get(), to.front().get(), to.front().size()) != 0)
    return address_error(errno, "look up the way to", to.front());
  CROSSDOCK_TRY(from, local_address(fd.get()));
  from.set_port(0);
  return from;
}

Result<Listener> listen_tcp(const HostPort& address, Deadline deadline, int backlog) {
  CROSSDOCK_TRY(candidates, resolve(address, deadline));
  std::optional<Error> first_error;
  for (const SocketAddress& candidate : candidates) {
    Result<Listener> listener = listen_tcp(candidate, backlog);
    if (listener.ok()) return listener;
    const bool foreign = listener.error().native.value == EADDRNOTAVAIL;
    if (!first_error) first_error = std::move(listener).error();
    if (!foreign) break;
  }
  return *first_error;
}

Result<std::optional<UniqueFd>> accept_tcp(int listener_fd) {
  for (;;) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    const int fd = ::accept4(listener_fd, reinterpret_cast<sockaddr*>(&peer), &size,
                             SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      tune(fd, peer.ss_family);
      return std::optional<UniqueFd>(UniqueFd(fd));
    }
    const int error = errno;
    if (error == EINTR) continue;
    // Errors of the connection that was waiting, not of the listener (accept(2)).
    const bool passing = error == ECONNABORTED || error == EPROTO || error == ENETDOWN ||
                         error == EHOSTUNREACH || error == ENETUNREACH;
    if (would_block(error) || passing) return std::optional<UniqueFd>{};
    return errno_error(error, "accept a connection");
  }
}

Result<std::optional<std::size_t>> recv_now(int fd, std::span<std::byte> out) {
  for (;;) {
    const ssize_t n = ::recv(fd, out.data(), out.size(), MSG_DONTWAIT);
    if (n >= 0) return std::optional<std::size_t>(static_cast<std::size_t>(n));
    if (errno == EINTR) continue;
    if (would_block(errno)) return std::optional<std::size_t>{};
    return peer_errno_error(errno, "receive from", fd);
  }
}

Result<std::size_t> send_now(int fd, std::span<const std::byte> bytes) {
  for (;;) {
    const ssize_t n = ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) return static_cast<std::size_t>(n);
    if (errno == EINTR) continue;
    if (would_block(errno)) return std::size_t{0};
    return peer_errno_error(errno, "send to", fd);
  }
}

Result<> send_all(int fd, std::span<const std::byte> bytes, Deadline deadline, int interrupt) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    CROSSDOCK_TRY(n, send_now(fd, bytes.subspan(done)));
    done += n;
    if (n != 0) continue;
    CROSSDOCK_TRY(ready, wait_ready(fd, POLLOUT, deadline, interrupt));
    if (!ready)
      return deadline_error(
          fmt::format("{} took only {} of {} bytes in time", peer_name(fd), done, bytes.size()));
  }
  return {};
}

Result<std::size_t> recv_some(int fd, std::span<std::byte> out, Deadline deadline, int interrupt) {
  for (;;) {
    CROSSDOCK_TRY(n, recv_now(fd, out));
    if (n) return *n;
    CROSSDOCK_TRY(ready, wait_ready(fd, POLLIN, deadline, interrupt));
    if (!ready) return deadline_error(fmt::format("{} sent nothing in time", peer_name(fd)));
  }
}

Result<> recv_exact(int fd, std::span<std::byte> out, Deadline deadline) {
  std::size_t done = 0;
  while (done < out.size()) {
    CROSSDOCK_TRY(n, recv_now(fd, out.subspan(done)));
    if (n && *n == 0)
      return lost_error(fmt::format("{} closed the connection after {} of {} bytes", peer_name(fd),
                                    done, out.size()));
    if (n) {
      done += *n;
      continue;
    }
    CROSSDOCK_TRY(ready, wait_ready(fd, POLLIN, deadline));
    if (!ready)
      return deadline_error(
          fmt::format("{} sent only {} of {} bytes in time", peer_name(fd), done, out.size()));
  }
  return {};
}

}  // namespace crossdock::base
