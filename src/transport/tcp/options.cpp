// See options.hpp. SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/options.hpp"

#include "base/config.hpp"

namespace crossdock::transport::tcp {

TcpOptions read_options(const base::Config* config) {
  TcpOptions o;
  if (config == nullptr) return o;
  // The table keeps every value in the range of its type here.
  o.lanes = static_cast<std::uint32_t>(config->integer("transport.tcp.lanes"));
  o.threads = static_cast<std::uint32_t>(config->integer("transport.tcp.threads"));
  o.spin = config->duration("transport.tcp.spin");
  o.frame_bytes = static_cast<std::uint32_t>(config->size("transport.tcp.frame_bytes"));
  o.window_bytes = config->size("transport.tcp.window_bytes");
  o.socket_buffer = static_cast<std::uint32_t>(config->size("transport.tcp.socket_buffer"));
  o.inline_bytes = static_cast<std::uint32_t>(config->size("transport.tcp.inline_bytes"));
  o.queue_shards = static_cast<std::uint32_t>(config->integer("transport.tcp.queue_shards"));
  return o;
}

}  // namespace crossdock::transport::tcp
