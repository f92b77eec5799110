// One peer process, shared by the endpoints (rails) that lead to it: its pidfd, and the mappings of
// its regions. A mapping goes with the last endpoint that attached it, whether or not the peer
// still lives: several peers of the engine may lead to one process, and one letting go of a region
// says nothing about the others. Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

#include "base/fd.hpp"
#include "transport/shm/identity.hpp"
#include "transport/transport.hpp"

namespace crossdock::transport::shm {

enum class CopyMode : std::uint8_t { kAuto, kMap, kVm };

// RemoteAccess::mode.
inline constexpr std::uint32_t kMapped = 1;  // plain copies at address + delta
inline constexpr std::uint32_t kVm = 2;      // process_vm_readv, process_vm_writev

// What the owner tells about a region: where to map it from, if it can be mapped.
struct RegionKey {
  bool mappable = false;
  MemfdName name;
  std::uint64_t offset = 0;
};
std::string encode_key(const mem::RegionRecord& region);
Result<RegionKey> decode_key(std::string_view key);

class PeerProcess {
 public:
  // `populate` is how long all its mappings together may take to be made ready for copies.
  PeerProcess(std::string name, std::uint32_t pid, base::UniqueFd pidfd,
              std::chrono::nanoseconds populate);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  [[nodiscard]] std::uint32_t pid() const noexcept { return pid_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  // One system call, 0.2 us. A process that has ended stays ended, whoever gets its PID.
  [[nodiscard]] bool alive() const noexcept;
  [[nodiscard]] Error lost() const;

  // `user` is who holds the region from now on; attaching again changes nothing. kCorrupt when
  // another region has that id: the peer lies.
  Result<RemoteAccess> attach(const RemoteRegion& region, CopyMode mode, const void* user);
  void detach(mem::RegionId region, const void* user) noexcept;
  // Detaches all that `user` holds.
  void forget(const void* user) noexcept;
  [[nodiscard]] std::size_t mappings() const;

 private:
  struct Mapping {
    // Of what region.
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    transfer::Access rights = transfer::Access::kRemoteReadWrite;
    std::string key = {};
    // Where it is here.
    void* data = nullptr;
    std::size_t length = 0;
    RemoteAccess access;
    std::vector<const void*> users = {};
    [[nodiscard]] bool is_of(const RemoteRegion& region) const noexcept;
  };
  using Mappings = std::map<mem::RegionId, Mapping>;
  // Lock held. Returns what follows.
  Mappings::iterator let_go(Mappings::iterator known, const void* user) noexcept;
  Result<Mapping> map(const RemoteRegion& region, const RegionKey& key);
  void populate(void* data, std::size_t length, bool writable) noexcept;
  // Reads one byte of the region, to learn now whether the system permits it.
  Result<RemoteAccess> probe(const RemoteRegion& region) const;

  const std::string name_;
  const std::uint32_t pid_;
  const base::UniqueFd pidfd_;
  mutable std::mutex mutex_;
  Mappings mappings_;
  std::chrono::nanoseconds populate_left_;
};

}  // namespace crossdock::transport::shm
