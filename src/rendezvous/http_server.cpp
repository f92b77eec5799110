// HttpStoreServer: the table behind http:// stores. Everything but creation and destruction runs on
// the server's loop thread.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "rendezvous/store_server.hpp"
#include "wire/http.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

struct Answer {
  int status = 200;
  std::string body = {};
  std::uint64_t revision = 0;  // sent as ETag unless 0
};

Answer failed(const Error& error) {
  switch (error.code) {
    case Code::kNoMemory:
      return {.status = 507, .body = error.message + "\n"};
    default:
      return {.status = 400, .body = error.message + "\n"};
  }
}

// `"17"` or `W/"17"`.
std::optional<std::uint64_t> parse_etag(std::string_view text) {
  if (text.starts_with("W/")) text.remove_prefix(2);
  if (text.size() < 3 || text.front() != '"' || text.back() != '"') return std::nullopt;
  return wire::parse_u64(text.substr(1, text.size() - 2));
}

class HttpSession final : public Session {
 public:
  HttpSession(KeyTable& table, ConnectionServer::Line line)
      : table_(&table),
        line_(std::move(line)),
        reader_(wire::HttpReader::Side::kRequests, kMaxValueBytes) {}

  void feed(wire::Bytes bytes) override { reader_.feed(bytes); }
  Step step() override {
    auto message = reader_.next();
    if (!message.ok()) {
      respond(failed(message.error()), false);
      return Step::kOver;
    }
    if (!message->has_value()) return Step::kIdle;
    const bool keep = (*message)->keep_alive();
    respond(execute(**message), keep);
    return keep ? Step::kExecuted : Step::kOver;
  }
  // A head that was taken in still belongs to an unfinished request.
  [[nodiscard]] std::size_t unfinished_bytes() const override {
    return reader_.in_message() ? std::max<std::size_t>(reader_.buffered(), 1) : 0;
  }

 private:
  Answer execute(const wire::HttpMessage& request) {
    const auto target = wire::parse_target(request.target);
    if (!target.ok()) return failed(target.error());
    const auto now = Deadline::Clock::now();
    const std::string* key = target->parameter("key");
    const std::string* prefix = target->parameter("prefix");
    if (request.method == "GET" && key == nullptr && prefix != nullptr) return list(*prefix, now);
    if (key == nullptr || key->empty() || key->size() > kMaxKeyBytes)
      return {.status = 400,
              .body = fmt::format("?key= of 1 to {} bytes is needed\n", kMaxKeyBytes)};
    if (request.method == "GET") return get(*key, now);
    if (request.method == "PUT") return put(request, *target, *key, now);
    if (request.method != "DELETE") return {.status = 405, .body = "GET, PUT or DELETE\n"};
    return remove(request, *key, now);
  }

  Answer remove(const wire::HttpMessage& request, const std::string& key, KeyTable::Time now) {
    const std::string* if_match = request.header("if-match");
    if (if_match == nullptr) {
      table_->remove(key);
      return {};
    }
    const auto expected = parse_etag(*if_match);
    if (!expected) return {.status = 400, .body = "If-Match: \"revision\"\n"};
    if (!table_->compare_and_remove(key, *expected, now)) return {.status = 412};
    return {};
  }

  Answer get(const std::string& key, KeyTable::Time now) {
    const Entry* entry = table_->get(key, now);
    if (entry == nullptr) return {.status = 404};
    return {.body = entry->value, .revision = entry->revision};
  }

  Answer list(const std::string& prefix, KeyTable::Time now) {
    Answer answer;
    for (const std::string& key : table_->list(prefix, now))
      answer.body += wire::percent_encode(key) + "\n";
    if (answer.body.size() > kMaxValueBytes)
      return {.status = 507, .body = "the list is too long; use a longer prefix\n"};
    return answer;
  }

  Answer put(const wire::HttpMessage& request, const wire::HttpTarget& target,
             const std::string& key, KeyTable::Time now) {
    const std::string* if_match = request.header("if-match");
    const std::string* if_none_match = request.header("if-none-match");
    if (if_match != nullptr || if_none_match != nullptr) {
      std::optional<std::uint64_t> expected = 0;
      if (if_match != nullptr) expected = parse_etag(*if_match);
      if (!expected || (if_none_match != nullptr && *if_none_match != "*"))
        return {.status = 400, .body = "If-Match: \"revision\" or If-None-Match: *\n"};
      const auto revision = table_->compare_and_put(key, *expected, request.body, now);
      if (!revision.ok()) return failed(revision.error());
      if (!revision->has_value()) return {.status = 412};
      return {.revision = **revision};
    }
    Lease lease;
    if (const std::string* ttl = target.parameter("ttl_ms")) {
      const auto ms = wire::parse_u64(*ttl);
      constexpr std::uint64_t kLongestLeaseMs = 24ull * 3650 * 3600 * 1000;
      if (!ms || *ms == 0 || *ms > kLongestLeaseMs)
        return {.status = 400, .body = "ttl_ms must be a positive number\n"};
      lease = std::chrono::milliseconds(*ms);
    }
    const auto revision = table_->put(key, request.body, lease, now);
    if (!revision.ok()) return failed(revision.error());
    return {.revision = *revision};
  }

  void respond(const Answer& answer, bool keep_alive) {
    wire::HttpHeaders headers = {{"X-Crossdock-Store", "1"},
                                 {"Content-Type", "application/octet-stream"}};
    if (answer.revision != 0) headers.emplace_back("ETag", fmt::format("\"{}\"", answer.revision));
    if (!keep_alive) headers.emplace_back("Connection", "close");
    line_.send(wire::as_bytes(wire::format_response(answer.status, headers, answer.body)));
  }

  KeyTable* table_;
  ConnectionServer::Line line_;
  wire::HttpReader reader_;
};

}  // namespace

class HttpStoreServer::Impl {
 public:
  explicit Impl(const KeyTable::Limits& limits) : table(limits) {}
  KeyTable table;
  std::unique_ptr<ConnectionServer> server;  // last: its sessions use the table
};

HttpStoreServer::HttpStoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpStoreServer::~HttpStoreServer() = default;

Result<std::unique_ptr<HttpStoreServer>> HttpStoreServer::create(const StoreServerOptions& options,
                                                                 Deadline deadline) {
  auto impl = std::make_unique<Impl>(options.table);
  CROSSDOCK_TRY(server, ConnectionServer::create(
                            options.address, options.limits,
                            [table = &impl->table](ConnectionServer::Line line) {
                              return std::make_unique<HttpSession>(*table, std::move(line));
                            },
                            deadline));
  impl->server = std::move(server);
  return std::unique_ptr<HttpStoreServer>(new HttpStoreServer(std::move(impl)));
}

const base::SocketAddress& HttpStoreServer::address() const {
  return impl_->server->address();
}
std::string HttpStoreServer::url() const {
  return "http://" + address().to_string() + "/metadata";
}
std::size_t HttpStoreServer::num_connections() {
  return impl_->server->num_connections();
}

}  // namespace crossdock::rendezvous
