// What can go wrong between a client and a store server: restarts, silence, floods, nonsense, and a
// plain HTTP service in place of ours.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/store_server.hpp"

#include <atomic>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <thread>

#include "base/socket.hpp"
#include "rendezvous/store.hpp"
#include "support/plain_service.hpp"
#include "wire/store_protocol.hpp"

namespace crossdock::rendezvous {
namespace {

using namespace std::chrono_literals;
using base::UniqueFd;

Deadline soon() {
  return Deadline::in(10s);
}

template <class Server>
class StoreServers : public testing::Test {
 protected:
  static std::unique_ptr<Server> serve(StoreServerOptions options = {}) {
    return Server::create(options, soon()).value();
  }
};
using Servers = testing::Types<StoreServer, HttpStoreServer>;
class ServerNames {
 public:
  template <class T>
  static std::string GetName(int) {
    return std::is_same_v<T, StoreServer> ? "tcp" : "http";
  }
};
TYPED_TEST_SUITE(StoreServers, Servers, ServerNames);

base::HostPort target_of(const base::SocketAddress& address) {
  return {address.host(), address.port()};
}

// Reads until the other end closes; false when it has not by the deadline.
bool closes(int fd, Deadline deadline) {
  std::byte sink[4096];
  for (;;) {
    const auto n = base::recv_some(fd, sink, deadline);
    if (!n.ok()) return n.code() == Code::kPeerLost;
    if (*n == 0) return true;
  }
}

TYPED_TEST(StoreServers, ARestartedServerIsUsedAgain) {
  auto server = this->serve();
  StoreServerOptions same;
  same.address = target_of(server->address());
  const auto store = open_store(server->url(), soon()).value();
  ASSERT_TRUE(store->put("k", "v", {}, soon()).ok());
  server.reset();
  EXPECT_EQ(store->get("k", Deadline::in(300ms)).code(), Code::kUnreachable);
  server = this->serve(same);
  EXPECT_FALSE(store->get("k", soon()).value().has_value()) << "it starts empty";
  EXPECT_TRUE(store->put("k", "v", {}, soon()).ok());
}

TYPED_TEST(StoreServers, WaitOutlivesARestart) {
  auto server = this->serve();
  StoreServerOptions same;
  same.address = target_of(server->address());
  const auto store = open_store(server->url(), soon()).value();
  std::jthread waiter([&] {
    const auto entry = store->wait("late", Deadline::in(20s));
    ASSERT_TRUE(entry.ok()) << entry.error().describe();
    EXPECT_EQ(entry->value, "v");
  });
  server.reset();
  server = this->serve(same);
  EXPECT_TRUE(open_store(server->url(), soon()).value()->put("late", "v", {}, soon()).ok());
}

TYPED_TEST(StoreServers, OpenWaitsForAServerThatStartsLater) {
  auto server = this->serve();
  StoreServerOptions same;
  same.address = target_of(server->address());
  const std::string url = server->url();
  server.reset();
  std::jthread opener([&] { EXPECT_TRUE(open_store(url, Deadline::in(20s)).ok()); });
  server = this->serve(same);
}

TYPED_TEST(StoreServers, GarbageIsDroppedAndHurtsNobody) {
  const auto server = this->serve();
  const auto store = open_store(server->url(), soon()).value();
  std::uint64_t seed = 42;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::byte> garbage(4000);
    for (std::byte& b : garbage) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      b = static_cast<std::byte>(seed >> 56);
    }
    garbage.back() = std::byte{'\n'};
    const auto fd = base::connect_tcp(server->address(), soon()).value();
    (void)base::send_all(fd.get(), garbage, soon());  // may be cut off in the middle
    (void)base::send_all(fd.get(), wire::as_bytes("\r\n\r\n"), soon());
    EXPECT_TRUE(closes(fd.get(), soon())) << "round " << round;
  }
  EXPECT_TRUE(store->put("k", "v", {}, soon()).ok());
}

TYPED_TEST(StoreServers, SlowLorisIsDroppedAndOthersAreServedMeanwhile) {
  StoreServerOptions options;
  options.limits.stall_timeout = 200ms;
  const auto server = this->serve(options);
  const auto store = open_store(server->url(), soon()).value();
  const std::string_view begin =
      std::is_same_v<TypeParam, StoreServer> ? "XDS" : "PUT /?key=a HTTP/1.1\r\nContent-Le";
  std::vector<UniqueFd> lorises;
  for (int i = 0; i < 50; ++i) {
    lorises.push_back(base::connect_tcp(server->address(), soon()).value());
    ASSERT_TRUE(base::send_all(lorises.back().get(), wire::as_bytes(begin), soon()).ok());
  }
  const auto start = Deadline::Clock::now();
  ASSERT_TRUE(store->put("k", "v", {}, soon()).ok());
  EXPECT_LT(Deadline::Clock::now() - start, 2s) << "nobody waits for them";
  for (const UniqueFd& fd : lorises)
    EXPECT_TRUE(closes(fd.get(), soon()));
}

// As `nc -N` does.
TYPED_TEST(StoreServers, AClientThatHasSaidAllItWillGetsItsAnswers) {
  const auto server = this->serve();
  const auto store = open_store(server->url(), soon()).value();
  const std::string value(8u << 20, 'v');  // more than a socket takes at once
  ASSERT_TRUE(store->put("k", value, {}, soon()).ok());
  std::string requests;
  for (int i = 0; i < 2; ++i) {
    if constexpr (std::is_same_v<TypeParam, StoreServer>) {
      const auto frame =
          wire::encode_store_request({.id = 1, .op = wire::StoreOp::kGet, .key = "k"}).value();
      requests += wire::as_text(frame);
    } else {
      requests += "GET /metadata?key=k HTTP/1.1\r\nHost: x\r\n\r\n";
    }
  }
  const auto fd = base::connect_tcp(server->address(), soon()).value();
  ASSERT_TRUE(base::send_all(fd.get(), wire::as_bytes(requests), soon()).ok());
  ASSERT_EQ(::shutdown(fd.get(), SHUT_WR), 0);
  std::size_t got = 0;
  std::vector<std::byte> chunk(1 << 20);
  for (;;) {
    const auto n = base::recv_some(fd.get(), chunk, soon());
    ASSERT_TRUE(n.ok()) << n.error().describe();
    if (*n == 0) break;  // and then it closes
    got += *n;
  }
  EXPECT_GE(got, 2 * value.size());
}

TYPED_TEST(StoreServers, AnIdleConnectionIsKeptUntilRoomIsNeeded) {
  StoreServerOptions options;
  options.limits.max_connections = 4;
  options.limits.stall_timeout = 50ms;
  const auto server = this->serve(options);
  std::vector<UniqueFd> idle;
  for (int i = 0; i < 4; ++i)
    idle.push_back(base::connect_tcp(server->address(), soon()).value());
  while (server->num_connections() < 4) {
  }
  const auto store = open_store(server->url(), soon());
  ASSERT_TRUE(store.ok()) << store.error().describe();
  EXPECT_TRUE((*store)->put("k", "v", {}, soon()).ok());
  EXPECT_LE(server->num_connections(), 4u);
}

TYPED_TEST(StoreServers, AFullTableIsAnErrorNotACrash) {
  StoreServerOptions options;
  options.table.max_keys = 3;
  const auto server = this->serve(options);
  const auto store = open_store(server->url(), soon()).value();
  for (const char* key : {"a", "b", "c"})
    ASSERT_TRUE(store->put(key, "v", {}, soon()).ok());
  const auto full = store->put("d", "v", {}, soon());
  EXPECT_EQ(full.code(), Code::kNoMemory);
  EXPECT_NE(full.error().message.find("full"), std::string::npos) << full.error().message;
}

TYPED_TEST(StoreServers, ListensOnIpv6) {
  StoreServerOptions options;
  options.address = {"::1", 0};
  const auto server = TypeParam::create(options, soon());
  if (!server.ok()) GTEST_SKIP() << "no IPv6 loopback here: " << server.error().message;
  EXPECT_NE((*server)->url().find("[::1]:"), std::string::npos);
  const auto store = open_store((*server)->url(), soon());
  ASSERT_TRUE(store.ok()) << store.error().describe();
  EXPECT_TRUE((*store)->put("k", "v", {}, soon()).ok());
}

TYPED_TEST(StoreServers, APortInUseIsNamed) {
  const auto server = this->serve();
  StoreServerOptions same;
  same.address = target_of(server->address());
  const auto second = TypeParam::create(same, soon());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.code(), Code::kBusy);
  EXPECT_NE(second.error().message.find(server->address().to_string()), std::string::npos);
}

TYPED_TEST(StoreServers, AThousandConnectionsLeaveNothingBehind) {
  const auto server = this->serve();
  for (int i = 0; i < 1000; ++i) {
    const auto fd = base::connect_tcp(server->address(), soon());
    ASSERT_TRUE(fd.ok()) << fd.error().describe();
  }
  // Accepted after them.
  ASSERT_TRUE(open_store(server->url(), soon()).value()->put("k", "v", {}, soon()).ok());
  const Deadline deadline = soon();
  while (server->num_connections() != 0 && !deadline.passed()) {
  }
  EXPECT_EQ(server->num_connections(), 0u);
}

// A server of the wrong kind: accepts and answers every connection with `answer`, or never when it
// is empty.
class Impostor {
 public:
  explicit Impostor(std::string answer) : answer_(std::move(answer)) {
    thread_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
  }
  [[nodiscard]] std::string at() const { return listener_.address.to_string(); }

 private:
  void serve(const std::stop_token& stop) {
    std::vector<UniqueFd> open;
    while (!stop.stop_requested()) {
      if (!base::wait_ready(listener_.fd.get(), POLLIN, Deadline::in(10ms)).value()) continue;
      auto accepted = base::accept_tcp(listener_.fd.get());
      if (!accepted.ok() || !accepted->has_value()) continue;
      UniqueFd fd((*accepted)->release());
      std::byte request[4096];
      (void)base::recv_some(fd.get(), request, Deadline::in(1s));
      (void)base::send_all(fd.get(), wire::as_bytes(answer_), Deadline::in(1s));
      if (answer_.empty()) open.push_back(std::move(fd));
    }
  }
  std::string answer_;
  base::Listener listener_ = base::listen_tcp(base::HostPort{"127.0.0.1", 0}, soon()).value();
  std::jthread thread_;
};

TEST(StoreClients, ASilentServerCostsTheDeadlineAndNoMore) {
  const Impostor silent("");
  for (const std::string& url : {"tcp://" + silent.at(), "http://" + silent.at() + "/m"}) {
    const auto start = Deadline::Clock::now();
    const auto store = open_store(url, Deadline::in(150ms));
    EXPECT_EQ(store.code(), Code::kDeadline) << url;
    EXPECT_NE(store.error().message.find(silent.at()), std::string::npos);
    EXPECT_LT(Deadline::Clock::now() - start, 5s);
  }
}

TEST(StoreClients, NonsenseIsToldAsSuch) {
  const Impostor ssh("SSH-2.0-OpenSSH_9.2\r\n");
  const auto tcp = open_store("tcp://" + ssh.at(), soon());
  EXPECT_EQ(tcp.code(), Code::kIncompatible);
  EXPECT_NE(tcp.error().message.find("not a crossdock store (first bytes \"SSH-2.0"),
            std::string::npos)
      << tcp.error().message;
  const auto http = open_store("http://" + ssh.at() + "/", soon());
  EXPECT_EQ(http.code(), Code::kIncompatible);
  EXPECT_NE(http.error().message.find("SSH-2.0"), std::string::npos);

  const Impostor broken("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops");
  const auto failing = open_store("http://" + broken.at() + "/", soon());
  EXPECT_EQ(failing.code(), Code::kIncompatible);
  EXPECT_NE(failing.error().message.find("500"), std::string::npos);
}

TEST(StoreClients, AnswersCutShortAreErrors) {
  const auto frame = wire::encode_store_reply({.id = 1, .value = "value"}).value();
  const std::string half(wire::as_text(wire::Bytes(frame).first(frame.size() / 2)));
  const Impostor cut(half);
  const auto tcp = open_store("tcp://" + cut.at(), Deadline::in(300ms));
  EXPECT_EQ(tcp.code(), Code::kPeerLost);
  const Impostor cut_http("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf");
  EXPECT_EQ(open_store("http://" + cut_http.at() + "/", Deadline::in(300ms)).code(),
            Code::kCorrupt);
}

TEST(StoreClients, AnotherWireVersionIsNamed) {
  auto frame = wire::encode_store_reply({.id = 1}).value();
  wire::store_le(frame.data() + 4, std::uint16_t{kWireVersion + 1});
  const Impostor newer(std::string(wire::as_text(frame)));
  const auto store = open_store("tcp://" + newer.at(), soon());
  EXPECT_EQ(store.code(), Code::kIncompatible);
  EXPECT_NE(store.error().message.find("wire version " + std::to_string(kWireVersion + 1)),
            std::string::npos);
}

// --- a plain HTTP service ----------------------------------------------------------------------

TEST(PlainHttpService, ServesWhatItCanAndRefusesTheRestClearly) {
  const support::PlainService service;
  if (!service.runs()) GTEST_SKIP() << "python3 could not be started";
  const auto store = open_store(service.url(), soon()).value();
  const std::string key = "crossdock/ram/node 1:7000";
  EXPECT_FALSE(store->get(key, soon()).value().has_value());
  std::string value(100'000, 'v');
  value[7] = '\0';
  ASSERT_TRUE(store->put(key, value, {}, soon()).ok());
  EXPECT_TRUE(store->get(key, soon()).value()->value == value);
  EXPECT_NE(store->get(key, soon()).value()->revision, 0u);
  EXPECT_TRUE(store->wait(key, soon()).ok());
  ASSERT_TRUE(store->remove(key, soon()).ok());
  ASSERT_TRUE(store->remove(key, soon()).ok()) << "404 on removal is a success";
  EXPECT_FALSE(store->get(key, soon()).value().has_value());

  EXPECT_EQ(store->list("", soon()).code(), Code::kUnsupported);
  EXPECT_EQ(store->compare_and_put("k", 0, "v", soon()).code(), Code::kUnsupported);
  EXPECT_EQ(store->compare_and_remove("k", 1, soon()).code(), Code::kUnsupported);
  const auto leased = store->put("k", "v", 1s, soon());
  EXPECT_EQ(leased.code(), Code::kUnsupported);
  EXPECT_NE(leased.error().message.find("crossdock store --http"), std::string::npos);

  std::jthread other([&] {
    EXPECT_TRUE(barrier(*store, {.name = "b", .rank = 1, .world = 2}, Deadline::in(20s)).ok());
  });
  EXPECT_TRUE(barrier(*store, {.name = "b", .rank = 0, .world = 2}, Deadline::in(20s)).ok());
}

}  // namespace
}  // namespace crossdock::rendezvous
