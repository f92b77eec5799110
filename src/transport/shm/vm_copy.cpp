// See vm_copy.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/vm_copy.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fmt/format.h>
#include <sys/uio.h>

#include "transport/shm/peer_process.hpp"

namespace crossdock::transport::shm {
namespace {

// Adjacent ranges become one: the kernel pays for each.
class RangeList {
 public:
  void add(std::uint64_t address, std::size_t length) noexcept {
    if (count_ != 0 && end_ == address)
      ranges_[count_ - 1].iov_len += length;
    else
      ranges_[count_++] = {reinterpret_cast<void*>(address), length};
    end_ = address + length;
  }
  [[nodiscard]] const iovec* data() const noexcept { return ranges_; }
  [[nodiscard]] unsigned long count() const noexcept { return count_; }

 private:
  iovec ranges_[kVmSlices];  // not initialised: 8 KiB
  unsigned long count_ = 0;
  std::uint64_t end_ = 0;
};

// Bytes copied, or -1 and errno.
ssize_t copy_once(const PeerProcess& peer, Op op, std::span<const Slice> slices) noexcept {
  RangeList local;
  RangeList remote;
  for (const Slice& slice : slices) {
    local.add(reinterpret_cast<std::uint64_t>(slice.local), slice.length);
    remote.add(slice.remote, slice.length);
  }
  const auto call = op == Op::kWrite ? ::process_vm_writev : ::process_vm_readv;
  return call(static_cast<pid_t>(peer.pid()), local.data(), local.count(), remote.data(),
              remote.count(), 0);
}

// How many slices from the front `bytes` fill.
std::uint32_t whole_slices(std::span<const Slice> slices, std::uint64_t bytes) noexcept {
  std::uint32_t n = 0;
  while (n < slices.size() && bytes >= slices[n].length)
    bytes -= slices[n++].length;
  return n;
}

// A slice that did not go in one piece: goes on from where it stopped until the kernel says why.
std::optional<Error> copy_piecewise(const PeerProcess& peer, Op op, Slice slice) {
  while (slice.length != 0) {
    if (!peer.alive()) return peer.lost();
    const ssize_t n = copy_once(peer, op, std::span(&slice, 1));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return vm_error(n == 0 ? EFAULT : errno, peer, op, slice);
    slice.local += n;
    slice.remote += static_cast<std::uint64_t>(n);
    slice.length -= static_cast<std::uint32_t>(n);
  }
  return std::nullopt;
}

constexpr std::string_view kForbidden =
    "the system forbids it. Remedies: sysctl kernel.yama.ptrace_scope=0; or CAP_SYS_PTRACE for "
    "this "
    "process; or run both engines as one user; or memory from Engine::allocate(), which is mapped "
    "instead; in a container, a seccomp profile that allows process_vm_readv and process_vm_writev";

}  // namespace

Error vm_error(int errno_value, const PeerProcess& peer, Op op, const Slice& slice) {
  if (errno_value == ESRCH) return peer.lost();
  const std::string what = fmt::format("{} {} bytes at {:#x} of peer '{}' (process {})",
                                       op == Op::kWrite ? "write" : "read", slice.length,
                                       slice.remote, peer.name(), peer.pid());
  Error error = errno_error(errno_value, what);
  error.scope = Scope::kTransfer;
  switch (errno_value) {
    case EFAULT:
      error.code = Code::kInvalidArgument;
      error.message = fmt::format(
          "{}: not mapped there, or local memory at {} is not mapped; keep a region mapped until "
          "it "
          "is released",
          what, static_cast<const void*>(slice.local));
      break;
    case EPERM:
    case ENOSYS:
      error.code = errno_value == EPERM ? Code::kDenied : Code::kUnsupported;
      error.message = fmt::format("{}: {}", what, kForbidden);
      break;
    case ENOMEM:
      error.code = Code::kNoMemory;
      error.retry = Retry::kLater;
      break;
    default:
      break;
  }
  return error;
}

std::uint32_t vm_copy(const PeerProcess& peer, Op op, std::span<const Slice> slices,
                      std::optional<Error>& error) noexcept {
  const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(slices.size(), kVmSlices));
  // The PID could be another process's by now; the pidfd tells.
  if (!peer.alive()) {
    error = peer.lost();
    return 0;
  }
  const ssize_t n = copy_once(peer, op, slices.first(count));
  std::uint32_t done = n > 0 ? whole_slices(slices.first(count), static_cast<std::uint64_t>(n)) : 0;
  // Rare: the rest slice by slice, so that the first that fails is known.
  for (; done < count; ++done) {
    error = copy_piecewise(peer, op, slices[done]);
    if (error) break;
  }
  return done;
}

}  // namespace crossdock::transport::shm
