// Memory that its owner takes back, and peers that die, in the instants in which a call is half
// done.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <fmt/format.h>
#include <thread>

#include "support/engines.hpp"
#include "support/raw_server.hpp"
#include "support/relay.hpp"
#include "transfer/control_link.hpp"
#include "transfer/engine_core.hpp"
#include "wire/control.hpp"

namespace crossdock::testing {
namespace {

using transfer::Notification;
using transfer::detail::ControlLink;

// The regions of the target are mapped by nobody, so that tcp has to reach them after shm.
TEST(Revoke, APeerThatDiesWhileItIsOpenedIsAnError) {
  std::vector<std::byte> memory(4096);
  auto target = make_engine("shm,tcp");
  auto region = target.register_memory(memory.data(), memory.size()).value();
  auto source = make_engine("shm,tcp", {.config = {{"transport.shm.copy", "map"},
                                                   {"transport.tcp.lanes", "1"},
                                                   {"log.level", "error"}}});
  for (int round = 0; round < 200; ++round) {
    const Relay relay(target, 2, std::chrono::microseconds(round));
    const auto peer = source.open(relay.name(), soon());
    if (peer.ok()) continue;
    // Unreachable: its last transport failed before the loss of the peer was seen.
    const bool says_so = peer.code() == Code::kPeerLost || peer.code() == Code::kUnreachable;
    EXPECT_TRUE(says_so) << peer.error().describe();
  }
}

// As it is for an instant when the peer dies: nothing is wrong with how its memory was registered.
TEST(Revoke, APeerWhoseOnlyWayToItsMemoryEndsIsNotUnsupported) {
  std::vector<std::byte> memory(4096);
  auto target = make_engine("shm,tcp");
  auto region = target.register_memory(memory.data(), memory.size()).value();
  auto source = make_engine("shm,tcp", {.config = {{"transport.shm.copy", "map"},
                                                   {"control.connect_timeout", "1s"},
                                                   {"log.level", "error"}}});
  Relay relay(target);
  relay.take_one_only();
  const auto peer = source.open(relay.name(), soon());
  ASSERT_FALSE(peer.ok());
  const bool says_so = peer.code() == Code::kPeerLost || peer.code() == Code::kUnreachable;
  EXPECT_TRUE(says_so) << peer.error().describe();
  EXPECT_NE(peer.error().retry, Retry::kNo);
}

TEST(Revoke, TwoThreadsThatReleaseARegionReleaseItOnce) {
  Pair pair("tcp", 4096);
  std::vector<std::byte> memory(4096);
  const auto before = metric(pair.target, "crossdock_regions");
  for (int round = 0; round < 50; ++round) {
    auto region = pair.target.register_memory(memory.data(), memory.size()).value();
    std::thread other([&] { EXPECT_TRUE(region.release(soon()).ok()); });
    EXPECT_TRUE(region.release(soon()).ok());
    other.join();
    ASSERT_EQ(metric(pair.target, "crossdock_regions"), before) << "in round " << round;
  }
}

// So many requests that the word of the peer comes after the leases of the plan, and before the
// transfer is listed among those that are in flight.
TEST(Revoke, ATransferThatIsBeingPlannedIsStopped) {
  constexpr std::size_t kRequests = 100'000;
  Pair pair(
      "tcp", kRequests * 8, false,
      {.config = {{"transport.enabled", "faulty+tcp"}, {"transport.faulty.delay_max", "1min"}}});
  std::vector<Request> batch;
  for (std::size_t i = kRequests; i-- > 0;)
    batch.push_back(pair.write(i * 8, 4));
  int accepted = 0;
  const auto patience = soon();
  for (int round = 0; accepted < 5 && !patience.passed(); ++round) {
    std::atomic<bool> begun{false};
    std::thread submitting([&] {
      begun.store(true);
      auto moving = pair.source.submit(pair.peer, batch, {.deadline = Deadline::in(15s)});
      if (!moving.ok()) return;
      ++accepted;
      EXPECT_FALSE(moving->wait(soon()).ok());
    });
    while (!begun.load())
      std::this_thread::yield();
    // Later in each round, and from the front again when no plan takes that long.
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::microseconds(round % 40 * 50);
    while (std::chrono::steady_clock::now() < until)
      ;
    const auto released = pair.remote.release(Deadline::in(8s));
    submitting.join();
    ASSERT_TRUE(released.ok()) << released.error().describe();
    const auto label = fmt::format("round {}", round);
    pair.remote =
        pair.target
            .register_memory(pair.target_memory.data(), pair.target_memory.size(), {.label = label})
            .value();
    ASSERT_TRUE(pair.peer.region(label, soon()).ok());
  }
  EXPECT_GT(accepted, 0) << "in no round the plan was made first";
}

// A notification of `payload` bytes behind a write of 8; the bytes that wait for the peer when it
// found no place there, otherwise nothing.
std::optional<std::size_t> refused_behind(Pair& pair, Peer& peer, std::size_t payload,
                                          std::vector<Transfer>& moving) {
  const auto write = pair.write(0, 8);
  moving.push_back(pair.source
                       .submit(peer, std::span(&write, 1),
                               {.deadline = Deadline::in(10min),
                                .notification = Notification{"m", std::string(payload, 'x')}})
                       .value());
  if (!transfer::is_terminal(moving.back().status().state)) return std::nullopt;
  const auto refused = moving.back().wait(soon());
  EXPECT_EQ(refused.code(), Code::kWouldBlock);
  if (refused.code() != Code::kWouldBlock) return std::nullopt;
  const auto& message = refused.error().message;
  return std::stoull(message.substr(message.find("connection; ") + 12));
}

// Fills what may wait for a peer that does not read, to the last byte. False: it could not in time.
bool fill_up(Pair& pair, Peer& peer, std::vector<Transfer>& moving, Deadline patience) {
  const auto overhead = wire::encode_frame(wire::Notify{.mailbox = "m"}).value().size();
  constexpr std::size_t kPayload = 60'000;
  std::size_t payload = kPayload;
  while (!patience.passed() && !::testing::Test::HasFailure()) {
    const auto waiting = refused_behind(pair, peer, payload, moving);
    if (!waiting) continue;
    const auto left = ControlLink::kMaxQueued - *waiting;
    if (left == 0) return true;
    payload = left > overhead ? std::min(kPayload, left - overhead) : 0;
  }
  return false;
}

// Whoever does not read what it is sent cannot be told that its memory is free. Its link ends
// instead, which says the same.
TEST(Revoke, APeerThatDoesNotReadTheAcknowledgementLosesItsLink) {
  const EngineOptions silent{.config = {{"control.silence", "0s"}}};  // no Ping takes a place
  Pair pair("shm", 4096, false, silent, silent);
  Relay relay(pair.target);
  {
    Peer gone = std::move(pair.peer);
  }
  auto peer = pair.source.open(relay.name(), soon()).value();
  relay.leave_unread();
  std::vector<Transfer> moving;
  // Or the acknowledgement would find its place. The kernel may take some more for a while: it is
  // full when it still is after the loop had time to send.
  const auto still_full = [&] {
    return refused_behind(pair, peer, 0, moving) == ControlLink::kMaxQueued;
  };
  const auto patience = soon();
  do {
    ASSERT_TRUE(fill_up(pair, peer, moving, patience));
    std::this_thread::sleep_for(20ms);
  } while (!still_full());
  EXPECT_EQ(pair.remote.release(Deadline::in(100ms)).code(), Code::kBusy);
  for (const auto lost = soon(); peer.alive() && !lost.passed();)
    std::this_thread::yield();
  EXPECT_FALSE(peer.alive());
  for (auto& transfer : moving) {
    (void)transfer.wait(soon());  // the first may have arrived
    EXPECT_TRUE(transfer::is_terminal(transfer.status().state));
  }
}

// Whoever asks again, by name or for everything, is not told that its memory is free while what the
// first request stopped is still under way.
TEST(Revoke, ASecondRequestWaitsForTheSameTransfers) {
  for (const std::vector<std::uint32_t>& again :
       {std::vector<std::uint32_t>{RawServer::kRegion}, std::vector<std::uint32_t>{}}) {
    std::vector<std::byte> memory(64);
    RawServer server;
    auto source = make_engine("tcp", {.config = {{"log.level", "error"}}});
    auto local = source.register_memory(memory.data(), memory.size()).value();
    auto peer = source.open(server.name(), soon()).value();
    const auto write = RawServer::write_from(memory.data(), memory.size());
    auto moving =
        source.submit(peer, std::span(&write, 1), {.deadline = Deadline::in(10min)}).value();
    server.send(wire::Revoke{.token = 1, .region_ids = {RawServer::kRegion}});
    server.send(wire::Revoke{.token = 2, .region_ids = again});
    server.send(wire::Ping{.value = 3});
    const auto first = server.receive();
    ASSERT_TRUE(first);
    EXPECT_EQ(first->type, wire::MessageType::kPong) << "acknowledged beside a running write";
    EXPECT_FALSE(transfer::is_terminal(moving.status().state));
    server.end_lanes();
    EXPECT_FALSE(moving.wait(soon()).ok());
    for (const std::uint64_t token : {1u, 2u}) {
      const auto ack = server.receive();
      ASSERT_TRUE(ack);
      ASSERT_EQ(ack->type, wire::MessageType::kRevokeAck);
      EXPECT_EQ(wire::decode<wire::RevokeAck>(ack->payload)->token, token);
    }
  }
}

// The peer was told that nothing is held of what it took back: that stays so.
TEST(Revoke, ARegionThatWasTakenBackIsNotAttachedAnew) {
  auto target = make_engine("shm");
  auto region = target.allocate(4096).value();
  const auto source = transfer::detail::EngineCore::create(
                          {.config = {{"transport.enabled", "shm"}, {"log.level", "error"}}})
                          .value();
  const auto peer = source->open(target.name(), soon()).value();
  const auto held = peer->regions().snapshot()->front();
  EXPECT_TRUE(held->attached[0]);
  ASSERT_TRUE(region.release(soon()).ok());
  EXPECT_EQ(peer->rails_for(*held).code(), Code::kClosed);
  EXPECT_FALSE(held->attached[0]);
}

// What goes while its peer is opened is no memory that cannot be reached.
TEST(Revoke, OpeningAPeerThatReleasesMemorySucceeds) {
  auto target = make_engine("shm");
  auto source = make_engine("shm");
  std::atomic<bool> stop{false};
  std::thread releasing([&] {
    std::vector<std::optional<Region>> regions(200);
    for (std::size_t i = 0; !stop.load(); i = (i + 1) % regions.size()) {
      const bool released = !regions[i] || regions[i]->release(soon()).ok();
      EXPECT_TRUE(released);
      regions[i] = target.allocate(4096).value();
    }
  });
  for (int round = 0; round < 200; ++round) {
    const auto peer = source.open(target.name(), soon());
    EXPECT_TRUE(peer.ok()) << "in round " << round << ": " << peer.error().describe();
  }
  stop.store(true);
  releasing.join();
}

}  // namespace
}  // namespace crossdock::testing
