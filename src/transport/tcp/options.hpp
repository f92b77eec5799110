// The settings of the tcp transport, read once from the configuration table. A plain value.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

namespace crossdock::base {
class Config;
}

namespace crossdock::transport::tcp {

struct TcpOptions {
  std::uint32_t lanes = 2;    // connections to each peer = rails
  std::uint32_t threads = 2;  // workers; started with the first connection
  std::chrono::nanoseconds spin{0};
  // Payload of one frame: the unit of acknowledgement, of leases at the target and of cancelling.
  std::uint32_t frame_bytes = 1u << 20;
  // Sent or asked for, but not answered, on one lane.
  std::uint64_t window_bytes = 16u << 20;
  // SO_SNDBUF and SO_RCVBUF of a lane; 0 leaves both to the kernel.
  std::uint32_t socket_buffer = 0;
  // Shards up to this size are sent by the posting thread when the lane is idle.
  std::uint32_t inline_bytes = 32u << 10;
  // Shards that wait on one lane before post() says kWouldBlock.
  std::uint32_t queue_shards = 8192;
};

// Null: the defaults above.
TcpOptions read_options(const base::Config* config);

}  // namespace crossdock::transport::tcp
