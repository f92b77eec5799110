// Connections of the store servers. Everything here runs on the loop's thread, except create() and
// the destructor.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/connection_server.hpp"

#include <array>
#include <sys/epoll.h>

namespace crossdock::rendezvous {
namespace {

constexpr std::size_t kReadBytes = 64 * 1024;
// Reads of one connection before the others get their turn.
constexpr int kReadsPerTurn = 16;
constexpr std::chrono::milliseconds kAcceptPause{100};

}  // namespace

Result<std::unique_ptr<ConnectionServer>> ConnectionServer::create(const base::HostPort& address,
                                                                   const ServerLimits& limits,
                                                                   MakeSession make_session,
                                                                   Deadline deadline) {
  std::unique_ptr<ConnectionServer> server(new ConnectionServer(limits));
  server->make_session_ = std::move(make_session);
  CROSSDOCK_TRY(listener, base::listen_tcp(address, deadline));
  server->listener_ = std::move(listener);
  CROSSDOCK_TRY(loop, base::EventLoop::create("cd-store"));
  server->loop_ = std::move(loop);
  Result<> watching;
  server->loop_->run([raw = server.get(), &watching] {
    watching = raw->loop_->watch(raw->listener_.fd.get(), EPOLLIN,
                                 [raw](std::uint32_t) { raw->accept_all(); });
  });
  CROSSDOCK_CHECK_OK(watching);
  return server;
}

// The loop is the last member and so ends first; its thread uses loop_ until then, which is why
// this is no loop_.reset() (that would clear the pointer before the thread has ended).
ConnectionServer::~ConnectionServer() = default;

std::size_t ConnectionServer::num_connections() {
  std::size_t n = 0;
  loop_->run([&] { n = connections_.size(); });
  return n;
}

void ConnectionServer::accept_all() {
  for (;;) {
    auto fd = base::accept_tcp(listener_.fd.get());
    if (!fd.ok()) {
      // Out of descriptors: make room, else look again later instead of spinning on the event.
      if (drop_longest_idle()) continue;
      return pause_accepting();
    }
    if (!*fd) return;
    if (connections_.size() >= limits_.max_connections && !drop_longest_idle()) continue;
    adopt(std::move(**fd));
  }
}

void ConnectionServer::pause_accepting() {
  loop_->change(listener_.fd.get(), 0);
  loop_->call_at(Deadline::in(kAcceptPause),
                 [this] { loop_->change(listener_.fd.get(), EPOLLIN); });
}

void ConnectionServer::adopt(base::UniqueFd fd) {
  const int number = fd.get();
  auto connection = std::make_unique<Connection>();
  connection->fd = std::move(fd);
  connection->session = make_session_([this, number](wire::Bytes bytes) { send(number, bytes); });
  connection->watched = EPOLLIN;
  const auto watched = loop_->watch(
      number, EPOLLIN, [this, number](std::uint32_t events) { on_event(number, events); });
  if (watched.ok()) connections_[number] = std::move(connection);
}

bool ConnectionServer::drop_longest_idle() {
  const Connection* idlest = nullptr;
  for (const auto& [fd, connection] : connections_) {
    if (connection->session->busy() || connection->reading) continue;
    if (idlest == nullptr || connection->last_request < idlest->last_request)
      idlest = connection.get();
  }
  if (idlest != nullptr) drop(idlest->fd.get());
  return idlest != nullptr;
}

void ConnectionServer::drop(int fd) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  loop_->unwatch(fd);
  num_buffered_ -= it->second->buffered;
  // Taken out first: the session's destructor may look at the server.
  const auto gone = std::move(it->second);
  connections_.erase(it);
}

void ConnectionServer::on_event(int fd, std::uint32_t events) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  Connection& connection = *it->second;
  bool alive = true;
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !connection.closing)
    alive = read_from(connection);
  if (alive) alive = flush(connection);
  if (!alive || (connection.closing && connection.num_unsent() == 0)) return drop(fd);
  update_watch(connection);
}

// False: the connection is over.
bool ConnectionServer::read_from(Connection& connection) {
  std::array<std::byte, kReadBytes> chunk;
  for (int i = 0; i < kReadsPerTurn; ++i) {
    const auto n = base::recv_now(connection.fd.get(), chunk);
    if (!n.ok()) return false;
    if (!*n) return true;
    // It has said all it will, and may still read what was answered. What it waits for does not
    // keep the connection: a client that gave up a wait looks the same.
    if (**n == 0) return connection.closing = true;
    connection.reading = true;
    const bool go_on = connection.session->on_bytes(wire::Bytes(chunk).first(**n));
    connection.reading = false;
    count_buffered(connection);
    if (num_buffered_ > limits_.max_buffered_bytes) return false;
    if (!go_on) return connection.closing = true;
    if (connection.num_unsent() > limits_.max_unsent_bytes) return true;
  }
  return true;
}

void ConnectionServer::count_buffered(Connection& connection) {
  const std::size_t now_buffered = connection.session->unfinished_bytes();
  const bool began = now_buffered != 0 && connection.buffered == 0;
  if (now_buffered < connection.buffered || now_buffered == 0)
    connection.last_request = Clock::now();
  // A request that followed another within one read counts from now, too.
  if (began || now_buffered < connection.buffered) connection.message_start = Clock::now();
  num_buffered_ = num_buffered_ - connection.buffered + now_buffered;
  connection.buffered = now_buffered;
  if (now_buffered != 0) arm_stall_timer();
}

bool ConnectionServer::flush(Connection& connection) {
  while (connection.num_unsent() != 0) {
    const auto n = base::send_now(connection.fd.get(),
                                  wire::Bytes(connection.unsent).subspan(connection.sent));
    if (!n.ok()) return false;
    if (*n == 0) break;
    connection.sent += *n;
    connection.last_sent = Clock::now();
  }
  if (connection.num_unsent() == 0) {
    connection.unsent.clear();
    connection.unsent.shrink_to_fit();
    connection.sent = 0;
  } else {
    arm_stall_timer();
  }
  return true;
}

void ConnectionServer::send(int fd, wire::Bytes bytes) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  Connection& connection = *it->second;
  if (connection.num_unsent() == 0) connection.last_sent = Clock::now();
  connection.unsent.insert(connection.unsent.end(), bytes.begin(), bytes.end());
  // While it reads, on_event() flushes afterwards; otherwise the writable event does.
  if (!connection.reading) update_watch(connection);
}

void ConnectionServer::update_watch(Connection& connection) {
  std::uint32_t events = 0;
  if (!connection.closing && connection.num_unsent() <= limits_.max_unsent_bytes) events |= EPOLLIN;
  if (connection.num_unsent() != 0) events |= EPOLLOUT;
  if (events == connection.watched) return;
  loop_->change(connection.fd.get(), events);
  connection.watched = events;
}

bool ConnectionServer::stalled(const Connection& connection, Clock::time_point now) const {
  if (connection.buffered != 0 && now - connection.message_start >= limits_.stall_timeout)
    return true;
  return connection.num_unsent() != 0 && now - connection.last_sent >= limits_.stall_timeout;
}

void ConnectionServer::drop_stalled() {
  stall_timer_armed_ = false;
  const auto now = Clock::now();
  std::vector<int> stalled_fds;
  bool any_unfinished = false;
  for (const auto& [fd, connection] : connections_) {
    if (stalled(*connection, now))
      stalled_fds.push_back(fd);
    else if (connection->buffered != 0 || connection->num_unsent() != 0)
      any_unfinished = true;
  }
  for (const int fd : stalled_fds)
    drop(fd);
  if (any_unfinished) arm_stall_timer();
}

// Ticks only while some connection is in the middle of something.
void ConnectionServer::arm_stall_timer() {
  if (stall_timer_armed_) return;
  stall_timer_armed_ = true;
  loop_->call_at(Deadline::in(limits_.stall_timeout / 4 + std::chrono::milliseconds(1)),
                 [this] { drop_stalled(); });
}

}  // namespace crossdock::rendezvous
