// See peer_process.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/peer_process.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "transport/shm/vm_copy.hpp"
#include "wire/codec.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace crossdock::transport::shm {
namespace {

constexpr int kRegionSeals = F_SEAL_SHRINK;

// Errors that another way of copying may not have.
bool is_environment(const Error& error) {
  return error.code == Code::kNoMemory || error.code == Code::kUnreachable;
}

std::string_view key_of(const RemoteRegion& region) {
  for (const auto& [transport, key] : region.keys)
    if (transport == "shm") return key;
  return {};
}

}  // namespace

std::string encode_key(const mem::RegionRecord& region) {
  // Memory that could be shrunk is not offered for mapping: peers would refuse it.
  const int fd = region.backing.memfd;
  const int seals = fd < 0 ? -1 : ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kRegionSeals) != kRegionSeals) return {};
  const auto name = name_memfd(fd);
  if (!name.ok()) return {};
  std::vector<std::byte> bytes;
  wire::Writer writer{wire::VectorSink(bytes)};
  writer.u32("fd", name->fd);
  writer.u64("device", name->device);
  writer.u64("inode", name->inode);
  writer.u64("offset", region.backing.offset);
  return std::string(wire::as_text(bytes));
}

Result<RegionKey> decode_key(std::string_view key) {
  RegionKey out;
  if (key.empty()) return out;
  wire::Reader reader(wire::as_bytes(key));
  reader.u32("fd", out.name.fd);
  reader.u64("device", out.name.device);
  reader.u64("inode", out.name.inode);
  reader.u64("offset", out.offset);
  CROSSDOCK_CHECK_OK(reader.finish("shm region key"));
  out.mappable = true;
  return out;
}

PeerProcess::PeerProcess(std::string name, std::uint32_t pid, base::UniqueFd pidfd,
                         std::chrono::nanoseconds populate)
    : name_(std::move(name)), pid_(pid), pidfd_(std::move(pidfd)), populate_left_(populate) {}

PeerProcess::~PeerProcess() {
  for (const auto& [id, mapping] : mappings_)
    ::munmap(mapping.data, mapping.length);
}

bool PeerProcess::alive() const noexcept {
  pollfd poll_fd{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&poll_fd, 1, 0) == 0;
}

Error PeerProcess::lost() const {
  return Error{.code = Code::kPeerLost,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = fmt::format("peer '{}' (process {}) has ended", name_, pid_)};
}

Result<RemoteAccess> PeerProcess::attach(const RemoteRegion& region, CopyMode mode,
                                         const void* user) {
  CROSSDOCK_TRY(key, decode_key(key_of(region)));
  if (!alive()) return lost();
  if (mode == CopyMode::kVm) return probe(region);
  if (!key.mappable && mode == CopyMode::kMap)
    return make_error(
        Code::kUnsupported,
        fmt::format("region [{:#x}, +{}) of peer '{}' is not memory that can be mapped; "
                    "allocate it with Engine::allocate(), or set transport.shm.copy to "
                    "auto",
                    region.address, region.length, name_));
  if (!key.mappable) return probe(region);

  const std::lock_guard lock(mutex_);
  if (const auto known = mappings_.find(region.id); known != mappings_.end()) {
    if (!known->second.is_of(region))
      return Error{.code = Code::kCorrupt,
                   .scope = Scope::kPeer,
                   .message = fmt::format("peer '{}' announced region {} twice, at {:#x} and {:#x}",
                                          name_, region.id, known->second.address, region.address)};
    auto& users = known->second.users;
    if (std::ranges::find(users, user) == users.end()) users.push_back(user);
    return known->second.access;
  }
  auto mapping = map(region, key);
  if (!mapping.ok()) {
    if (mode == CopyMode::kAuto && is_environment(mapping.error())) return probe(region);
    return std::move(mapping).error();
  }
  mapping->users.push_back(user);
  const auto access = mapping->access;
  mappings_[region.id] = *std::move(mapping);
  return access;
}

bool PeerProcess::Mapping::is_of(const RemoteRegion& region) const noexcept {
  return address == region.address && bytes == region.length && rights == region.access &&
         key == key_of(region);
}

PeerProcess::Mappings::iterator PeerProcess::let_go(Mappings::iterator known,
                                                    const void* user) noexcept {
  std::erase(known->second.users, user);
  if (!known->second.users.empty()) return std::next(known);
  ::munmap(known->second.data, known->second.length);
  return mappings_.erase(known);
}

void PeerProcess::detach(mem::RegionId region, const void* user) noexcept {
  const std::lock_guard lock(mutex_);
  if (const auto known = mappings_.find(region); known != mappings_.end())
    (void)let_go(known, user);
}

void PeerProcess::forget(const void* user) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto known = mappings_.begin(); known != mappings_.end();)
    known = let_go(known, user);
}

std::size_t PeerProcess::mappings() const {
  const std::lock_guard lock(mutex_);
  return mappings_.size();
}

Result<PeerProcess::Mapping> PeerProcess::map(const RemoteRegion& region, const RegionKey& key) {
  const bool writable = region.access == transfer::Access::kRemoteReadWrite;
  CROSSDOCK_TRY(
      fd, open_memfd({.pid = pid_, .name = key.name, .writable = writable, .seals = kRegionSeals}));
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) return errno_error(errno, "fstat of a peer's memfd");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (region.length > size || key.offset > size - region.length)
    return Error{.code = Code::kDenied,
                 .scope = Scope::kPeer,
                 .message = fmt::format("peer '{}' announces [+{}, +{}) of a memfd of {} bytes",
                                        name_, key.offset, region.length, size)};
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t skipped = key.offset % page;
  const std::size_t length = region.length + skipped;
  void* const data = ::mmap(nullptr, length, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                            MAP_SHARED, fd.get(), static_cast<off_t>(key.offset - skipped));
  if (data == MAP_FAILED) {
    Error error = errno_error(errno, fmt::format("mmap {} bytes of peer '{}'", length, name_));
    error.code = Code::kNoMemory;
    return error;
  }
  populate(data, length, writable);
  const std::uint64_t start = reinterpret_cast<std::uint64_t>(data) + skipped;
  return Mapping{
      .address = region.address,
      .bytes = region.length,
      .rights = region.access,
      .key = std::string(key_of(region)),
      .data = data,
      .length = length,
      .access = {.delta = static_cast<std::int64_t>(start - region.address), .mode = kMapped}};
}

// Lock held. Faults now, so that no copy pays for them, as far as there is time (see
// docs/design/shm.md): meanwhile who opens the peer waits, and its revocations do. Copies pay for
// the rest, as they do for all of it on old kernels, which lack the call.
void PeerProcess::populate(void* data, std::size_t length, bool writable) noexcept {
  constexpr std::size_t kPiece = std::size_t{32} << 20;
  (void)::madvise(data, length, MADV_HUGEPAGE);
  for (std::size_t at = 0; at < length && populate_left_.count() > 0; at += kPiece) {
    const auto begin = std::chrono::steady_clock::now();
    if (::madvise(static_cast<std::byte*>(data) + at, std::min(kPiece, length - at),
                  writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0)
      return;
    populate_left_ -= std::chrono::steady_clock::now() - begin;
  }
}

Result<RemoteAccess> PeerProcess::probe(const RemoteRegion& region) const {
  std::byte byte{};
  const Slice slice{.local = &byte, .remote = region.address, .region = &region, .length = 1};
  std::optional<Error> error;
  (void)vm_copy(*this, Op::kRead, std::span(&slice, 1), error);
  if (error) {
    if (error->code == Code::kDenied) error->code = Code::kUnsupported;
    return *std::move(error);
  }
  return RemoteAccess{.delta = 0, .mode = kVm};
}

}  // namespace crossdock::transport::shm
