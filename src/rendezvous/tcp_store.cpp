// Client of a StoreServer. Thread-safe: the pool of idle connections is guarded, an exchange owns
// its connection. SPDX-License-Identifier: Apache-2.0
#include "rendezvous/tcp_store.hpp"

#include <array>
#include <atomic>
#include <fmt/format.h>
#include <mutex>

#include "base/address.hpp"
#include "base/socket.hpp"
#include "rendezvous/retry.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

using base::UniqueFd;

constexpr std::size_t kMaxIdle = 8;

class TcpStore final : public Store {
 public:
  TcpStore(base::HostPort address, std::chrono::milliseconds silence)
      : address_(std::move(address)), silence_(silence) {}
  std::string describe() const override { return "tcp://" + base::to_string(address_); }

  // Reaches the server and sees that it speaks the protocol.
  Result<> probe(Deadline deadline) {
    Backoff backoff(5, 200);
    std::optional<Error> before;  // says more than the deadline that ends the last try
    for (;;) {
      auto reply = call({.op = wire::StoreOp::kGet, .key = "crossdock"}, deadline);
      if (reply.ok()) return {};
      if (!may_come_back(reply.error(), deadline))
        return reply.code() == Code::kDeadline && before ? *before : reply.error();
      before = std::move(reply).error();
      backoff.pause(deadline);
    }
  }

 private:
  Result<> do_put(std::string_view key, std::string_view value, Lease lease,
                  Deadline deadline) override {
    CROSSDOCK_CHECK_OK(call({.op = wire::StoreOp::kPut,
                             .key = std::string(key),
                             .value = std::string(value),
                             .lease_ms = lease ? static_cast<std::uint64_t>(lease->count()) : 0},
                            deadline));
    return {};
  }

  Result<std::optional<Entry>> do_get(std::string_view key, Deadline deadline) override {
    CROSSDOCK_TRY(reply, call({.op = wire::StoreOp::kGet, .key = std::string(key)}, deadline));
    if (!reply.found) return std::optional<Entry>{};
    return std::optional<Entry>(Entry{std::move(reply.value), reply.revision});
  }

  Result<> do_remove(std::string_view key, Deadline deadline) override {
    CROSSDOCK_CHECK_OK(call({.op = wire::StoreOp::kRemove, .key = std::string(key)}, deadline));
    return {};
  }

  Result<std::vector<std::string>> do_list(std::string_view prefix, Deadline deadline) override {
    CROSSDOCK_TRY(reply, call({.op = wire::StoreOp::kList, .key = std::string(prefix)}, deadline));
    return std::move(reply.keys);
  }

  Result<Entry> do_wait(std::string_view key, Deadline deadline) override {
    Backoff backoff(5, 200);
    for (;;) {
      auto reply = call({.op = wire::StoreOp::kWait, .key = std::string(key)}, deadline);
      if (reply.ok()) return Entry{std::move(reply->value), reply->revision};
      const bool again = may_come_back(reply.error(), deadline);
      if (!again && reply.code() == Code::kDeadline)
        return make_error(Code::kDeadline, fmt::format("nobody put key {} into {} in time ({})",
                                                       wire::quote_bytes(wire::as_bytes(key), 80),
                                                       describe(), reply.error().message));
      if (!again) return std::move(reply).error();
      backoff.pause(deadline);
    }
  }

  Result<bool> do_compare_and_put(std::string_view key, std::uint64_t expected_revision,
                                  std::string_view value, Deadline deadline) override {
    CROSSDOCK_TRY(reply, call({.op = wire::StoreOp::kCompareAndPut,
                               .key = std::string(key),
                               .value = std::string(value),
                               .expected_revision = expected_revision},
                              deadline));
    return reply.found;
  }

  Result<bool> do_compare_and_remove(std::string_view key, std::uint64_t expected_revision,
                                     Deadline deadline) override {
    CROSSDOCK_TRY(reply, call({.op = wire::StoreOp::kCompareAndRemove,
                               .key = std::string(key),
                               .expected_revision = expected_revision},
                              deadline));
    return reply.found;
  }

  // Doing it twice is the same as doing it once.
  static bool repeatable(wire::StoreOp op) {
    return op != wire::StoreOp::kCompareAndPut && op != wire::StoreOp::kCompareAndRemove;
  }

  Result<wire::StoreReply> call(wire::StoreRequest request, Deadline deadline) {
    request.id = next_id_.fetch_add(1, std::memory_order_relaxed) + 1;
    CROSSDOCK_TRY(frame, wire::encode_store_request(request));
    UniqueFd fd = take_idle();
    if (fd) {
      auto reply = exchange(fd, frame, request.id, deadline);
      // The server may have ended this old connection while the request was under way.
      if (reply.code() != Code::kPeerLost || !repeatable(request.op)) return reply;
    }
    Result<UniqueFd> fresh = base::connect_tcp(address_, deadline);
    if (!fresh.ok()) return named(std::move(fresh).error());
    // Who only waits would never learn that the server's host is gone, or came back without it.
    base::bound_silence(fresh->get(), silence_);
    return exchange(*fresh, frame, request.id, deadline);
  }

  Result<wire::StoreReply> exchange(UniqueFd& fd, wire::Bytes request, std::uint64_t id,
                                    Deadline deadline) {
    Result<> sent = base::send_all(fd.get(), request, deadline);
    if (!sent.ok()) return named(std::move(sent).error());
    Result<wire::StoreReply> reply = receive(fd.get(), deadline);
    if (!reply.ok()) return named(std::move(reply).error());
    if (reply->id != id && reply->id != 0)
      return named(make_error(Code::kCorrupt,
                              fmt::format("answered request {} instead of {}", reply->id, id)));
    if (reply->code != Code::kOk) return named(make_error(reply->code, reply->message));
    if (reply->id == 0) return named(make_error(Code::kCorrupt, "answered no request"));
    give_idle(std::move(fd));
    return reply;
  }

  static Result<wire::StoreReply> receive(int fd, Deadline deadline) {
    wire::FrameReader reader(wire::kStoreProtocol);
    std::array<std::byte, 64 * 1024> chunk;
    for (;;) {
      CROSSDOCK_TRY(n, base::recv_some(fd, chunk, deadline));
      if (n == 0)
        return Error{.code = Code::kPeerLost,
                     .scope = Scope::kPeer,
                     .retry = Retry::kLater,
                     .message = "the server closed the connection without an answer"};
      reader.feed(wire::Bytes(chunk).first(n));
      CROSSDOCK_TRY(frame, reader.next());
      if (frame) return wire::decode_store_reply(*frame);
    }
  }

  Error named(Error error) const {
    error.message = fmt::format("store {}: {}", describe(), error.message);
    return error;
  }

  // An idle connection that the server has not closed meanwhile.
  UniqueFd take_idle() {
    const std::lock_guard lock(mutex_);
    while (!idle_.empty()) {
      UniqueFd fd = std::move(idle_.back());
      idle_.pop_back();
      std::byte unexpected[1];
      const auto n = base::recv_now(fd.get(), unexpected);
      if (n.ok() && !n->has_value()) return fd;
    }
    return {};
  }

  void give_idle(UniqueFd fd) {
    const std::lock_guard lock(mutex_);
    if (idle_.size() < kMaxIdle) idle_.push_back(std::move(fd));
  }

  base::HostPort address_;
  std::chrono::milliseconds silence_;
  std::atomic<std::uint64_t> next_id_{0};
  std::mutex mutex_;  // guards idle_
  std::vector<UniqueFd> idle_;
};

}  // namespace

Result<std::shared_ptr<Store>> open_tcp_store(std::string_view address, Deadline deadline,
                                              std::chrono::milliseconds silence) {
  if (address.ends_with('/')) address.remove_suffix(1);
  CROSSDOCK_TRY(target, base::parse_host_port(address));
  if (target.port == 0)
    return invalid_argument(
        fmt::format("store URL tcp://{} needs a port, as in tcp://host:7000", address));
  auto store = std::make_shared<TcpStore>(std::move(target), silence);
  CROSSDOCK_CHECK_OK(store->probe(deadline));
  return std::shared_ptr<Store>(std::move(store));
}

}  // namespace crossdock::rendezvous
