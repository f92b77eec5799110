// Names of network endpoints: text such as `host:port`, `[v6]:port` or a bare host, and the socket
// addresses they stand for. Values, thread-compatible; only resolve() of a host *name* can block,
// and it takes a deadline.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

namespace crossdock::base {

struct HostPort {
  std::string host;  // without brackets; may hold a zone ("fe80::1%eth0")
  std::uint16_t port = 0;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// `10.0.0.1:7000`, `node7:7000`, `[2001:db8::1]:7000`, and without a port (then `default_port`):
// `node7`, `10.0.0.1`, `[::1]`, `::1`. An empty host is refused: to listen everywhere one must say
// so ("0.0.0.0:7000").
Result<HostPort> parse_host_port(std::string_view text, std::uint16_t default_port = 0);

// The inverse: brackets exactly when the host holds a colon.
std::string format_host_port(std::string_view host, std::uint16_t port);
std::string to_string(const HostPort& address);

// One IPv4 or IPv6 (or unix) socket address.
class SocketAddress {
 public:
  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t size) noexcept;

  [[nodiscard]] const sockaddr* get() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage_);
  }
  [[nodiscard]] const sockaddr_storage& storage() const noexcept { return storage_; }
  [[nodiscard]] socklen_t size() const noexcept { return size_; }
  [[nodiscard]] int family() const noexcept { return storage_.ss_family; }
  [[nodiscard]] std::uint16_t port() const noexcept;  // 0 unless IPv4 or IPv6
  void set_port(std::uint16_t port) noexcept;
  // The numeric host without port ("10.0.0.1", "fe80::1%eth0").
  [[nodiscard]] std::string host() const;
  [[nodiscard]] bool is_loopback() const noexcept;
  [[nodiscard]] bool is_any() const noexcept;   // 0.0.0.0 or [::]
  [[nodiscard]] std::string to_string() const;  // "10.0.0.1:7000", "[::1]:7000"
  // Same family, host, zone and port.
  friend bool operator==(const SocketAddress& a, const SocketAddress& b) noexcept;

 private:
  sockaddr_storage storage_{};
  socklen_t size_ = 0;
};

struct ResolveOptions {
  int family = AF_UNSPEC;     // AF_INET or AF_INET6 restrict the answer
  bool numeric_only = false;  // refuse names; never blocks then
};

// All stream addresses of a host in the resolver's order of preference, never empty on success.
// kNotFound names the host; kDeadline when the name service does not answer in time (its thread is
// left to finish alone, holding nothing of the caller).
Result<std::vector<SocketAddress>> resolve(const HostPort& address, Deadline deadline,
                                           const ResolveOptions& options = {});

// Names of the two ends of a socket (getsockname, getpeername).
Result<SocketAddress> local_address(int fd);
Result<SocketAddress> peer_address(int fd);

}  // namespace crossdock::base
