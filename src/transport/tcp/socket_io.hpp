// The system calls of a data lane, each tried once and never waiting: gather send, scatter receive,
// "is it reset", abort. Stateless; a descriptor is used by one thread per direction at a time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <sys/uio.h>

#include "base/fd.hpp"

namespace crossdock::transport::tcp {

// The most pieces one sendmsg() or recvmsg() takes (UIO_MAXIOV).
inline constexpr std::size_t kMaxIov = 1024;

enum class Io : std::uint8_t { kProgress, kWouldBlock, kClosed, kFailed };

struct IoResult {
  Io status = Io::kWouldBlock;
  std::size_t bytes = 0;
  int error = 0;  // errno, when kFailed
};

IoResult send_pieces(int fd, std::span<iovec> pieces) noexcept;
// kClosed: the peer ended the stream in order.
IoResult receive_pieces(int fd, std::span<iovec> pieces) noexcept;

// Whether the connection was reset or ended by the peer, even while received bytes still wait in
// the socket: the kernel hands those out before it reports the reset.
bool connection_over(int fd) noexcept;

// Closes so that the peer sees a reset and nothing that was queued is delivered.
void abort_connection(base::UniqueFd& fd) noexcept;

// No delay for small frames; buffer sizes when `socket_buffer` is not 0.
void tune_lane(int fd, std::uint32_t socket_buffer) noexcept;

}  // namespace crossdock::transport::tcp
