// What an engine does with the sessions of its peers: when one counts as over, what ends with it,
// what a silent one costs, and what a peer may ask for.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "support/engines.hpp"
#include "support/fragile.hpp"
#include "support/raw_client.hpp"

namespace crossdock::testing {
namespace {

using transfer::Message;

class SessionOver : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Transports, SessionOver, ::testing::Values("shm", "tcp"),
                         [](const auto& over) { return std::string(over.param); });

TEST_P(SessionOver, OneOfTwoSessionsOfAnEngineEnds) {
  Pair pair(GetParam(), 4096);
  auto mailbox = pair.target.mailbox("kv").value();
  {
    RawClient second(pair.target, pair.source.name(), pair.source.instance());
    second.send(wire::Notify{.sequence = 1, .mailbox = "kv", .payload = "here"});
    EXPECT_EQ(mailbox.receive(soon()).value().payload, "here");
    second.send(wire::Bye{.reason = "done"});
    second.await_end();
  }
  // Another peer comes and goes after it: what is heard of is its end, not the source's.
  {
    RawClient third(pair.target, "third", 3);
    third.send(wire::Bye{.reason = "done"});
    third.await_end();
  }
  const auto lost = mailbox.receive(soon()).value();
  EXPECT_EQ(lost.kind, Message::Kind::kPeerLost);
  EXPECT_EQ(lost.peer, "third");
  ASSERT_TRUE(pair.run({pair.write(0, 4096)}).ok());
  EXPECT_EQ(metric(pair.source, "crossdock_shard_retries_total"), 0u) << "its lanes were not cut";
  const auto instance = pair.source.instance();
  ASSERT_TRUE(pair.source.close(soon()).ok());
  const auto last = mailbox.receive(soon()).value();
  EXPECT_EQ(last.kind, Message::Kind::kPeerLost);
  EXPECT_EQ(last.peer_instance, instance);
}

TEST_P(SessionOver, RegistrationsWhilePeersOpen) {
  constexpr std::size_t kRegions = 1500, kBytes = 256;
  std::vector<std::byte> memory(kRegions * kBytes);
  alignas(transfer::kRegionAlignment) std::byte last{};
  auto target = make_engine(GetParam());
  std::atomic<bool> stop{false};
  std::size_t registered = 0;
  std::vector<Region> regions;
  std::thread registering([&] {
    for (; registered < kRegions && !stop; ++registered)
      regions.push_back(
          target.register_memory(memory.data() + registered * kBytes, kBytes).value());
  });
  std::vector<Engine> sources;
  std::vector<Peer> peers;
  for (int i = 0; i < 25; ++i) {
    sources.push_back(make_engine(GetParam()));
    auto peer = sources.back().open(target.name(), soon());
    EXPECT_TRUE(peer.ok()) << peer.error().describe();
    if (peer.ok()) peers.push_back(std::move(*peer));
  }
  stop = true;
  registering.join();
  auto marker = target.register_memory(&last, 1, {.label = "last"}).value();
  for (const auto& peer : peers) {
    ASSERT_TRUE(peer.region("last", soon()).ok()) << "alive " << peer.alive();
    EXPECT_EQ(peer.regions().size(), registered + 1);
  }
}

// A session that this engine gave up, of a peer that may be inside a copy.
TEST(Session, MemoryStaysInUseUntilAPeerThatCopiesClosesItsEnd) {
  for (const bool copies : {true, false}) {
    auto target = make_engine("shm");
    auto mailbox = target.mailbox("kv").value();
    auto region = target.allocate(4096).value();
    RawClient peer(target, "writer", 7, copies);
    peer.send(wire::Welcome{});  // not for a client to say: the engine hangs up
    peer.await_end();
    const auto early = region.release(copies ? Deadline::in(200ms) : soon());
    const auto fenced = target.fence_instance(7, copies ? Deadline::in(200ms) : soon());
    if (copies) {
      EXPECT_EQ(early.code(), Code::kBusy);
      EXPECT_NE(early.error().message.find("writer"), std::string::npos);
      EXPECT_EQ(fenced.code(), Code::kDeadline);
      EXPECT_FALSE(mailbox.try_receive()) << "not reported lost while it may write";
    } else {
      EXPECT_TRUE(early.ok()) << early.error().describe();
      EXPECT_TRUE(fenced.ok());
    }
    peer.close();
    EXPECT_EQ(mailbox.receive(soon()).value().kind, Message::Kind::kPeerLost);
    EXPECT_TRUE(region.release(soon()).ok());
    EXPECT_TRUE(target.fence_instance(7, soon()).ok());
    EXPECT_TRUE(target.close(soon()).ok());
  }
}

TEST(Session, AByeOfAPeerThatCopiesIsItsWord) {
  auto target = make_engine("shm");
  auto region = target.allocate(4096).value();
  RawClient peer(target, "writer", 7, true);
  peer.send(wire::Bye{.reason = "done"});
  peer.await_end();
  EXPECT_TRUE(region.release(soon()).ok());
}

// It would not be asked to let go of what it learned.
TEST(Session, NobodyIsWelcomedByAnEngineThatCloses) {
  auto target = make_engine("shm");
  auto region = target.allocate(4096).value();
  RawClient slow(target, "slow", 7, true);
  std::thread closing([&] { EXPECT_TRUE(target.close(soon()).ok()); });
  const auto asked = slow.receive<wire::Revoke>();
  const auto late = RawClient::greet(target, "late", 8, true);
  EXPECT_EQ(late.code(), Code::kPeerLost) << "it waits for the slow one";
  EXPECT_TRUE(asked);
  if (asked) slow.send(wire::RevokeAck{.token = asked->token});
  closing.join();
}

TEST(Session, ASilentPeerIsLost) {
  auto target = make_engine("tcp", {.config = {{"control.silence", "200ms"}}});
  auto mailbox = target.mailbox("kv").value();
  RawClient peer(target, "silent", 7);
  const auto ping = peer.receive<wire::Ping>();
  EXPECT_TRUE(ping) << "it is asked";
  const auto lost = mailbox.receive(soon());
  ASSERT_TRUE(lost.ok());
  EXPECT_EQ(lost->kind, Message::Kind::kPeerLost);
  EXPECT_NE(lost->payload.find("control.silence"), std::string::npos) << lost->payload;
}

TEST(Session, APeerAtRestAnswersAndStays) {
  const EngineOptions attentive{.config = {{"control.silence", "3s"}}};
  Pair pair("tcp", 4096, false, attentive, attentive);
  auto mailbox = pair.target.mailbox("kv").value();
  EXPECT_EQ(mailbox.receive(Deadline::in(4s)).code(), Code::kDeadline) << "nobody was lost";
  EXPECT_TRUE(pair.peer.alive());
  EXPECT_TRUE(pair.run({pair.write(0, 4096)}).ok());
}

TEST(Session, SilenceMayBeAllowed) {
  auto target = make_engine("tcp", {.config = {{"control.silence", "0s"}}});
  auto mailbox = target.mailbox("kv").value();
  RawClient peer(target, "silent", 7);
  EXPECT_EQ(mailbox.receive(Deadline::in(500ms)).code(), Code::kDeadline);
  peer.send(wire::Notify{.sequence = 1, .mailbox = "kv", .payload = "after all"});
  EXPECT_EQ(mailbox.receive(soon()).value().payload, "after all");
}

// --- checksums that a peer asks for ---

struct Asked {
  static constexpr std::size_t kBytes = 64u << 20;
  Engine target = make_engine("tcp");
  Region region = target.allocate(kBytes).value();
  RawClient peer{target, "curious", 7};

  // The whole region, `times` over.
  void ask(std::uint64_t sequence, std::size_t times) {
    peer.send(wire::DigestRequest{
        .sequence = sequence,
        .ranges = std::vector<wire::DigestRange>(times, {address_of(region), kBytes})});
  }
};

TEST(Digest, ARequestForTooMuchIsRefused) {
  Asked asked;
  asked.ask(1, wire::kMaxDigestRanges);
  const auto reply = asked.peer.receive<wire::DigestReply>();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->code, Code::kInvalidArgument) << reply->message;
}

// Memory is hashed by a copy of the kernel's, so what is gone costs the request.
TEST(Digest, MemoryThatIsGoneIsAnErrorAndNotTheEnd) {
  const Fragile fragile;
  auto target = make_engine("tcp");
  const auto region = target.register_memory(fragile.data(), Fragile::kBytes).value();
  RawClient peer(target, "curious", 7);
  const auto ask = [&](std::size_t length) {
    peer.send(wire::DigestRequest{.sequence = 1, .ranges = {{address_of(region), length}}});
    return peer.receive<wire::DigestReply>();
  };
  fragile.lose_from(Fragile::kBytes / 2);
  const auto refused = ask(Fragile::kBytes);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, Code::kInvalidArgument);
  EXPECT_NE(refused->message.find("not mapped"), std::string::npos) << refused->message;
  const auto rest = ask(Fragile::kBytes / 2);
  ASSERT_TRUE(rest);
  EXPECT_EQ(rest->code, Code::kOk) << rest->message;
}

// The peer takes 512 requests at a time: the others wait here.
TEST(Digest, AnyNumberOfTransfersMayBeChecked) {
  constexpr std::size_t kMany = 20'000;
  Pair pair("shm", 4096, true);
  const auto write = pair.write(0, 64);
  std::vector<Transfer> transfers;
  for (std::size_t i = 0; i < kMany; ++i)
    transfers.push_back(pair.source
                            .submit(pair.peer, std::span(&write, 1),
                                    {.deadline = Deadline::in(1min), .checksum = true})
                            .value());
  for (auto& transfer : transfers) {
    const auto checked = transfer.wait(Deadline::in(1min));
    ASSERT_TRUE(checked.ok()) << checked.error().describe();
  }
}

TEST(Digest, CloseDoesNotWaitForWhatPeersAskedFor) {
  Asked asked;
  // A terabyte: minutes of hashing.
  for (std::uint64_t i = 0; i < 500; ++i)
    asked.ask(i, 32);
  ASSERT_TRUE(asked.peer.receive<wire::DigestReply>()) << "it is at work";
  const auto begin = std::chrono::steady_clock::now();
  asked.peer.close();
  EXPECT_TRUE(asked.target.close(soon()).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
}

TEST(Digest, APeerWithManyRequestsIsToldToWaitAndDelaysNobody) {
  Asked asked;
  for (std::uint64_t i = 0; i < 1000; ++i)
    asked.ask(i, 32);
  std::optional<wire::DigestReply> refused;
  do
    refused = asked.peer.receive<wire::DigestReply>();
  while (refused && refused->code == Code::kOk);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, Code::kWouldBlock);
  RawClient other(asked.target, "modest", 8);
  other.send(wire::DigestRequest{.sequence = 5, .ranges = {{address_of(asked.region), 4096}}});
  const auto reply = other.receive<wire::DigestReply>();
  ASSERT_TRUE(reply) << "it takes turns with the other";
  EXPECT_EQ(reply->code, Code::kOk) << reply->message;
}

}  // namespace
}  // namespace crossdock::testing
