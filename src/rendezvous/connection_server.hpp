// What the TCP and the HTTP store server share: one loop thread that accepts connections, feeds
// their bytes to a session each and sends what the sessions answer. A client that is silent in the
// middle of a message, does not read its replies, or is one too many, is dropped; none can hold up
// another. Sessions run on the loop's thread.
//
// Requests are small and answers may be large. So a session executes one request at a time, and
// none while its client has more to read than max_unsent_bytes, or all clients together more than
// max_unsent_total_bytes: the connection is *held* then, and not read. It goes on when its client,
// or the others, have read. While the common room is used up, who has not read all of its answers
// within stall_timeout may be dropped, the slowest first and one at a time: where many share a
// narrow line, dropping all of them would serve nobody.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "base/event_loop.hpp"
#include "base/socket.hpp"
#include "wire/codec.hpp"

namespace crossdock::rendezvous {

struct ServerLimits {
  std::size_t max_connections = 4096;
  std::size_t max_buffered_bytes = std::size_t{256} << 20;  // of all unfinished requests together
  // Answers that were not sent: of one connection, and of all, before it is held.
  std::size_t max_unsent_bytes = std::size_t{64} << 20;
  std::size_t max_unsent_total_bytes = std::size_t{512} << 20;
  // To finish a request once begun, and to take a reply.
  std::chrono::milliseconds stall_timeout{10'000};
  // After which a host that does not even answer the kernel is gone, with all its connections: one
  // that waits sends nothing, so nothing else would tell.
  std::chrono::milliseconds silence{30'000};
};

// The protocol of one connection.
class Session {
 public:
  // kOver: the connection is closed once everything sent has left.
  enum class Step : std::uint8_t { kExecuted, kIdle, kOver };
  virtual ~Session() = default;
  virtual void feed(wire::Bytes bytes) = 0;
  // Executes one request of what was fed, or answers one that waited.
  virtual Step step() = 0;
  // Bytes of requests that were not executed; 0 between requests.
  [[nodiscard]] virtual std::size_t unfinished_bytes() const = 0;
  // Waiting for something: not to be taken for idle.
  [[nodiscard]] virtual bool busy() const { return false; }
};

class ConnectionServer {
 public:
  // What a session does with its connection, on the loop's thread.
  struct Line {
    std::function<void(wire::Bytes)> send;  // within step()
    std::function<void()> wake;  // has step() called, soon: something came to be that it waits for
  };
  using MakeSession = std::function<std::unique_ptr<Session>(Line)>;

  static Result<std::unique_ptr<ConnectionServer>> create(const base::HostPort& address,
                                                          const ServerLimits& limits,
                                                          MakeSession make_session,
                                                          Deadline deadline);
  // Closes every connection and joins the loop.
  ~ConnectionServer();

  [[nodiscard]] const base::SocketAddress& address() const { return listener_.address; }
  [[nodiscard]] base::EventLoop& loop() { return *loop_; }
  [[nodiscard]] std::size_t num_connections();

 private:
  using Clock = Deadline::Clock;
  struct Connection {
    base::UniqueFd fd = {};
    std::unique_ptr<Session> session = {};
    std::vector<std::byte> unsent = {};
    std::size_t sent = 0;       // of unsent
    std::size_t buffered = 0;   // as last counted into num_buffered_
    std::uint32_t watched = 0;  // epoll events
    bool closing = false;       // after the last byte was sent
    bool held = false;          // there may be requests to execute when there is room
    bool in_line = false;       // in waiting_
    bool serving = false;       // inside step()
    Clock::time_point last_request = Clock::now();
    Clock::time_point last_sent = Clock::now();
    Clock::time_point unsent_since = {};   // when there was nothing
    std::size_t sent_since = 0;            // bytes, from then on
    Clock::time_point message_start = {};  // of the unfinished request
    [[nodiscard]] std::size_t num_unsent() const { return unsent.size() - sent; }
  };

  explicit ConnectionServer(const ServerLimits& limits) : limits_(limits) {}
  void accept_all();
  void pause_accepting();
  void adopt(base::UniqueFd fd);
  bool drop_longest_idle();
  void on_event(int fd, std::uint32_t events);
  bool read_from(Connection& connection);
  [[nodiscard]] bool room_for_all() const { return num_unsent_ <= limits_.max_unsent_total_bytes; }
  [[nodiscard]] bool room_for(const Connection& connection) const {
    return connection.num_unsent() <= limits_.max_unsent_bytes && room_for_all();
  }
  void serve(Connection& connection);
  void go_on(Connection& connection);
  void serve_others();
  bool flush(Connection& connection);
  void send(int fd, wire::Bytes bytes);
  void update_watch(Connection& connection);
  void count_buffered(Connection& connection);
  void drop(int fd);
  void drop_stalled();
  [[nodiscard]] bool stalled(const Connection& connection, Clock::time_point now) const;
  // Who takes up common room for too long at the lowest rate; null when there is no such one.
  [[nodiscard]] const Connection* slowest_reader(Clock::time_point now) const;
  void arm_stall_timer();

  ServerLimits limits_;
  MakeSession make_session_;
  base::Listener listener_;
  // Used on the loop's thread only, except by the destructor once the loop has stopped.
  std::unordered_map<int, std::unique_ptr<Connection>> connections_;
  std::size_t num_buffered_ = 0;
  std::size_t num_unsent_ = 0;
  std::vector<int> woken_;   // their sessions have something to answer
  std::deque<int> waiting_;  // held, and not by their own client; longest first
  bool stall_timer_armed_ = false;
  std::unique_ptr<base::EventLoop> loop_;
};

}  // namespace crossdock::rendezvous
