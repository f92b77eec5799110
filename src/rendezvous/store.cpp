// Argument checks common to all stores, and opening by URL.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/store.hpp"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <numeric>

#include "base/strings.hpp"
#include "rendezvous/file_store.hpp"
#include "rendezvous/http_store.hpp"
#include "rendezvous/inproc_store.hpp"
#include "rendezvous/tcp_store.hpp"
#include "wire/codec.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

static_assert(kMaxKeyBytes == wire::kMaxStoreKeyBytes);
static_assert(kMaxValueBytes == wire::kMaxStoreValueBytes);

Result<> check_key(std::string_view key) {
  if (key.empty()) return invalid_argument("a store key must not be empty");
  if (key.size() > kMaxKeyBytes)
    return invalid_argument(fmt::format("store key of {} bytes ({}...) exceeds {} bytes",
                                        key.size(), wire::quote_bytes(wire::as_bytes(key), 32),
                                        kMaxKeyBytes));
  return {};
}

Result<> check_value(std::string_view key, std::string_view value) {
  if (value.size() > kMaxValueBytes)
    return invalid_argument(fmt::format("value of {} bytes for store key {} exceeds {} bytes",
                                        value.size(), wire::quote_bytes(wire::as_bytes(key), 80),
                                        kMaxValueBytes));
  return {};
}

constexpr std::array<std::string_view, 4> kSchemes = {"inproc", "file", "tcp", "http"};

Error unknown_scheme(std::string_view url, std::string_view scheme) {
  const std::string hint = base::did_you_mean(scheme.substr(0, 32), kSchemes);
  return invalid_argument(
      fmt::format("store URL {} must begin with inproc://, file://, tcp:// or http://{}",
                  wire::quote_bytes(wire::as_bytes(url), 120), hint));
}

Result<std::shared_ptr<Store>> open_inproc(std::string_view rest) {
  if (rest.empty())
    return invalid_argument("store URL inproc:// needs a name, as in inproc://demo");
  return open_inproc_store(rest);
}

}  // namespace

Result<> Store::put(std::string_view key, std::string_view value, Lease lease, Deadline deadline) {
  CROSSDOCK_CHECK_OK(check_key(key));
  CROSSDOCK_CHECK_OK(check_value(key, value));
  constexpr std::chrono::hours kLongest{24 * 3650};
  if (lease && (lease->count() <= 0 || *lease > kLongest))
    return invalid_argument(
        fmt::format("a lease of {} ms must be positive and at most ten years", lease->count()));
  return do_put(key, value, lease, deadline);
}

Result<std::optional<Entry>> Store::get(std::string_view key, Deadline deadline) {
  CROSSDOCK_CHECK_OK(check_key(key));
  return do_get(key, deadline);
}

Result<> Store::remove(std::string_view key, Deadline deadline) {
  CROSSDOCK_CHECK_OK(check_key(key));
  return do_remove(key, deadline);
}

Result<std::vector<std::string>> Store::list(std::string_view prefix, Deadline deadline) {
  if (!prefix.empty()) CROSSDOCK_CHECK_OK(check_key(prefix));
  return do_list(prefix, deadline);
}

Result<Entry> Store::wait(std::string_view key, Deadline deadline) {
  CROSSDOCK_CHECK_OK(check_key(key));
  return do_wait(key, deadline);
}

Result<bool> Store::compare_and_put(std::string_view key, std::uint64_t expected_revision,
                                    std::string_view value, Deadline deadline) {
  CROSSDOCK_CHECK_OK(check_key(key));
  CROSSDOCK_CHECK_OK(check_value(key, value));
  return do_compare_and_put(key, expected_revision, value, deadline);
}

Result<bool> Store::compare_and_remove(std::string_view key, std::uint64_t expected_revision,
                                       Deadline deadline) {
  CROSSDOCK_CHECK_OK(check_key(key));
  if (expected_revision == 0)
    return invalid_argument(
        "compare_and_remove() of revision 0, which says that there is no key; pass the revision "
        "that get() told");
  return do_compare_and_remove(key, expected_revision, deadline);
}

Result<std::shared_ptr<Store>> open_store(std::string_view url, Deadline deadline) {
  const auto colon = url.find("://");
  const std::string_view scheme = url.substr(0, std::min(colon, url.size()));
  if (colon == std::string_view::npos) return unknown_scheme(url, scheme);
  const std::string_view rest = url.substr(colon + 3);
  if (scheme == "inproc") return open_inproc(rest);
  if (scheme == "file") return open_file_store(rest, deadline);
  if (scheme == "tcp") return open_tcp_store(rest, deadline);
  if (scheme == "http") return open_http_store(rest, deadline);
  return unknown_scheme(url, scheme);
}

}  // namespace crossdock::rendezvous
