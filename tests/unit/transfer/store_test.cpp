// Engines that find each other through a metadata store.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/store.hpp"

#include <atomic>
#include <poll.h>
#include <thread>

#include "base/socket.hpp"
#include "rendezvous/store_server.hpp"
#include "support/engines.hpp"
#include "support/plain_service.hpp"
#include "support/temp_dir.hpp"
#include "transfer/publisher.hpp"
#include "wire/codec.hpp"

namespace crossdock::testing {
namespace {

EngineOptions named(const std::string& name, const std::string& store) {
  return {.name = name, .store = store, .config = {{"control.renew", "200ms"}}};
}

void expect_reaches(const std::string& store) {
  std::vector<std::byte> a(64), b(64);
  auto target = make_engine("tcp", named("decode-0", store));
  auto source = make_engine("tcp", named("prefill-0", store));
  auto local = source.register_memory(a.data(), 64).value();
  auto remote = target.register_memory(b.data(), 64).value();
  auto peer = source.open("decode-0", soon());
  ASSERT_TRUE(peer.ok()) << peer.error().describe();
  const Request request{Op::kWrite, a.data(), address_of(remote), 64};
  EXPECT_TRUE(source.transfer(*peer, std::span(&request, 1), {.deadline = soon()}).ok());
  EXPECT_EQ(source.open("decode-1", soon()).code(), Code::kNotFound);
  ASSERT_TRUE(target.close(soon()).ok());
  EXPECT_EQ(make_engine("tcp", named("x", store)).open("decode-0", soon()).code(), Code::kNotFound)
      << "close() withdraws the entry";
}

TEST(EngineStore, InProcess) {
  expect_reaches("inproc://engine-store-test");
}

TEST(EngineStore, File) {
  const support::TempDir dir;
  expect_reaches("file://" + dir.path());
}

TEST(EngineStore, Tcp) {
  auto server = rendezvous::StoreServer::create({}, soon()).value();
  expect_reaches(server->url());
}

TEST(EngineStore, Http) {
  auto server = rendezvous::HttpStoreServer::create({}, soon()).value();
  expect_reaches(server->url());
}

// It holds no leases: entries stay there until their engines close.
TEST(EngineStore, PlainHttp) {
  const support::PlainService service;
  if (!service.runs()) GTEST_SKIP() << "python3 could not be started";
  ::testing::internal::CaptureStderr();
  expect_reaches(service.url());
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("holds no leases"), std::string::npos) << log;
}

TEST(EngineStore, AStaleEntryIsNotTakenForALivingEngine) {
  const std::string url = "inproc://engine-store-stale";
  auto store = rendezvous::open_store(url, soon()).value();
  std::string entry, address;
  {
    auto dead = make_engine("tcp", named("decode-0", url));
    address = dead.address();
    entry = store->get("crossdock/segment/decode-0", soon()).value()->value;
  }
  // It died without withdrawing, and something else has its port now.
  ASSERT_TRUE(store->put("crossdock/segment/decode-0", entry, std::nullopt, soon()).ok());
  auto usurper = make_engine("tcp", {.listen = address});
  const auto opened = make_engine("tcp", named("x", url)).open("decode-0", soon());
  ASSERT_EQ(opened.code(), Code::kPeerLost) << opened.error().describe();
  EXPECT_NE(opened.error().message.find("stale"), std::string::npos) << opened.error().message;
}

TEST(EngineStore, RubbishInTheStoreIsAnError) {
  const std::string url = "inproc://engine-store-rubbish";
  auto store = rendezvous::open_store(url, soon()).value();
  auto engine = make_engine("tcp", named("x", url));
  for (const char* rubbish : {"", "x", "\x01", "not a record at all, but long enough to be one"}) {
    ASSERT_TRUE(store->put("crossdock/segment/odd", rubbish, std::nullopt, soon()).ok());
    EXPECT_FALSE(engine.open("odd", soon()).ok()) << rubbish;
  }
}

TEST(EngineStore, AStoreThatIsDownIsAnErrorWithinTheDeadline) {
  const auto begin = std::chrono::steady_clock::now();
  const auto engine = Engine::create({.name = "x",
                                      .store = "tcp://127.0.0.1:1",
                                      .config = {{"control.connect_timeout", "300ms"}}});
  EXPECT_FALSE(engine.ok());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s);
}

TEST(EngineStore, TheEntryComesBackAfterTheStoreLostIt) {
  const std::string url = "inproc://engine-store-lost";
  auto store = rendezvous::open_store(url, soon()).value();
  auto target = make_engine("tcp", named("decode-0", url));
  ASSERT_TRUE(store->remove("crossdock/segment/decode-0", soon()).ok());
  EXPECT_TRUE(store->wait("crossdock/segment/decode-0", Deadline::in(5s)).ok()) << "renewed";
}

TEST(EngineStore, ATcpStoreThatRestartsHasTheEntryAgain) {
  auto server = rendezvous::StoreServer::create({}, soon()).value();
  const std::string url = server->url();
  const auto where = base::parse_host_port(server->address().to_string()).value();
  auto target = make_engine("tcp", named("decode-0", url));
  auto source = make_engine("tcp", named("prefill-0", url));
  const auto before = source.open("decode-0", soon());
  ASSERT_TRUE(before.ok()) << before.error().describe();
  server.reset();
  EXPECT_TRUE(before->alive()) << "peers that are open need no store";
  server = rendezvous::StoreServer::create({.address = where}, soon()).value();
  auto store = rendezvous::open_store(url, soon()).value();
  EXPECT_TRUE(store->wait("crossdock/segment/decode-0", soon()).ok()) << "renewed";
  const auto again = make_engine("tcp", named("x", url)).open("decode-0", soon());
  EXPECT_TRUE(again.ok()) << again.error().describe();
}

TEST(EngineStore, AnEngineClosesAlthoughItsStoreIsGone) {
  auto server = rendezvous::StoreServer::create({}, soon()).value();
  auto engine = make_engine("tcp", named("decode-0", server->url()));
  server.reset();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(engine.close(soon()).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
}

// Something listens there that is no store: it says `answer` to everybody, or nothing.
class NoStore {
 public:
  explicit NoStore(std::string answer, const base::HostPort& where = {"127.0.0.1", 0})
      : listener_(std::move(base::listen_tcp(where, soon())).value()),
        answer_(std::move(answer)),
        thread_([this] { serve(); }) {}
  ~NoStore() {
    stop_ = true;
    thread_.join();
  }
  [[nodiscard]] std::string address() const { return listener_.address.to_string(); }

 private:
  void serve() {
    std::vector<base::UniqueFd> taken;
    while (!stop_) {
      const auto ready = base::wait_ready(listener_.fd.get(), POLLIN, Deadline::in(20ms));
      if (!ready.ok() || !*ready) continue;
      auto fd = base::accept_tcp(listener_.fd.get());
      if (!fd.ok() || !fd->has_value()) continue;
      (void)base::send_all((*fd)->get(), wire::as_bytes(answer_), soon());
      taken.push_back(std::move(**fd));
    }
  }

  base::Listener listener_;
  const std::string answer_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST(EngineStore, WhatIsNoStoreIsAnErrorWithinTheDeadline) {
  const std::string page = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
  for (const std::string& answer : {std::string(), std::string("220 mail.example ESMTP\r\n"),
                                    std::string(5000, '\xff'), page}) {
    NoStore there(answer);
    for (const std::string scheme : {"tcp://", "http://"}) {
      const auto begin = std::chrono::steady_clock::now();
      // A web server that takes everything may pass for a store until it is asked for something.
      auto engine = Engine::create(
          {.name = "x",
           .store = scheme + there.address(),
           .config = {{"control.connect_timeout", "300ms"}, {"log.level", "error"}}});
      const bool failed = !engine.ok() || !engine->open("decode-0", Deadline::in(300ms)).ok();
      EXPECT_TRUE(failed) << scheme << " answers '" << answer.substr(0, 20) << "'";
      if (engine.ok()) {
        EXPECT_TRUE(engine->close(soon()).ok());
      }
      EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
    }
  }
}

// Where a proxy stands before the store and has nothing behind it for a moment.
TEST(EngineStore, TheAnswerOfAProxyDoesNotMakeEntriesPermanent) {
  using transfer::detail::Publisher;
  auto server = rendezvous::HttpStoreServer::create({}, soon()).value();
  const auto where = base::parse_host_port(server->address().to_string()).value();
  const std::string url = server->url();
  const auto publisher = Publisher::create(url, soon()).value();
  ASSERT_TRUE(publisher->publish("decode-0", {.address = "a:1", .instance = 1}, 1h, soon()).ok());
  server.reset();
  {
    const NoStore proxy("HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", where);
    EXPECT_EQ(publisher->find("decode-1", soon()).code(), Code::kIncompatible);
  }
  server = rendezvous::HttpStoreServer::create({.address = where}, soon()).value();
  const auto again = publisher->publish("decode-0", {.address = "a:1", .instance = 1}, 1ms, soon());
  ASSERT_TRUE(again.ok()) << again.error().describe();
  EXPECT_TRUE(publisher->leased());
  const auto store = rendezvous::open_store(url, soon()).value();
  const auto patience = Deadline::in(2s);
  while (store->get("crossdock/segment/decode-0", soon()).value() && !patience.passed())
    std::this_thread::yield();
  EXPECT_FALSE(store->get("crossdock/segment/decode-0", soon()).value()) << "it has a lease";
}

// 0.0.0.0 in a store would make every peer dial itself.
TEST(EngineStore, AnEngineThatListensEverywhereTellsAnAddressThatCanBeDialled) {
  for (const std::string everywhere : {"0.0.0.0:0", "[::]:0"}) {
    const std::string url = "inproc://engine-store-everywhere";
    auto options = named("decode-0", url);
    options.listen = everywhere;
    auto target = make_engine("tcp", options);
    EXPECT_EQ(target.address().find("0.0.0.0"), std::string::npos);
    EXPECT_EQ(target.address().find("[::]"), std::string::npos);
    auto source = make_engine("tcp", named("prefill-0", url));
    const auto peer = source.open("decode-0", soon());
    ASSERT_TRUE(peer.ok()) << peer.error().describe();
    EXPECT_EQ(peer->instance(), target.instance());
  }
}

TEST(EngineStore, TheAdvertisedAddressIsTheOneThatPeersDial) {
  const std::string url = "inproc://engine-store-advertise";
  std::string port;
  {
    const auto address = make_engine("tcp").address();
    port = address.substr(address.rfind(':'));
  }
  auto options = named("decode-0", url);
  options.listen = "0.0.0.0" + port;
  options.advertise = "localhost" + port;
  auto target = make_engine("tcp", options);
  EXPECT_EQ(target.address(), "localhost" + port);
  auto store = rendezvous::open_store(url, soon()).value();
  const auto entry = store->get("crossdock/segment/decode-0", soon()).value().value();
  EXPECT_NE(entry.value.find("localhost" + port), std::string::npos);
  EXPECT_EQ(entry.value.find("0.0.0.0"), std::string::npos);
  auto source = make_engine("tcp", named("prefill-0", url));
  const auto peer = source.open("decode-0", soon());
  ASSERT_TRUE(peer.ok()) << peer.error().describe();
  EXPECT_EQ(peer->instance(), target.instance());

  // The other way round: nobody listens where it says, and that is what peers are told.
  options.name = "decode-1";
  options.listen = {};
  options.advertise = "127.0.0.1:1";
  auto lost = make_engine("tcp", options);
  const auto refused = source.open("decode-1", soon());
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("127.0.0.1:1"), std::string::npos);
}

}  // namespace
}  // namespace crossdock::testing
