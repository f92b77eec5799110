// What the TCP and the HTTP store server share: one loop thread that accepts connections, feeds
// their bytes to a session each and sends what the sessions answer. A client that is silent in the
// middle of a message, does not read its replies, or is one too many, is dropped; none can hold up
// another. Sessions run on the loop's thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
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
  std::size_t max_unsent_bytes = std::size_t{64} << 20;     // per connection, before it is not read
  // To finish a request once begun, and to take a reply.
  std::chrono::milliseconds stall_timeout{10'000};
};

// The protocol of one connection. `send` of the connection may be called at any time on the loop's
// thread until the session is destroyed.
class Session {
 public:
  virtual ~Session() = default;
  // False: the connection is closed once everything sent has left.
  virtual bool on_bytes(wire::Bytes bytes) = 0;
  // Bytes of a request that is not whole yet; 0 between requests.
  [[nodiscard]] virtual std::size_t unfinished_bytes() const = 0;
  // Waiting for something: not to be taken for idle.
  [[nodiscard]] virtual bool busy() const { return false; }
};

class ConnectionServer {
 public:
  using Send = std::function<void(wire::Bytes)>;
  using MakeSession = std::function<std::unique_ptr<Session>(Send)>;

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
    bool reading = false;       // inside on_bytes()
    Clock::time_point last_request = Clock::now();
    Clock::time_point last_sent = Clock::now();
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
  bool flush(Connection& connection);
  void send(int fd, wire::Bytes bytes);
  void update_watch(Connection& connection);
  void count_buffered(Connection& connection);
  void drop(int fd);
  void drop_stalled();
  [[nodiscard]] bool stalled(const Connection& connection, Clock::time_point now) const;
  void arm_stall_timer();

  ServerLimits limits_;
  MakeSession make_session_;
  base::Listener listener_;
  // Used on the loop's thread only, except by the destructor once the loop has stopped.
  std::unordered_map<int, std::unique_ptr<Connection>> connections_;
  std::size_t num_buffered_ = 0;
  bool stall_timer_armed_ = false;
  std::unique_ptr<base::EventLoop> loop_;
};

}  // namespace crossdock::rendezvous
