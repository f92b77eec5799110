// A second process for the shm tests: this test binary, executed with --peer-helper. It owns
// regions and an shm transport, or plays an initiator, as told line by line over a pipe; it never
// outlives the test (it ends when its input closes). Test-only; failures are gtest failures.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <sys/types.h>

#include "base/fd.hpp"
#include "transport/transport.hpp"

namespace crossdock::testing {

// The other side of PeerProcessHelper: serves commands until its input ends. Returns the exit
// status.
int peer_helper_main();

class PeerProcessHelper {
 public:
  PeerProcessHelper();
  // Kills and reaps it.
  ~PeerProcessHelper();
  PeerProcessHelper(const PeerProcessHelper&) = delete;
  PeerProcessHelper& operator=(const PeerProcessHelper&) = delete;

  [[nodiscard]] const transport::PeerInfo& info() const { return info_; }

  // Memory of the helper with its key; shared (a sealed memfd) or private.
  std::unique_ptr<transport::RemoteRegion> make_region(std::size_t length, bool shared);
  void fill_region(const transport::RemoteRegion& region, std::uint64_t seed);
  bool region_matches(const transport::RemoteRegion& region, std::uint64_t seed);
  void unmap_second_half(const transport::RemoteRegion& region);
  // Puts another file in the place of the region's descriptor.
  void close_memfd(const transport::RemoteRegion& region);

  // The helper writes 0x5A over a region of this process, again and again.
  void write_forever(const transport::HostIdentity& owner, const std::string& address,
                     const mem::RegionRecord& region, const std::string& key);
  // The helper becomes the user nobody and says what reaches() tells it.
  std::string reach_as_nobody(const transport::HostIdentity& owner, const std::string& address);

  void kill();  // SIGKILL, and reaps
  void stop();  // SIGSTOP
  void wait_until_stopped();
  void resume();

 private:
  std::string ask(const std::string& line);

  pid_t pid_ = -1;
  bool reaped_ = false;
  base::UniqueFd to_;
  base::UniqueFd from_;
  transport::PeerInfo info_;
};

}  // namespace crossdock::testing
