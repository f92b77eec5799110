// Clients that ask for far more than they read: the server answers as far as there is room, the
// rest when they have read, and nobody else waits for them.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdio>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <thread>

#include "base/socket.hpp"
#include "rendezvous/store.hpp"
#include "rendezvous/store_server.hpp"
#include "support/process_use.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

using namespace std::chrono_literals;
using base::UniqueFd;
using testing::resident_kib;

constexpr std::size_t kMiB = std::size_t{1} << 20;

Deadline soon() {
  return Deadline::in(60s);
}

#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
constexpr bool kKeepsWhatWasFreed = true;
#else
constexpr bool kKeepsWhatWasFreed = false;
#endif

// Of the process, in what it has grown since this was made.
class Growth {
 public:
  Growth() {
    if (kKeepsWhatWasFreed)
      std::puts("the memory it takes is not judged: this sanitizer keeps what was freed");
  }
  void look() { most_ = std::max(most_, resident_kib()); }
  [[nodiscard]] std::size_t most_mib() const {
    return kKeepsWhatWasFreed ? 0 : (most_ - start_) / 1024;
  }

 private:
  std::size_t start_ = resident_kib();
  std::size_t most_ = start_;
};

// One connection that asks and reads by hand.
template <class Server>
class Client {
 public:
  explicit Client(const Server& server)
      : fd_(base::connect_tcp(server.address(), soon()).value()) {}
  void ask(int times, wire::StoreOp op = wire::StoreOp::kGet) {
    std::string requests;
    for (int i = 0; i < times; ++i) {
      if constexpr (std::is_same_v<Server, StoreServer>)
        requests += wire::as_text(
            wire::encode_store_request({.id = std::uint64_t(i), .op = op, .key = "k"}).value());
      else
        requests += "GET /metadata?key=k HTTP/1.1\r\nHost: x\r\n\r\n";
    }
    ASSERT_TRUE(base::send_all(fd_.get(), wire::as_bytes(requests), soon()).ok());
  }
  // Little that is sent to it fits into its socket.
  void keep_little() {
    const int bytes = 64 * 1024;
    ASSERT_EQ(::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes), 0);
  }
  // Waits until the server has begun to answer.
  [[nodiscard]] bool is_answered() const {
    pollfd poll_fd{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    return ::poll(&poll_fd, 1, soon().remaining_ms()) == 1;
  }
  // What is there now. False once the server has closed.
  bool read() {
    std::array<std::byte, 64 * 1024> chunk;
    for (;;) {
      const auto n = base::recv_now(fd_.get(), chunk);
      if (!n.ok() || *n == std::size_t{0}) return false;
      if (!*n) return true;
      got_ += **n;
    }
  }
  // At most `most` of it. False once the server has closed.
  bool read_some(std::size_t most) {
    std::vector<std::byte> chunk(most);
    const auto n = base::recv_now(fd_.get(), chunk);
    if (!n.ok() || *n == std::size_t{0}) return false;
    got_ += n->value_or(0);
    return true;
  }
  // Until it has `bytes`, or the server has closed.
  void read_until(std::size_t bytes) {
    const Deadline deadline = soon();
    while (got_ < bytes && read())
      ASSERT_FALSE(deadline.passed());
  }
  [[nodiscard]] std::size_t got() const { return got_; }
  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::size_t got_ = 0;
};

template <class Server>
class StoreRoom : public ::testing::Test {
 protected:
  void serve(const ServerLimits& limits, std::size_t value_bytes) {
    StoreServerOptions options;
    options.limits = limits;
    server = Server::create(options, soon()).value();
    store = open_store(server->url(), soon()).value();
    store->put("k", std::string(value_bytes, 'v'), {}, soon()).value();
  }
  // Every client reads until it has `bytes`.
  static void read_all(std::vector<Client<Server>>& clients, std::size_t bytes, Growth& growth) {
    const Deadline deadline = soon();
    const auto short_of = [&](const Client<Server>& client) { return client.got() < bytes; };
    while (std::ranges::any_of(clients, short_of)) {
      ASSERT_FALSE(deadline.passed());
      for (auto& client : clients)
        ASSERT_TRUE(client.read()) << client.got() << " of " << bytes;
      growth.look();
    }
  }

  std::unique_ptr<Server> server;
  std::shared_ptr<Store> store;
};
using Servers = ::testing::Types<StoreServer, HttpStoreServer>;
class ServerNames {
 public:
  template <class T>
  static std::string GetName(int) {
    return std::is_same_v<T, StoreServer> ? "tcp" : "http";
  }
};
TYPED_TEST_SUITE(StoreRoom, Servers, ServerNames);

TYPED_TEST(StoreRoom, OneClientsAnswersWaitUntilItReads) {
  constexpr int kTimes = 300;
  this->serve({.max_unsent_bytes = 4 * kMiB}, kMiB);
  Growth growth;
  std::vector<Client<TypeParam>> clients;
  clients.emplace_back(*this->server).ask(kTimes);
  ASSERT_TRUE(this->store->get("k", soon()).ok());  // by then it has looked at the others
  growth.look();
  EXPECT_LT(growth.most_mib(), 40u);
  this->read_all(clients, kTimes * kMiB, growth);
  EXPECT_LT(growth.most_mib(), 40u) << "while it was read";
}

TYPED_TEST(StoreRoom, ManyClientsAnswersWaitUntilTheyRead) {
#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
  constexpr int kTimes = 3,
                kClients = 8;  // more would take longer than a server waits for a client
#else
  constexpr int kTimes = 3, kClients = 40;
#endif
  this->serve({.max_unsent_total_bytes = 16 * kMiB}, 4 * kMiB);
  Growth growth;
  std::vector<Client<TypeParam>> clients;
  for (int i = 0; i < kClients; ++i)
    clients.emplace_back(*this->server).ask(kTimes);
  this->read_all(clients, kTimes * 4 * kMiB, growth);
  EXPECT_LT(growth.most_mib(), 100u);
  EXPECT_TRUE(this->store->get("k", soon()).ok());
}

TYPED_TEST(StoreRoom, ThoseThatDoNotReadMakeRoomForOthers) {
  this->serve({.max_unsent_total_bytes = kMiB, .stall_timeout = 2s}, 16 * kMiB);
  Client<TypeParam> reads_nothing(*this->server);
  reads_nothing.keep_little();
  reads_nothing.ask(3);
  ASSERT_TRUE(reads_nothing.is_answered()) << "there is no room from now on";
  EXPECT_TRUE(this->store->get("k", soon()).ok());
  // It was dropped for that: what had not been sent by then is gone.
  reads_nothing.read_until(3 * 16 * kMiB);
  EXPECT_LT(reads_nothing.got(), 16 * kMiB) << "the other one did not wait for room";
}

TYPED_TEST(StoreRoom, ThoseThatReadTooSlowlyMakeRoomForOthers) {
  // It is sent something every 1.9 s, when it has read a third of its socket's buffer: it is not
  // stalled.
  this->serve({.max_unsent_total_bytes = kMiB, .stall_timeout = 3s}, 8 * kMiB);
  Client<TypeParam> slow(*this->server);
  slow.keep_little();
  slow.ask(3);
  ASSERT_TRUE(slow.is_answered()) << "there is no room from now on";
  std::jthread reads([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && slow.read_some(4 * 1024))
      (void)::poll(nullptr, 0, 5);  // 0.8 MB/s: one value takes 10 s
  });
  EXPECT_TRUE(this->store->get("k", Deadline::in(9s)).ok());
  reads.request_stop();
  reads.join();
  slow.read_until(3 * 8 * kMiB);
  EXPECT_LT(slow.got(), 3 * 8 * kMiB) << "the other one did not wait for room";
}

using TcpStoreRoom = StoreRoom<StoreServer>;

TEST_F(TcpStoreRoom, WaitsAreAnsweredAsThereIsRoom) {
  constexpr int kTimes = 300;
  serve({.max_unsent_bytes = 4 * kMiB}, kMiB);
  ASSERT_TRUE(store->remove("k", soon()).ok());
  Growth growth;
  std::vector<Client<StoreServer>> clients;
  clients.emplace_back(*server).ask(kTimes, wire::StoreOp::kWait);
  ASSERT_TRUE(store->put("k", std::string(kMiB, 'v'), {}, soon()).ok());
  growth.look();
  EXPECT_LT(growth.most_mib(), 40u);
  read_all(clients, kTimes * kMiB, growth);
  EXPECT_LT(growth.most_mib(), 40u) << "while it was read";
}

// Two take up the room, and a third waits for it. Both are sent something every 1.2 s at most, when
// a third of the 4 MiB is free that the server's sockets grow to: neither is stalled. When two
// seconds are over both are in the middle, and without one of them there is room.
TEST_F(TcpStoreRoom, WhoReadsFasterThanTheSlowestIsNotDropped) {
  constexpr std::size_t kBytes = 16 * kMiB;
  serve({.max_unsent_total_bytes = 14 * kMiB, .stall_timeout = 2s}, kBytes);
  ASSERT_TRUE(store->put("small", "v", {}, soon()).ok());
  std::vector<Client<StoreServer>> clients;
  for (int i = 0; i < 2; ++i) {
    clients.emplace_back(*server).keep_little();
    clients.back().ask(1);
    ASSERT_TRUE(clients.back().is_answered());
  }
  std::jthread waits([&] { EXPECT_TRUE(store->get("small", soon()).ok()); });
  const Deadline deadline = soon();
  while (clients[1].got() < kBytes) {  // at most 3.2 MB/s, and 1.2 MB/s of the other
    ASSERT_FALSE(deadline.passed());
    (void)clients[0].read_some(12 * 1024);
    ASSERT_TRUE(clients[1].read_some(32 * 1024)) << "dropped after " << clients[1].got();
    (void)::poll(nullptr, 0, 10);
  }
  clients[0].read_until(kBytes);
  EXPECT_LT(clients[0].got(), kBytes) << "nobody was dropped: this shows nothing";
}

// The time in which a client is not read is not its own.
TEST_F(TcpStoreRoom, WhoWasHeldInTheMiddleOfARequestHasTimeToFinishIt) {
  serve({.max_unsent_total_bytes = kMiB, .stall_timeout = 2s}, 16 * kMiB);
  Client<StoreServer> reads_nothing(*server);
  reads_nothing.keep_little();
  reads_nothing.ask(1);
  const std::string value(kMiB, 'w');
  const auto put =
      wire::encode_store_request({.id = 1, .op = wire::StoreOp::kPut, .key = "w", .value = value})
          .value();
  const auto half = wire::Bytes(put).first(put.size() / 2);
  ASSERT_TRUE(reads_nothing.is_answered()) << "there is no room from now on";
  Client<StoreServer> slow(*server);
  ASSERT_TRUE(base::send_all(slow.fd(), half, soon()).ok());
  ASSERT_TRUE(store->get("k", soon()).ok()) << "there is room again";
  pollfd hung_up{.fd = slow.fd(), .events = POLLIN | POLLRDHUP, .revents = 0};
  EXPECT_EQ(::poll(&hung_up, 1, 1000), 0) << "it is hung up on";
  ASSERT_TRUE(base::send_all(slow.fd(), wire::Bytes(put).subspan(half.size()), soon()).ok());
  EXPECT_TRUE(store->wait("w", Deadline::in(10s)).ok());
}

}  // namespace
}  // namespace crossdock::rendezvous
