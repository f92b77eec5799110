// How requests end at the sender: once, with the outcome that they had, when nothing more is
// pushed.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <gtest/gtest.h>
#include <mutex>
#include <vector>

#include "kv/message.hpp"
#include "support/kv_cluster.hpp"

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;
using support::comes_true;
using support::KvCluster;
using support::KvClusterOptions;

Deadline soon() {
  return Deadline::in(60s);
}

// What the senders' callbacks said.
struct Heard {
  std::atomic<int> asked{0};
  std::mutex mutex;
  std::vector<Code> ends;

  SenderOptions options() {
    SenderOptions options;
    options.on_asked = [this](RequestId) { ++asked; };
    options.on_done = [this](RequestId, const Result<>& result) {
      const std::lock_guard lock(mutex);
      ends.push_back(result.code());
    };
    return options;
  }
  bool has_ends(std::size_t count) {
    const std::lock_guard lock(mutex);
    return ends.size() == count;
  }
};

// Decode's engine ends; the sender of this rank has been told when this returns.
void lose_decode(KvCluster& cluster, support::KvPrefillRank& prefill) {
  // Told of losses after the sender's mailbox: they are told in the order of their names.
  auto after = prefill.engine.mailbox("kv.sender.after").value();
  ASSERT_TRUE(cluster.decode[0]->engine.close(soon()).ok());
  ASSERT_EQ(after.receive(soon()).value().kind, transfer::Message::Kind::kPeerLost);
}

// Other ranks have the heads that it holds, so nothing is ever asked of it.
TEST(SenderEnd, AnIdleSenderWhoseReceiverIsGonePushesToTheEnd) {
  Heard heard;
  KvClusterOptions options;
  options.shape = {"mla", 3, 1, 576, 2, true};
  options.prefill_tp = 2;
  options.sender = heard.options();
  KvCluster cluster(options);
  auto& idle = *cluster.prefill[1];
  cluster.admit_and_expect(1, 4, soon());
  ASSERT_TRUE(idle.sender.push(1, 0).ok());
  ASSERT_TRUE(comes_true([&] { return heard.asked == 2; }));
  ASSERT_NO_FATAL_FAILURE(lose_decode(cluster, idle));
  for (std::uint32_t layer = 1; layer < 3; ++layer)
    ASSERT_TRUE(idle.sender.push(1, layer).ok());
  EXPECT_EQ(idle.sender.push(1, 0).code(), Code::kInvalidArgument) << "pushed before";
  ASSERT_TRUE(idle.sender.finish(1).ok());
  const auto result = idle.sender.wait(1, Deadline::in(5s));
  EXPECT_TRUE(result.ok()) << result.error().describe();
  EXPECT_TRUE(comes_true([&] { return heard.has_ends(2); })) << "one for each rank";
  ASSERT_TRUE(idle.pool.release(1).ok());
  EXPECT_EQ(idle.pool.stats().free, 64u);
}

TEST(SenderEnd, AReceiverThatIsGoneWithAllItAskedForLeavesTheRestToBePushed) {
  Heard heard;
  KvClusterOptions options;
  options.sender = heard.options();
  KvCluster cluster(options);
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  ASSERT_TRUE(prefill.pool.admit({.request = 1, .num_pages = 6}).ok());
  ASSERT_TRUE(decode.pool.admit({.request = 1, .num_pages = 6}).ok());
  Expectation expectation{.request = 1, .senders = cluster.sender_names(), .first_page = 4};
  expectation.deadline = soon();
  ASSERT_TRUE(decode.receiver.expect(expectation).ok());
  for (std::uint32_t layer = 0; layer < 3; ++layer)
    ASSERT_TRUE(prefill.sender.push(1, layer, 4, 2).ok());
  ASSERT_TRUE(decode.receiver.wait(1, soon()).ok());
  ASSERT_NO_FATAL_FAILURE(lose_decode(cluster, prefill));
  for (std::uint32_t layer = 0; layer < 3; ++layer)
    ASSERT_TRUE(prefill.sender.push(1, layer, 0, 4).ok());
  EXPECT_EQ(prefill.sender.push(1, 0, 4, 2).code(), Code::kInvalidArgument) << "pushed before";
  ASSERT_TRUE(prefill.sender.finish(1).ok());
  const auto result = prefill.sender.wait(1, Deadline::in(5s));
  EXPECT_TRUE(result.ok()) << result.error().describe();
  EXPECT_TRUE(comes_true([&] { return heard.has_ends(1); }));
}

// It may have had everything from others before its ticket was looked at here.
TEST(SenderEnd, AReceiverThatWantsNothingNeedNotBeReached) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto engine = transfer::Engine::create({.name = "not-to-be-dialled"}).value();
  message::Ticket ticket;
  ticket.request = 1;
  ticket.ticket = 1;
  ticket.shape = prefill.pool.layout().shape();
  ticket.layout = prefill.pool.layout().options();
  ticket.expires_ms = 60'000;
  ticket.address = "127.0.0.1:1";
  const auto peer = engine.open(prefill.engine.name(), soon()).value();
  ASSERT_TRUE(prefill.pool.admit({.request = 1, .num_pages = 2}).ok());
  ASSERT_TRUE(prefill.sender.push(1, 0).ok());
  ASSERT_TRUE(engine.notify(peer, {"kv.sender", message::encode(ticket)}, soon()).ok());
  ASSERT_TRUE(prefill.sender.finish(1).ok());
  const auto result = prefill.sender.wait(1, Deadline::in(20s));
  EXPECT_TRUE(result.ok()) << result.error().describe();
}

TEST(SenderEnd, AnAbortAfterTheEndChangesNothing) {
  Heard heard;
  KvClusterOptions options;
  options.sender = heard.options();
  KvCluster cluster(options);
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  for (std::size_t use = 1; use <= 2; ++use) {
    cluster.admit_and_expect(1, 4, soon());
    cluster.send(1);
    ASSERT_TRUE(decode.receiver.wait(1, soon()).ok()) << use;
    ASSERT_TRUE(prefill.sender.wait(1, soon()).ok()) << use;
    prefill.sender.abort(1, "late");
    const auto result = prefill.sender.wait(1, Deadline::now());
    EXPECT_TRUE(result.ok()) << result.error().describe();
    EXPECT_TRUE(comes_true([&] { return heard.has_ends(use); }));
    ASSERT_TRUE(prefill.pool.release(1).ok());
    ASSERT_TRUE(decode.pool.release(1).ok());
  }
}

}  // namespace
}  // namespace crossdock::kv
