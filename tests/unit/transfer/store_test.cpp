// Engines that find each other through a metadata store.
// SPDX-License-Identifier: Apache-2.0
#include "rendezvous/store.hpp"

#include "rendezvous/store_server.hpp"
#include "support/engines.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::testing {
namespace {

EngineOptions named(const std::string& name, const std::string& store) {
  return {.name = name, .store = store, .config = {{"control.renew", "200ms"}}};
}

void expect_reaches(const std::string& store) {
  auto target = make_engine("tcp", named("decode-0", store));
  auto source = make_engine("tcp", named("prefill-0", store));
  std::vector<std::byte> a(64), b(64);
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

}  // namespace
}  // namespace crossdock::testing
