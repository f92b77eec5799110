// Clients that ask for far more than they read: the server answers as far as there is room, the
// rest when they have read, and nobody else waits for them.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <poll.h>
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

// Of the process, in what it has grown since this was made. Sanitizers keep what was freed.
class Growth {
 public:
  void look() { most_ = std::max(most_, resident_kib()); }
  [[nodiscard]] std::size_t most_mib() const {
#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
    return 0;
#endif
    return (most_ - start_) / 1024;
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
  reads_nothing.ask(3);
  EXPECT_TRUE(this->store->get("k", soon()).ok());
}

TYPED_TEST(StoreRoom, ThoseThatReadTooSlowlyMakeRoomForOthers) {
  this->serve({.max_unsent_total_bytes = kMiB, .stall_timeout = 1s}, 8 * kMiB);
  Client<TypeParam> slow(*this->server);
  slow.ask(100);
  std::jthread reads([&](const std::stop_token& stop) {
    std::array<std::byte, 4 * 1024> chunk;
    while (!stop.stop_requested()) {
      if (!base::recv_now(slow.fd(), chunk).ok()) return;
      (void)::poll(nullptr, 0, 5);  // 0.8 MB/s: one value takes 10 s
    }
  });
  EXPECT_TRUE(this->store->get("k", Deadline::in(9s)).ok());
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

}  // namespace
}  // namespace crossdock::rendezvous
