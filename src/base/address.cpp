// Parsing, formatting and resolving of endpoint names. See the header.
// SPDX-License-Identifier: Apache-2.0
#include "base/address.hpp"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <fmt/format.h>
#include <memory>
#include <mutex>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <optional>
#include <sys/un.h>

#include "base/worker_thread.hpp"

namespace crossdock::base {
namespace {

Error bad_address(std::string_view text, std::string_view why) {
  return invalid_argument(fmt::format(
      "address '{}' {}; write host:port, 10.0.0.1:7000 or [2001:db8::1]:7000", text, why));
}

bool is_ipv6_literal(std::string_view host) {
  const auto percent = host.find('%');
  const std::string bare(host.substr(0, percent));
  // A zone is a name of an interface; brackets in it would make `[host]:port` ambiguous.
  if (percent != std::string_view::npos && host.find_first_of("[]") != std::string_view::npos)
    return false;
  in6_addr ignored{};
  return ::inet_pton(AF_INET6, bare.c_str(), &ignored) == 1;
}

std::optional<std::uint16_t> parse_port(std::string_view digits) {
  unsigned value = 0;
  const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (status != std::errc() || end != digits.data() + digits.size() || value > 65535) return {};
  return static_cast<std::uint16_t>(value);
}

bool has_space_or_control(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) <= 0x20 || static_cast<unsigned char>(c) == 0x7f;
  });
}

Result<HostPort> with_port(std::string_view text, std::string_view host, std::string_view digits) {
  const auto port = parse_port(digits);
  if (!port)
    return bad_address(text,
                       fmt::format("has port '{}', which is not a number of 0 to 65535", digits));
  return HostPort{std::string(host), *port};
}

Result<HostPort> parse_bracketed(std::string_view text, std::uint16_t default_port) {
  const auto close = text.find(']');
  if (close == std::string_view::npos) return bad_address(text, "lacks the closing bracket");
  const auto host = text.substr(1, close - 1);
  if (!is_ipv6_literal(host)) return bad_address(text, "holds no IPv6 address in its brackets");
  const auto rest = text.substr(close + 1);
  if (rest.empty()) return HostPort{std::string(host), default_port};
  if (rest.front() != ':') return bad_address(text, "has text between bracket and port");
  return with_port(text, host, rest.substr(1));
}

using AddrList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// What the resolver thread and its waiter share; outlives whichever ends first.
struct Lookup {
  std::mutex mutex;
  std::condition_variable done_changed;
  bool done = false;
  int status = 0;
  int system_error = 0;
  AddrList list{nullptr, &::freeaddrinfo};
};

void look_up(Lookup& lookup, const HostPort& address, const addrinfo& hints) {
  addrinfo* raw = nullptr;
  const auto port = std::to_string(address.port);
  const int status = ::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &raw);
  const std::lock_guard lock(lookup.mutex);
  lookup.system_error = errno;
  lookup.status = status;
  lookup.list.reset(raw);
  lookup.done = true;
  lookup.done_changed.notify_all();
}

Error lookup_error(const Lookup& lookup, const HostPort& address) {
  if (lookup.status == EAI_SYSTEM)
    return errno_error(lookup.system_error, fmt::format("resolve host '{}'", address.host));
  Error error = make_error(
      Code::kNotFound,
      fmt::format("host '{}' cannot be resolved: {}", address.host, ::gai_strerror(lookup.status)));
  if (lookup.status == EAI_AGAIN) error.retry = Retry::kLater;
  if (lookup.status == EAI_MEMORY) error.code = Code::kNoMemory;
  return error;
}

Result<std::vector<SocketAddress>> collect(const Lookup& lookup, const HostPort& address) {
  if (lookup.status != 0) return lookup_error(lookup, address);
  std::vector<SocketAddress> found;
  for (const addrinfo* it = lookup.list.get(); it != nullptr; it = it->ai_next) {
    const SocketAddress one(it->ai_addr, it->ai_addrlen);
    if (std::find(found.begin(), found.end(), one) == found.end()) found.push_back(one);
  }
  if (found.empty())
    return make_error(Code::kNotFound, fmt::format("host '{}' has no address", address.host));
  return found;
}

Result<SocketAddress> name_of(int fd, int (*query)(int, sockaddr*, socklen_t*),
                              std::string_view what) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (query(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0)
    return errno_error(errno, fmt::format("{} of descriptor {}", what, fd));
  return SocketAddress(reinterpret_cast<const sockaddr*>(&storage), size);
}

template <class T>
const T& as(const sockaddr_storage& storage) {
  return *reinterpret_cast<const T*>(&storage);
}

}  // namespace

Result<HostPort> parse_host_port(std::string_view text, std::uint16_t default_port) {
  if (text.empty()) return bad_address(text, "is empty");
  if (has_space_or_control(text)) return bad_address(text, "holds a space or control character");
  if (text.front() == '[') return parse_bracketed(text, default_port);
  const auto colons = std::count(text.begin(), text.end(), ':');
  if (colons == 0) return HostPort{std::string(text), default_port};
  if (colons > 1) {
    if (is_ipv6_literal(text)) return HostPort{std::string(text), default_port};
    return bad_address(text, "has several colons but is no IPv6 address (those need brackets)");
  }
  const auto colon = text.find(':');
  if (colon == 0)
    return bad_address(text, "has no host (0.0.0.0 or [::] listens on every interface)");
  return with_port(text, text.substr(0, colon), text.substr(colon + 1));
}

std::string format_host_port(std::string_view host, std::uint16_t port) {
  if (host.find(':') != std::string_view::npos) return fmt::format("[{}]:{}", host, port);
  return fmt::format("{}:{}", host, port);
}

std::string to_string(const HostPort& address) {
  return format_host_port(address.host, address.port);
}

SocketAddress::SocketAddress(const sockaddr* address, socklen_t size) noexcept
    : size_(std::min<socklen_t>(size, sizeof storage_)) {
  std::memcpy(&storage_, address, size_);
}

std::uint16_t SocketAddress::port() const noexcept {
  if (family() == AF_INET) return ntohs(as<sockaddr_in>(storage_).sin_port);
  if (family() == AF_INET6) return ntohs(as<sockaddr_in6>(storage_).sin6_port);
  return 0;
}

void SocketAddress::set_port(std::uint16_t port) noexcept {
  if (family() == AF_INET) reinterpret_cast<sockaddr_in*>(&storage_)->sin_port = htons(port);
  if (family() == AF_INET6) reinterpret_cast<sockaddr_in6*>(&storage_)->sin6_port = htons(port);
}

std::string SocketAddress::host() const {
  char text[INET6_ADDRSTRLEN] = {};
  if (family() == AF_INET) {
    ::inet_ntop(AF_INET, &as<sockaddr_in>(storage_).sin_addr, text, sizeof text);
    return text;
  }
  if (family() != AF_INET6) return {};
  const auto& v6 = as<sockaddr_in6>(storage_);
  ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
  if (v6.sin6_scope_id == 0) return text;
  char name[IF_NAMESIZE] = {};
  if (::if_indextoname(v6.sin6_scope_id, name) != nullptr) return fmt::format("{}%{}", text, name);
  return fmt::format("{}%{}", text, v6.sin6_scope_id);
}

bool SocketAddress::is_loopback() const noexcept {
  if (family() == AF_INET) return (ntohl(as<sockaddr_in>(storage_).sin_addr.s_addr) >> 24) == 127;
  if (family() != AF_INET6) return family() == AF_UNIX;
  const auto& v6 = as<sockaddr_in6>(storage_).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

bool SocketAddress::is_any() const noexcept {
  if (family() == AF_INET) return as<sockaddr_in>(storage_).sin_addr.s_addr == INADDR_ANY;
  if (family() != AF_INET6) return false;
  const auto& v6 = as<sockaddr_in6>(storage_).sin6_addr;
  return IN6_IS_ADDR_UNSPECIFIED(&v6);
}

std::string SocketAddress::to_string() const {
  if (family() == AF_INET || family() == AF_INET6) return format_host_port(host(), port());
  if (family() == AF_UNIX) {
    constexpr std::size_t kPathAt = offsetof(sockaddr_un, sun_path);
    if (size_ <= kPathAt) return "unix:(unnamed)";
    std::string path(as<sockaddr_un>(storage_).sun_path, size_ - kPathAt);
    if (path.front() == '\0') return "unix:@" + path.substr(1);
    return "unix:" + path.substr(0, path.find('\0'));
  }
  return fmt::format("(address of family {})", family());
}

bool operator==(const SocketAddress& a, const SocketAddress& b) noexcept {
  if (a.family() != b.family()) return false;
  if (a.family() == AF_INET)
    return a.port() == b.port() && as<sockaddr_in>(a.storage_).sin_addr.s_addr ==
                                       as<sockaddr_in>(b.storage_).sin_addr.s_addr;
  if (a.family() == AF_INET6) {
    const auto& x = as<sockaddr_in6>(a.storage_);
    const auto& y = as<sockaddr_in6>(b.storage_);
    return a.port() == b.port() && x.sin6_scope_id == y.sin6_scope_id &&
           std::memcmp(&x.sin6_addr, &y.sin6_addr, sizeof x.sin6_addr) == 0;
  }
  return a.size_ == b.size_ && std::memcmp(&a.storage_, &b.storage_, a.size_) == 0;
}

Result<std::vector<SocketAddress>> resolve(const HostPort& address, Deadline deadline,
                                           const ResolveOptions& options) {
  addrinfo hints{};
  hints.ai_family = options.family;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  auto lookup = std::make_shared<Lookup>();
  look_up(*lookup, address, hints);  // numeric first: answers at once and needs no thread
  if (lookup->status == 0 || options.numeric_only) return collect(*lookup, address);

  hints.ai_flags = AI_NUMERICSERV;
  lookup->done = false;
  CROSSDOCK_TRY(thread, start_worker("cd-resolve", [lookup, address, hints] {
                  look_up(*lookup, address, hints);
                }));
  thread.detach();
  std::unique_lock lock(lookup->mutex);
  if (!lookup->done_changed.wait_until(lock, deadline.when(), [&] { return lookup->done; })) {
    Error error =
        make_error(Code::kDeadline,
                   fmt::format("the name service did not resolve host '{}' in time", address.host));
    error.retry = Retry::kLater;
    return error;
  }
  return collect(*lookup, address);
}

Result<SocketAddress> local_address(int fd) {
  return name_of(fd, &::getsockname, "local name");
}
Result<SocketAddress> peer_address(int fd) {
  return name_of(fd, &::getpeername, "peer name");
}

}  // namespace crossdock::base
