// One peer process, shared by the endpoints (rails) that lead to it: its pidfd, and the mappings of
// its regions. Mappings go with the last endpoint, whether or not the peer still lives.
// Thread-safe.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <string_view>

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
  PeerProcess(std::string name, std::uint32_t pid, base::UniqueFd pidfd);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  [[nodiscard]] std::uint32_t pid() const noexcept { return pid_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  // One system call, 0.2 us. A process that has ended stays ended, whoever gets its PID.
  [[nodiscard]] bool alive() const noexcept;
  [[nodiscard]] Error lost() const;

  Result<RemoteAccess> attach(const RemoteRegion& region, CopyMode mode);
  void detach(mem::RegionId region) noexcept;

 private:
  struct Mapping {
    void* data = nullptr;
    std::size_t length = 0;
    RemoteAccess access;
  };
  Result<Mapping> map(const RemoteRegion& region, const RegionKey& key) const;
  // Reads one byte of the region, to learn now whether the system permits it.
  Result<RemoteAccess> probe(const RemoteRegion& region) const;

  const std::string name_;
  const std::uint32_t pid_;
  const base::UniqueFd pidfd_;
  std::mutex mutex_;
  std::map<mem::RegionId, Mapping> mappings_;
};

}  // namespace crossdock::transport::shm
