// StoreServer: the table behind tcp:// stores, with waiters told by push. Everything but creation
// and destruction runs on the server's loop thread.
// SPDX-License-Identifier: Apache-2.0
#include <deque>
#include <fmt/format.h>
#include <unordered_map>

#include "rendezvous/store_server.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

constexpr std::size_t kMaxWaitsPerConnection = 1024;

class TcpSession;

// The table and who waits for which key.
struct Board {
  explicit Board(const KeyTable::Limits& limits) : table(limits) {}
  KeyTable table;
  struct Waiter {
    TcpSession* session;
    std::uint64_t request_id;
  };
  std::unordered_multimap<std::string, Waiter> waiters;
};

wire::StoreReply refusal(const wire::StoreRequest& request, const Error& error) {
  return {.id = request.id, .code = error.code, .message = error.message.substr(0, 500)};
}

class TcpSession final : public Session {
 public:
  TcpSession(Board& board, ConnectionServer::Line line)
      : board_(&board), line_(std::move(line)), reader_(wire::kStoreProtocol) {}
  ~TcpSession() override {
    if (num_waits_ == 0) return;
    std::erase_if(board_->waiters,
                  [this](const auto& item) { return item.second.session == this; });
  }

  void feed(wire::Bytes bytes) override { reader_.feed(bytes); }
  Step step() override {
    if (!due_.empty()) return answer_wait();
    const auto frame = reader_.next();
    if (!frame.ok()) return refuse(frame.error());
    if (!frame->has_value()) return Step::kIdle;
    const auto request = wire::decode_store_request(**frame);
    if (!request.ok()) return refuse(request.error());
    execute(*request);
    return Step::kExecuted;
  }
  [[nodiscard]] std::size_t unfinished_bytes() const override { return reader_.buffered(); }
  [[nodiscard]] bool busy() const override { return num_waits_ != 0; }

  // It is told when there is room for the answer.
  void key_appeared(std::uint64_t request_id, const std::string& key) {
    due_.push_back({.id = request_id, .op = wire::StoreOp::kWait, .key = key});
    line_.wake();
  }

 private:
  // Tells why, then the connection ends: the stream is out of step.
  Step refuse(const Error& error) {
    reply({.code = error.code, .message = error.message.substr(0, 500)});
    return Step::kOver;
  }

  // By the time of the answer the key may be gone again; then the wait goes on.
  Step answer_wait() {
    const auto request = std::move(due_.front());
    due_.pop_front();
    --num_waits_;
    wait(request, Deadline::Clock::now());
    return Step::kExecuted;
  }

  void execute(const wire::StoreRequest& request) {
    const auto now = Deadline::Clock::now();
    switch (request.op) {
      case wire::StoreOp::kPut:
        return put(request, now);
      case wire::StoreOp::kGet:
        return get(request, now);
      case wire::StoreOp::kWait:
        return wait(request, now);
      case wire::StoreOp::kCompareAndPut:
        return compare_and_put(request, now);
      case wire::StoreOp::kCompareAndRemove:
        return reply({.id = request.id,
                      .found = board_->table.compare_and_remove(request.key,
                                                                request.expected_revision, now)});
      case wire::StoreOp::kRemove:
        board_->table.remove(request.key);
        return reply({.id = request.id});
      case wire::StoreOp::kList:
        return reply({.id = request.id, .keys = board_->table.list(request.key, now)});
    }
  }

  void put(const wire::StoreRequest& request, KeyTable::Time now) {
    constexpr std::uint64_t kLongestLeaseMs = 24ull * 3650 * 3600 * 1000;
    Lease lease;
    if (request.lease_ms != 0)
      lease = std::chrono::milliseconds(std::min(request.lease_ms, kLongestLeaseMs));
    const auto revision = board_->table.put(request.key, request.value, lease, now);
    if (!revision.ok()) return reply(refusal(request, revision.error()));
    reply({.id = request.id, .found = true, .revision = *revision});
    notify(request.key);
  }

  void get(const wire::StoreRequest& request, KeyTable::Time now) {
    const Entry* entry = board_->table.get(request.key, now);
    if (entry == nullptr) return reply({.id = request.id});
    reply({.id = request.id, .found = true, .revision = entry->revision, .value = entry->value});
  }

  void wait(const wire::StoreRequest& request, KeyTable::Time now) {
    if (board_->table.get(request.key, now) != nullptr) return get(request, now);
    if (num_waits_ >= kMaxWaitsPerConnection)
      return reply(refusal(
          request, make_error(Code::kWouldBlock, fmt::format("more than {} waits on one connection",
                                                             kMaxWaitsPerConnection))));
    ++num_waits_;
    board_->waiters.emplace(request.key, Board::Waiter{this, request.id});
  }

  void compare_and_put(const wire::StoreRequest& request, KeyTable::Time now) {
    const auto revision =
        board_->table.compare_and_put(request.key, request.expected_revision, request.value, now);
    if (!revision.ok()) return reply(refusal(request, revision.error()));
    reply({.id = request.id, .found = revision->has_value(), .revision = revision->value_or(0)});
    if (*revision) notify(request.key);
  }

  void notify(const std::string& key) {
    const auto [first, last] = board_->waiters.equal_range(key);
    if (first == last) return;
    const std::vector<std::pair<std::string, Board::Waiter>> woken(first, last);
    board_->waiters.erase(first, last);
    for (const auto& [unused, waiter] : woken)
      waiter.session->key_appeared(waiter.request_id, key);
  }

  void reply(const wire::StoreReply& answer) {
    auto frame = wire::encode_store_reply(answer);
    // Only a list can exceed a frame.
    if (!frame.ok())
      frame = wire::encode_store_reply({.id = answer.id,
                                        .code = Code::kNoMemory,
                                        .message = "the list of keys is too long for one reply; "
                                                   "use a longer prefix"});
    if (frame.ok()) line_.send(*frame);
  }

  Board* board_;
  ConnectionServer::Line line_;
  wire::FrameReader reader_;
  std::deque<wire::StoreRequest> due_;  // waits whose keys came to be
  std::size_t num_waits_ = 0;           // on the board or due
};

}  // namespace

class StoreServer::Impl {
 public:
  explicit Impl(const KeyTable::Limits& limits) : board(limits) {}
  Board board;
  std::unique_ptr<ConnectionServer> server;  // last: its sessions use the board
};

StoreServer::StoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StoreServer::~StoreServer() = default;

Result<std::unique_ptr<StoreServer>> StoreServer::create(const StoreServerOptions& options,
                                                         Deadline deadline) {
  auto impl = std::make_unique<Impl>(options.table);
  CROSSDOCK_TRY(server, ConnectionServer::create(
                            options.address, options.limits,
                            [board = &impl->board](ConnectionServer::Line line) {
                              return std::make_unique<TcpSession>(*board, std::move(line));
                            },
                            deadline));
  impl->server = std::move(server);
  return std::unique_ptr<StoreServer>(new StoreServer(std::move(impl)));
}

const base::SocketAddress& StoreServer::address() const {
  return impl_->server->address();
}
std::string StoreServer::url() const {
  return "tcp://" + address().to_string();
}
std::size_t StoreServer::num_connections() {
  return impl_->server->num_connections();
}

}  // namespace crossdock::rendezvous
