// See identity.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/identity.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "wire/codec.hpp"

namespace crossdock::transport::shm {
namespace {

constexpr std::uint8_t kAddressVersion = 1;
constexpr int kControlSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

struct Address {
  std::uint8_t version = kAddressVersion;
  MemfdName name;
  ControlBlock::Token token{};
};

template <class Codec, class Value>
void describe(Codec& codec, Value& address) {
  codec.u8("version", address.version);
  codec.u32("fd", address.name.fd);
  codec.u64("device", address.name.device);
  codec.u64("inode", address.name.inode);
  codec.raw("token", address.token);
}

Error unreachable(std::string message) {
  return Error{.code = Code::kUnreachable, .scope = Scope::kPeer, .message = std::move(message)};
}

// Errors of looking into another process, with the remedy.
Error look_error(int errno_value, std::uint32_t pid) {
  Error error =
      errno_error(errno_value,
                  fmt::format("look into process {}: shm needs both engines to run as one user, or "
                              "with CAP_SYS_PTRACE",
                              pid));
  error.code =
      errno_value == EMFILE || errno_value == ENFILE ? Code::kNoMemory : Code::kUnreachable;
  error.scope = Scope::kPeer;
  return error;
}

Result<base::UniqueFd> open_pidfd(std::uint32_t pid) {
  const long fd = ::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0);
  if (fd >= 0) return base::UniqueFd(static_cast<int>(fd));
  Error error = errno_error(errno, fmt::format("pidfd_open of process {}", pid));
  error.code = errno == ENOSYS  ? Code::kUnsupported
               : errno == ESRCH ? Code::kPeerLost
                                : Code::kUnreachable;
  error.scope = Scope::kPeer;
  return error;
}

Result<> check_token(int fd, const ControlBlock::Token& token, std::string_view peer) {
  ControlBlock::Token seen{};
  const ssize_t n = ::pread(fd, seen.data(), seen.size(), 0);
  if (n == static_cast<ssize_t>(seen.size()) && std::ranges::equal(seen, token)) return {};
  return unreachable(fmt::format(
      "the process said to be peer '{}' does not hold the token that the peer told: it is "
      "another process",
      peer));
}

}  // namespace

Result<ControlBlock> ControlBlock::create() {
  Address address;
  if (::getrandom(address.token.data(), address.token.size(), 0) !=
      static_cast<ssize_t>(address.token.size()))
    return errno_error(errno, "getrandom for the shm token");
  ControlBlock block;
  block.fd_.reset(::memfd_create("crossdock-control", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!block.fd_) return errno_error(errno, "memfd_create of the shm control block");
  if (::pwrite(block.fd_.get(), address.token.data(), address.token.size(), 0) !=
          static_cast<ssize_t>(address.token.size()) ||
      ::fcntl(block.fd_.get(), F_ADD_SEALS, kControlSeals | F_SEAL_SEAL) != 0)
    return errno_error(errno, "fill and seal the shm control block");
  CROSSDOCK_TRY(name, name_memfd(block.fd_.get()));
  address.name = name;
  std::vector<std::byte> bytes;
  wire::Writer writer{wire::VectorSink(bytes)};
  describe(writer, address);
  CROSSDOCK_CHECK_OK(writer.finish("shm address"));
  block.address_ = wire::as_text(bytes);
  return block;
}

Result<MemfdName> name_memfd(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) return errno_error(errno, fmt::format("fstat of memfd {}", fd));
  return MemfdName{
      .fd = static_cast<std::uint32_t>(fd), .device = status.st_dev, .inode = status.st_ino};
}

Result<base::UniqueFd> open_memfd(const OpenMemfd& what) {
  const std::string path = fmt::format("/proc/{}/fd/{}", what.pid, what.name.fd);
  const auto is_it = [&](const struct stat& status) {
    return S_ISREG(status.st_mode) && status.st_dev == what.name.device &&
           status.st_ino == what.name.inode;
  };
  const auto something_else = [&] {
    return Error{
        .code = Code::kDenied,
        .scope = Scope::kPeer,
        .message = fmt::format("descriptor {} of process {} is not the memory that the peer "
                               "named: it was closed, or this is another process",
                               what.name.fd, what.pid)};
  };
  // Looked at before it is opened: opening a device or a pipe could have effects.
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) {
    if (errno == ENOENT && ::access(fmt::format("/proc/{}", what.pid).c_str(), F_OK) == 0)
      return something_else();
    return look_error(errno, what.pid);
  }
  if (!is_it(status)) return something_else();
  const int mode = what.writable ? O_RDWR : O_RDONLY;
  base::UniqueFd fd(::open(path.c_str(), mode | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd) return look_error(errno, what.pid);
  if (::fstat(fd.get(), &status) != 0 || !is_it(status)) return something_else();
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & what.seals) != what.seals)
    return Error{.code = Code::kDenied,
                 .scope = Scope::kPeer,
                 .message = fmt::format("descriptor {} of process {} is not sealed against "
                                        "shrinking; using it could end this process",
                                        what.name.fd, what.pid)};
  return fd;
}

Result<std::uint64_t> process_start_time(std::uint32_t pid) {
  base::UniqueFd file(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 1024> buffer;
  const ssize_t n = file ? ::read(file.get(), buffer.data(), buffer.size()) : -1;
  if (n <= 0)
    return Error{.code = Code::kPeerLost,
                 .scope = Scope::kPeer,
                 .native = {Native::Domain::kErrno, errno},
                 .message = fmt::format("there is no process {}", pid)};
  // Field 22; the second, in parentheses, may hold spaces and parentheses itself.
  const std::string_view text(buffer.data(), static_cast<std::size_t>(n));
  std::size_t at = text.rfind(')');
  for (int field = 2; field < 22 && at != std::string_view::npos; ++field)
    at = text.find(' ', at + 1);
  std::uint64_t ticks = 0;
  if (at == std::string_view::npos ||
      std::from_chars(text.data() + at + 1, text.data() + text.size(), ticks).ec != std::errc{})
    return make_error(Code::kInternal, fmt::format("/proc/{}/stat has an unknown form", pid));
  return ticks;
}

Result<base::UniqueFd> prove_peer(const HostIdentity& self, const PeerInfo& peer) {
  if (self.boot_id.empty() || self.boot_id != peer.host.boot_id)
    return unreachable(fmt::format("peer '{}' runs on another host", peer.name));
  if (self.pid_namespace != peer.host.pid_namespace)
    return unreachable(fmt::format(
        "peer '{}' runs on this host in another PID namespace (another container); start both in "
        "one PID namespace to use shm",
        peer.name));
  Address address;
  wire::Reader reader(wire::as_bytes(peer.address));
  describe(reader, address);
  if (auto read = reader.finish("shm address"); !read.ok()) return std::move(read).error();
  if (address.version != kAddressVersion)
    return Error{
        .code = Code::kIncompatible,
        .scope = Scope::kPeer,
        .message = fmt::format("peer '{}' speaks version {} of the shm address, this engine "
                               "version {}",
                               peer.name, address.version, kAddressVersion)};
  CROSSDOCK_TRY(pidfd, open_pidfd(peer.host.pid));
  // After pidfd_open: from here on a process that took over the PID is noticed.
  CROSSDOCK_TRY(started, process_start_time(peer.host.pid));
  if (started != peer.host.start_time)
    return Error{
        .code = Code::kPeerLost,
        .scope = Scope::kPeer,
        .message = fmt::format("process {} of peer '{}' has ended; another one has its PID",
                               peer.host.pid, peer.name)};
  CROSSDOCK_TRY(
      control,
      open_memfd(
          {.pid = peer.host.pid, .name = address.name, .writable = false, .seals = kControlSeals}));
  CROSSDOCK_CHECK_OK(check_token(control.get(), address.token, peer.name));
  return pidfd;
}

}  // namespace crossdock::transport::shm
