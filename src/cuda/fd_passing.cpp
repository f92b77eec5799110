// SCM_RIGHTS messages and the sockets for them. See fd_passing.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/fd_passing.hpp"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

#include "base/socket.hpp"

namespace crossdock::cuda {
namespace {

using base::UniqueFd;

constexpr int kSocketFlags = SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr std::size_t kMaxNameBytes = 100;

struct LocalAddress {
  sockaddr_un address{};
  socklen_t size = 0;
};

Result<LocalAddress> local_address(const std::string& name) {
  if (name.empty() || name.size() > kMaxNameBytes)
    return invalid_argument(fmt::format("local socket name of {} bytes: must have 1 to {} bytes",
                                        name.size(), kMaxNameBytes));
  LocalAddress result;
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());  // byte 0 stays 0: abstract
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

Result<UniqueFd> local_socket() {
  UniqueFd fd(::socket(AF_UNIX, kSocketFlags, 0));
  if (!fd) return errno_error(errno, "create a Unix socket");
  return fd;
}

Result<void> wait_until(int fd, short events, Deadline deadline, const char* what) {
  CROSSDOCK_TRY(ready, base::wait_ready(fd, events, deadline));
  if (ready) return {};
  return make_error(Code::kDeadline,
                    fmt::format("{}: the other process did not answer in time", what));
}

Result<void> check_same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
    return errno_error(errno, "ask who is at the other end of a Unix socket");
  if (peer.uid == ::geteuid()) return {};
  return make_error(Code::kDenied, fmt::format("process {} of user {} connected; only user {} may: "
                                               "run all ranks of a host as one user",
                                               peer.pid, peer.uid, ::geteuid()));
}

// Descriptors of a received message, owned from here on, whatever else is wrong with it.
std::vector<UniqueFd> take_fds(msghdr& message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      fds.emplace_back(fd);
    }
  }
  return fds;
}

Error lost() {
  return Error{.code = Code::kPeerLost,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = "the process at the other end of a Unix socket closed it"};
}

// False: would block.
Result<bool> try_send(int socket, const msghdr& message) {
  for (;;) {
    if (::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return true;
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == ENOBUFS) return false;
    if (errno == EPIPE || errno == ECONNRESET) return lost();
    if (errno == ETOOMANYREFS)
      return errno_error(errno, "send descriptors (too many are in flight: ulimit -n)");
    return errno_error(errno, "send descriptors");
  }
}

}  // namespace

Result<std::pair<UniqueFd, UniqueFd>> local_socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, kSocketFlags, 0, fds) != 0)
    return errno_error(errno, "create a pair of Unix sockets");
  return std::pair(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

Result<UniqueFd> listen_local(const std::string& name, int backlog) {
  CROSSDOCK_TRY(local, local_address(name));
  CROSSDOCK_TRY(fd, local_socket());
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&local.address), local.size) != 0)
    return errno_error(errno, fmt::format("bind the local socket name {}", name));
  if (::listen(fd.get(), backlog) != 0)
    return errno_error(errno, fmt::format("listen on the local socket name {}", name));
  return fd;
}

Result<UniqueFd> accept_local(int listener, Deadline deadline) {
  for (;;) {
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      CROSSDOCK_CHECK_OK(check_same_user(fd.get()));
      return fd;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN) return errno_error(errno, "accept a local connection");
    CROSSDOCK_CHECK_OK(wait_until(listener, POLLIN, deadline, "accept a local connection"));
  }
}

Result<UniqueFd> connect_local(const std::string& name, Deadline deadline) {
  CROSSDOCK_TRY(local, local_address(name));
  CROSSDOCK_TRY(fd, local_socket());
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&local.address), local.size) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN)
      return errno_error(errno, fmt::format("connect to the local name {}", name));
    // The listener's queue is full; there is nothing to poll for, so ask again.
    if (deadline.passed())
      return make_error(Code::kDeadline,
                        fmt::format("connect to the local name {}: its queue stayed full", name));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CROSSDOCK_CHECK_OK(check_same_user(fd.get()));
  return fd;
}

Result<void> send_fds(int socket, std::span<const int> fds, std::span<const std::byte> payload,
                      Deadline deadline) {
  if (fds.size() > kMaxFdsPerMessage)
    return invalid_argument(
        fmt::format("{} descriptors in one message: at most {}", fds.size(), kMaxFdsPerMessage));
  if (payload.empty() || payload.size() > kMaxFdPayloadBytes)
    return invalid_argument(fmt::format("descriptor message with {} payload bytes: 1 to {}",
                                        payload.size(), kMaxFdPayloadBytes));
  iovec part{const_cast<std::byte*>(payload.data()), payload.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFdsPerMessage * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* const c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
  }
  for (;;) {
    CROSSDOCK_TRY(sent, try_send(socket, message));
    if (sent) return {};
    CROSSDOCK_CHECK_OK(wait_until(socket, POLLOUT, deadline, "send descriptors"));
  }
}

Result<FdMessage> receive_fds(int socket, Deadline deadline) {
  FdMessage result;
  result.payload.resize(kMaxFdPayloadBytes);
  iovec part{result.payload.data(), result.payload.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFdsPerMessage * sizeof(int))];
  for (;;) {
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got > 0) {
      result.fds = take_fds(message);
      if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        return make_error(Code::kIncompatible,
                          "a descriptor message was longer than both sides agreed, or this process "
                          "is out of descriptors (ulimit -n)");
      result.payload.resize(static_cast<std::size_t>(got));
      return result;
    }
    if (got == 0 || errno == ECONNRESET) return lost();
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return errno_error(errno, "receive descriptors");
    CROSSDOCK_CHECK_OK(wait_until(socket, POLLIN, deadline, "receive descriptors"));
  }
}

}  // namespace crossdock::cuda
