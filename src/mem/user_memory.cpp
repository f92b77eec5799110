// process_vm_readv() and -writev() on this process copy within one call and check every page. Where
// the system forbids it, a pipe does: slower, and as safe.
// SPDX-License-Identifier: Apache-2.0
#include "mem/user_memory.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <fcntl.h>
#include <unistd.h>

#include "base/fd.hpp"

namespace crossdock::mem {
namespace {

constexpr std::size_t kRanges = 64;  // of one call
constexpr std::uintptr_t kPage = 4096;

bool is_forbidden(int error) noexcept {
  return error == EPERM || error == ENOSYS;
}

struct Pipe {
  base::UniqueFd out, in;
  int error = 0;  // why there is none
  Pipe() noexcept {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      error = errno;
      return;
    }
    out.reset(ends[0]);
    in.reset(ends[1]);
  }
};

// The copies below return the bytes moved, or the negated errno: closing a pipe may change errno.

// One piece of at most what a pipe holds.
ssize_t copy_by_pipe(void* to, const void* from, std::size_t bytes) noexcept {
  const Pipe pipe;
  if (!pipe.in) return -pipe.error;
  ssize_t n = ::write(pipe.in.get(), from, bytes);
  if (n > 0) n = ::read(pipe.out.get(), to, static_cast<std::size_t>(n));
  return n < 0 ? -errno : n;
}

ssize_t store_some(std::span<const iovec> to, std::span<const std::byte> from) noexcept {
  std::array<iovec, kRanges> remote;
  std::size_t count = 0, bytes = 0;
  // Exactly as much as there is: the kernel pins every page that is named.
  for (; count < std::min(to.size(), kRanges) && bytes < from.size(); ++count) {
    remote[count] = to[count];
    remote[count].iov_len = std::min(to[count].iov_len, from.size() - bytes);
    bytes += remote[count].iov_len;
  }
  const iovec local{const_cast<std::byte*>(from.data()), bytes};
  const ssize_t n = ::process_vm_writev(::getpid(), &local, 1, remote.data(), count, 0);
  if (n >= 0) return n;
  if (!is_forbidden(errno)) return -errno;
  return copy_by_pipe(remote[0].iov_base, from.data(), remote[0].iov_len);
}

ssize_t load_some(std::span<std::byte> to, const void* from) noexcept {
  const iovec local{to.data(), to.size()};
  const iovec remote{const_cast<void*>(from), to.size()};
  const ssize_t n = ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0);
  if (n >= 0) return n;
  return is_forbidden(errno) ? copy_by_pipe(to.data(), from, to.size()) : -errno;
}

}  // namespace

Moved store_bytes(std::span<const iovec> to, std::span<const std::byte> from) noexcept {
  Moved stored;
  std::size_t piece = 0;
  std::size_t offset = 0;  // into that piece
  while (stored.bytes < from.size()) {
    const auto rest = from.subspan(stored.bytes);
    iovec front{static_cast<std::byte*>(to[piece].iov_base) + offset, to[piece].iov_len - offset};
    const ssize_t n =
        offset != 0 ? store_some({&front, 1}, rest) : store_some(to.subspan(piece), rest);
    if (n == -EINTR) continue;
    if (n <= 0) {
      stored.error = n == 0 ? EFAULT : static_cast<int>(-n);
      return stored;
    }
    stored.bytes += static_cast<std::size_t>(n);
    for (auto left = static_cast<std::size_t>(n); left != 0;) {
      const std::size_t part = std::min(left, to[piece].iov_len - offset);
      left -= part;
      offset += part;
      if (offset == to[piece].iov_len) ++piece, offset = 0;
    }
  }
  return stored;
}

Moved load_bytes(std::span<std::byte> to, const void* from) noexcept {
  Moved loaded;
  while (loaded.bytes < to.size()) {
    const ssize_t n =
        load_some(to.subspan(loaded.bytes), static_cast<const std::byte*>(from) + loaded.bytes);
    if (n == -EINTR) continue;
    if (n <= 0) {
      loaded.error = n == 0 ? EFAULT : static_cast<int>(-n);
      break;
    }
    loaded.bytes += static_cast<std::size_t>(n);
  }
  return loaded;
}

bool is_readable(const void* data, std::size_t length) noexcept {
  auto at = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t end = at + length;
  while (at < end) {
    // One byte of each page.
    std::array<iovec, kRanges> remote;
    std::array<std::byte, kRanges> bytes;
    std::size_t count = 0;
    for (; count < kRanges && at < end; at = (at / kPage + 1) * kPage)
      remote[count++] = {reinterpret_cast<void*>(at), 1};
    const iovec local{bytes.data(), count};
    const ssize_t n = ::process_vm_readv(::getpid(), &local, 1, remote.data(), count, 0);
    if (n == static_cast<ssize_t>(count)) continue;
    if (n >= 0 || !is_forbidden(errno)) return false;
    const Pipe pipe;
    if (!pipe.in) return false;
    for (std::size_t i = 0; i < count; ++i)
      if (::write(pipe.in.get(), remote[i].iov_base, 1) != 1) return false;
  }
  return true;
}

}  // namespace crossdock::mem
