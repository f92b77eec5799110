// Client of an HTTP metadata service. Only `full_` is shared between calls.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/http_store.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <fmt/format.h>

#include "base/address.hpp"
#include "base/socket.hpp"
#include "rendezvous/retry.hpp"
#include "wire/checksum.hpp"
#include "wire/http.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

struct Request {
  std::string_view method;
  std::string query;  // "?key=..."
  wire::HttpHeaders headers = {};
  std::string_view body = {};
};

class HttpStore final : public Store {
 public:
  HttpStore(base::HostPort address, std::string path)
      : address_(std::move(address)), path_(std::move(path)) {}
  std::string describe() const override { return "http://" + base::to_string(address_) + path_; }

  // Reaches the service and learns whether it is one of ours.
  Result<> probe(Deadline deadline) {
    Backoff backoff(5, 200);
    std::optional<Error> before;  // says more than the deadline that ends the last try
    for (;;) {
      auto response = call({.method = "GET", .query = "?key=crossdock"}, deadline);
      if (response.ok() && response->status >= 500) return unexpected(*response, "GET");
      if (response.ok()) return {};
      if (!may_come_back(response.error(), deadline))
        return response.code() == Code::kDeadline && before ? *before : response.error();
      before = std::move(response).error();
      backoff.pause(deadline);
    }
  }

 private:
  static bool success(const wire::HttpMessage& response) { return response.status / 100 == 2; }
  static std::string key_query(std::string_view key) { return "?key=" + wire::percent_encode(key); }

  Result<> do_put(std::string_view key, std::string_view value, Lease lease,
                  Deadline deadline) override {
    std::string query = key_query(key);
    if (lease) {
      CROSSDOCK_CHECK_OK(needs_full("a lease"));
      query += fmt::format("&ttl_ms={}", lease->count());
    }
    CROSSDOCK_TRY(response,
                  call({.method = "PUT", .query = std::move(query), .body = value}, deadline));
    if (!success(response)) return unexpected(response, "PUT");
    return {};
  }

  Result<std::optional<Entry>> do_get(std::string_view key, Deadline deadline) override {
    CROSSDOCK_TRY(response, call({.method = "GET", .query = key_query(key)}, deadline));
    if (response.status == 404) return std::optional<Entry>{};
    if (!success(response)) return unexpected(response, "GET");
    CROSSDOCK_TRY(revision, revision_of(response));
    return std::optional<Entry>(Entry{std::move(response.body), revision});
  }

  Result<> do_remove(std::string_view key, Deadline deadline) override {
    CROSSDOCK_TRY(response, call({.method = "DELETE", .query = key_query(key)}, deadline));
    if (!success(response) && response.status != 404) return unexpected(response, "DELETE");
    return {};
  }

  Result<std::vector<std::string>> do_list(std::string_view prefix, Deadline deadline) override {
    CROSSDOCK_CHECK_OK(needs_full("list()"));
    CROSSDOCK_TRY(
        response,
        call({.method = "GET", .query = "?prefix=" + wire::percent_encode(prefix)}, deadline));
    if (!success(response)) return unexpected(response, "GET");
    std::vector<std::string> keys;
    std::string_view rest = response.body;
    while (!rest.empty()) {
      const auto end = std::min(rest.find('\n'), rest.size());
      CROSSDOCK_TRY(key, wire::percent_decode(rest.substr(0, end)));
      keys.push_back(std::move(key));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    return keys;
  }

  Result<Entry> do_wait(std::string_view key, Deadline deadline) override {
    Backoff backoff(2, 100);
    for (;;) {
      auto entry = do_get(key, deadline);
      if (entry.ok() && entry->has_value()) return std::move(**entry);
      const bool absent = entry.ok() || entry.code() == Code::kDeadline;
      if (!absent && !may_come_back(entry.error(), deadline)) return std::move(entry).error();
      if (deadline.passed())
        return make_error(Code::kDeadline,
                          fmt::format("nobody put key {} into {} in time{}",
                                      wire::quote_bytes(wire::as_bytes(key), 80), describe(),
                                      entry.ok() ? "" : " (" + entry.error().message + ")"));
      backoff.pause(deadline);
    }
  }

  Result<bool> do_compare_and_put(std::string_view key, std::uint64_t expected_revision,
                                  std::string_view value, Deadline deadline) override {
    CROSSDOCK_CHECK_OK(needs_full("compare_and_put()"));
    wire::HttpHeaders headers;
    if (expected_revision == 0)
      headers.emplace_back("If-None-Match", "*");
    else
      headers.emplace_back("If-Match", fmt::format("\"{}\"", expected_revision));
    CROSSDOCK_TRY(response, call({.method = "PUT",
                                  .query = key_query(key),
                                  .headers = std::move(headers),
                                  .body = value},
                                 deadline));
    if (response.status == 412) return false;
    if (!success(response)) return unexpected(response, "PUT");
    return true;
  }

  Result<bool> do_compare_and_remove(std::string_view key, std::uint64_t expected_revision,
                                     Deadline deadline) override {
    CROSSDOCK_CHECK_OK(needs_full("compare_and_remove()"));
    CROSSDOCK_TRY(response,
                  call({.method = "DELETE",
                        .query = key_query(key),
                        .headers = {{"If-Match", fmt::format("\"{}\"", expected_revision)}}},
                       deadline));
    if (response.status == 412) return false;
    if (!success(response)) return unexpected(response, "DELETE");
    return true;
  }

  Result<wire::HttpMessage> call(Request request, Deadline deadline) {
    auto fd = base::connect_tcp(address_, deadline);
    if (!fd.ok()) return named(std::move(fd).error());
    request.headers.emplace_back("Host", base::to_string(address_));
    request.headers.emplace_back("Connection", "close");
    request.headers.emplace_back("Accept", "*/*");
    const std::string text =
        wire::format_request(request.method, path_ + request.query, request.headers, request.body);
    Result<> sent = base::send_all(fd->get(), wire::as_bytes(text), deadline);
    // A service may refuse a body before it has read it: its answer says more than the broken pipe.
    if (!sent.ok() && sent.code() != Code::kPeerLost) return named(std::move(sent).error());
    auto response = receive(fd->get(), deadline);
    if (!response.ok()) return named(sent.ok() ? std::move(response).error() : sent.error());
    full_.store(response->header("x-crossdock-store") != nullptr, std::memory_order_relaxed);
    return response;
  }

  static Result<wire::HttpMessage> receive(int fd, Deadline deadline) {
    wire::HttpReader reader(wire::HttpReader::Side::kResponses, kMaxValueBytes);
    std::array<std::byte, 64 * 1024> chunk;
    bool any = false;
    for (;;) {
      CROSSDOCK_TRY(n, base::recv_some(fd, chunk, deadline));
      if (n == 0)
        reader.feed_end();
      else
        reader.feed(wire::Bytes(chunk).first(n));
      any = any || n != 0;
      CROSSDOCK_TRY(message, reader.next());
      if (message && message->status / 100 != 1) return std::move(*message);
      if (n == 0)
        return Error{.code = any ? Code::kCorrupt : Code::kPeerLost,
                     .scope = Scope::kPeer,
                     .retry = Retry::kLater,
                     .message = "the server closed the connection without an answer"};
    }
  }

  // The ETag of our server; a plain service gets a number that changes with the value.
  Result<std::uint64_t> revision_of(const wire::HttpMessage& response) const {
    const std::string* etag = response.header("etag");
    if (etag != nullptr && etag->size() > 2 && response.header("x-crossdock-store") != nullptr) {
      const auto revision = wire::parse_u64(std::string_view(*etag).substr(1, etag->size() - 2));
      if (revision && *revision != 0) return *revision;
      return named(
          make_error(Code::kCorrupt, "bad ETag " + wire::quote_bytes(wire::as_bytes(*etag), 32)));
    }
    return std::max<std::uint64_t>(1, wire::xxh3_64(wire::as_bytes(response.body)));
  }

  Result<> needs_full(std::string_view what) const {
    if (full_.load(std::memory_order_relaxed)) return {};
    return named(make_error(Code::kUnsupported,
                            fmt::format("{} needs a crossdock store (`crossdock store --http`), "
                                        "this is a plain HTTP service",
                                        what)));
  }

  Error unexpected(const wire::HttpMessage& response, std::string_view method) const {
    const Code code = response.status == 507   ? Code::kNoMemory
                      : response.status == 403 ? Code::kDenied
                      : response.status == 401 ? Code::kDenied
                                               : Code::kIncompatible;
    return named(make_error(
        code, fmt::format("{} was answered with {} {} {}", method, response.status, response.reason,
                          wire::quote_bytes(wire::as_bytes(response.body), 120))));
  }

  Error named(Error error) const {
    error.message = fmt::format("store {}: {}", describe(), error.message);
    return error;
  }

  base::HostPort address_;
  std::string path_;
  // Whether the last response came from a crossdock store. Relaxed: publishes nothing else.
  std::atomic<bool> full_{false};
};

}  // namespace

Result<std::shared_ptr<Store>> open_http_store(std::string_view rest, Deadline deadline) {
  const auto slash = std::min(rest.find('/'), rest.size());
  std::string path(rest.substr(slash));
  if (path.empty()) path = "/";
  const bool clean = std::all_of(
      path.begin(), path.end(), [](char c) { return c > ' ' && c < 0x7f && c != '?' && c != '#'; });
  if (!clean)
    return invalid_argument(fmt::format(
        "store URL http://{}: the path must be printable and hold no '?' or '#'", rest));
  CROSSDOCK_TRY(target, base::parse_host_port(rest.substr(0, slash), 80));
  auto store = std::make_shared<HttpStore>(std::move(target), std::move(path));
  CROSSDOCK_CHECK_OK(store->probe(deadline));
  return std::shared_ptr<Store>(std::move(store));
}

}  // namespace crossdock::rendezvous
