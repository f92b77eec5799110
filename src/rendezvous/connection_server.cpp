// Connections of the store servers. Everything here runs on the loop's thread, except create() and
// the destructor.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/connection_server.hpp"

#include <array>
#include <sys/epoll.h>
#include <utility>

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
      pause_accepting();
      break;
    }
    if (!*fd) break;
    if (connections_.size() >= limits_.max_connections && !drop_longest_idle()) continue;
    adopt(std::move(**fd));
  }
  serve_others();
}

void ConnectionServer::pause_accepting() {
  loop_->change(listener_.fd.get(), 0);
  loop_->call_at(Deadline::in(kAcceptPause),
                 [this] { loop_->change(listener_.fd.get(), EPOLLIN); });
}

void ConnectionServer::adopt(base::UniqueFd fd) {
  base::bound_silence(fd.get(), limits_.silence);
  const int number = fd.get();
  auto connection = std::make_unique<Connection>();
  connection->fd = std::move(fd);
  connection->session =
      make_session_({.send = [this, number](wire::Bytes bytes) { send(number, bytes); },
                     .wake = [this, number] { woken_.push_back(number); }});
  connection->watched = EPOLLIN;
  const auto watched = loop_->watch(
      number, EPOLLIN, [this, number](std::uint32_t events) { on_event(number, events); });
  if (watched.ok()) connections_[number] = std::move(connection);
}

bool ConnectionServer::drop_longest_idle() {
  const Connection* idlest = nullptr;
  for (const auto& [fd, connection] : connections_) {
    if (connection->session->busy() || connection->held || connection->serving) continue;
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
  num_unsent_ -= it->second->num_unsent();
  // Taken out first: the session's destructor may look at the server.
  const auto gone = std::move(it->second);
  connections_.erase(it);
}

void ConnectionServer::on_event(int fd, std::uint32_t events) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  Connection& connection = *it->second;
  const bool gone = (events & (EPOLLHUP | EPOLLERR)) != 0;
  bool alive = !connection.held || !gone;  // held for one who will not read
  if (alive && (gone || (events & EPOLLIN) != 0) && !connection.closing && !connection.held)
    alive = read_from(connection);
  alive ? go_on(connection) : drop(fd);
  serve_others();
}

// False: the connection is over.
bool ConnectionServer::read_from(Connection& connection) {
  std::array<std::byte, kReadBytes> chunk;
  for (int i = 0; i < kReadsPerTurn && !connection.held; ++i) {
    const auto n = base::recv_now(connection.fd.get(), chunk);
    if (!n.ok()) return false;
    if (!*n) return true;
    // It has said all it will, and may still read what was answered. What it waits for does not
    // keep the connection: a client that gave up a wait looks the same.
    if (**n == 0) return connection.closing = true;
    connection.session->feed(wire::Bytes(chunk).first(**n));
    serve(connection);
    if (num_buffered_ > limits_.max_buffered_bytes) return false;
    if (connection.closing) return true;
  }
  return true;
}

// Executes what there is, as long as there is room for the answers.
void ConnectionServer::serve(Connection& connection) {
  connection.serving = true;
  auto step = Session::Step::kExecuted;
  while (step == Session::Step::kExecuted && room_for(connection))
    step = connection.session->step();
  connection.serving = false;
  const bool was_held = std::exchange(connection.held, step == Session::Step::kExecuted);
  // It could not go on with its request while nobody read it.
  if (was_held && !connection.held) connection.message_start = Clock::now();
  connection.closing |= step == Session::Step::kOver;
  count_buffered(connection);
}

// Sends, and executes what that makes room for. Drops a connection that is over.
void ConnectionServer::go_on(Connection& connection) {
  const int fd = connection.fd.get();
  do {
    if (connection.held && room_for(connection)) serve(connection);
    if (!flush(connection)) return drop(fd);
  } while (connection.held && room_for(connection));
  if (connection.closing && connection.num_unsent() == 0 && !connection.held) return drop(fd);
  // Without that, the event that its client has read calls.
  const bool in_line = connection.held && connection.num_unsent() <= limits_.max_unsent_bytes;
  if (in_line && !std::exchange(connection.in_line, true)) waiting_.push_back(fd);
  update_watch(connection);
}

// Last in every event: it may have woken others, or made room for them.
void ConnectionServer::serve_others() {
  while (!woken_.empty() || (!waiting_.empty() && room_for_all())) {
    const bool woken = !woken_.empty();
    const int fd = woken ? woken_.back() : waiting_.front();
    woken ? woken_.pop_back() : waiting_.pop_front();
    const auto it = connections_.find(fd);
    if (it == connections_.end()) continue;
    Connection& connection = *it->second;
    if (!woken) connection.in_line = false;
    if (!connection.closing) connection.held = true;
    go_on(connection);
  }
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
    num_unsent_ -= *n;
    connection.sent_since += *n;
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
  auto& unsent = connection.unsent;
  if (connection.num_unsent() == 0) {
    connection.last_sent = connection.unsent_since = Clock::now();
    connection.sent_since = 0;
  }
  if (connection.sent > unsent.size() / 2) {
    unsent.erase(unsent.begin(), unsent.begin() + static_cast<std::ptrdiff_t>(connection.sent));
    connection.sent = 0;
  }
  unsent.insert(unsent.end(), bytes.begin(), bytes.end());
  num_unsent_ += bytes.size();
}

void ConnectionServer::update_watch(Connection& connection) {
  std::uint32_t events = 0;
  if (!connection.closing && !connection.held) events |= EPOLLIN;
  if (connection.num_unsent() != 0) events |= EPOLLOUT;
  if (events == connection.watched) return;
  loop_->change(connection.fd.get(), events);
  connection.watched = events;
}

bool ConnectionServer::stalled(const Connection& connection, Clock::time_point now) const {
  const bool unfinished = connection.buffered != 0 && !connection.held;
  if (unfinished && now - connection.message_start >= limits_.stall_timeout) return true;
  return connection.num_unsent() != 0 && now - connection.last_sent >= limits_.stall_timeout;
}

const ConnectionServer::Connection* ConnectionServer::slowest_reader(Clock::time_point now) const {
  const Connection* slowest = nullptr;
  double lowest = 0;
  for (const auto& [fd, connection] : connections_) {
    const auto age = now - connection->unsent_since;
    if (connection->num_unsent() == 0 || age < limits_.stall_timeout) continue;
    const double rate =
        static_cast<double>(connection->sent_since) / static_cast<double>(age.count());
    if (slowest != nullptr && rate >= lowest) continue;
    slowest = connection.get();
    lowest = rate;
  }
  return slowest;
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
  if (stalled_fds.empty() && !room_for_all())
    if (const auto* slowest = slowest_reader(now)) stalled_fds.push_back(slowest->fd.get());
  for (const int fd : stalled_fds)
    drop(fd);
  if (any_unfinished) arm_stall_timer();
  serve_others();
}

// Ticks only while some connection is in the middle of something.
void ConnectionServer::arm_stall_timer() {
  if (stall_timer_armed_) return;
  stall_timer_armed_ = true;
  loop_->call_at(Deadline::in(limits_.stall_timeout / 4 + std::chrono::milliseconds(1)),
                 [this] { drop_stalled(); });
}

}  // namespace crossdock::rendezvous
