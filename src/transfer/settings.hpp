// The configuration values the engine itself uses, read once when an engine is created.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace crossdock::base {
class Config;
}

namespace crossdock::transfer {

struct Settings {
  std::uint64_t slice_bytes = 64 * 1024;
  std::uint64_t shard_bytes = 4 << 20;  // what one rail gets at a time
  bool merge = true;                    // adjacent requests become one run
  bool checksum = false;
  std::uint32_t max_retries = 2;      // of a shard, on another rail
  bool fallback = false;              // to the next transport when the best one fails
  std::uint32_t max_pending = 65536;  // transfers in flight
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  std::chrono::nanoseconds stall_timeout = std::chrono::seconds(30);
  std::chrono::nanoseconds quiesce_grace = std::chrono::milliseconds(100);
  std::chrono::nanoseconds wait_spin = std::chrono::microseconds(50);
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(5);
  std::chrono::nanoseconds handshake_timeout = std::chrono::seconds(3);
  std::chrono::nanoseconds republish = std::chrono::seconds(5);
  std::chrono::nanoseconds silence = std::chrono::seconds(30);  // of a peer that counts as lost
  std::uint32_t mailbox_messages = 65536;
  std::uint64_t mailbox_bytes = 64 << 20;  // of one; of all together that nobody asked for
  std::uint32_t max_handshakes = 256;      // unfinished at a time
  std::string listen = "127.0.0.1:0";
  std::string secret;
};

Settings read_settings(const base::Config& config);

}  // namespace crossdock::transfer
