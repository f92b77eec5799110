// See socket_io.hpp. SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/socket_io.hpp"

#include <algorithm>
#include <cerrno>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace crossdock::transport::tcp {
namespace {

msghdr message_of(std::span<iovec> pieces) noexcept {
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = std::min(pieces.size(), kMaxIov);
  return message;
}

// TSan orders a send before the receive that got its bytes, but books the send's reads of the
// payload after it: a buffer that is reused once the answer is there would look like a race when
// both ends live in one process, as in tests. So under TSan an empty send tells the order, and the
// real one is not seen.
ssize_t send_message(int fd, const msghdr* message, int flags) noexcept {
#ifdef CROSSDOCK_SANITIZE_THREAD
  const msghdr nothing{};
  if (::sendmsg(fd, &nothing, flags) < 0) return -1;
  return ::syscall(SYS_sendmsg, fd, message, flags);
#else
  return ::sendmsg(fd, message, flags);
#endif
}

IoResult failed(int error) noexcept {
  if (error == EAGAIN || error == EWOULDBLOCK) return {Io::kWouldBlock, 0, 0};
  return {Io::kFailed, 0, error};
}

}  // namespace

IoResult send_pieces(int fd, std::span<iovec> pieces) noexcept {
  const msghdr message = message_of(pieces);
  for (;;) {
    const ssize_t n = send_message(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) return {Io::kProgress, static_cast<std::size_t>(n), 0};
    if (errno != EINTR) return failed(errno);
  }
}

IoResult receive_pieces(int fd, std::span<iovec> pieces) noexcept {
  msghdr message = message_of(pieces);
  for (;;) {
    const ssize_t n = ::recvmsg(fd, &message, MSG_DONTWAIT);
    if (n > 0) return {Io::kProgress, static_cast<std::size_t>(n), 0};
    if (n == 0) return {Io::kClosed, 0, 0};
    if (errno != EINTR) return failed(errno);
  }
}

bool connection_over(int fd) noexcept {
  pollfd p{.fd = fd, .events = POLLRDHUP, .revents = 0};
  return ::poll(&p, 1, 0) > 0 && (p.revents & (POLLERR | POLLHUP | POLLRDHUP | POLLNVAL)) != 0;
}

void abort_connection(base::UniqueFd& fd) noexcept {
  if (!fd) return;
  const linger now{.l_onoff = 1, .l_linger = 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  fd.reset();
}

void tune_lane(int fd, std::uint32_t socket_buffer) noexcept {
  // Failures are harmless: unit tests run lanes over sockets that are not TCP.
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (socket_buffer == 0) return;
  const auto bytes = static_cast<int>(std::min<std::uint32_t>(socket_buffer, 1u << 30));
  ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

}  // namespace crossdock::transport::tcp
