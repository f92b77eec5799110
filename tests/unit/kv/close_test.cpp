// A receiver that closes tells its senders first: what is in line behind a slow connection is not
// lost with it.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/kv_cluster.hpp"
#include "support/relay.hpp"

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;
using support::KvCluster;
using support::KvClusterOptions;
using testing::Relay;

Deadline soon() {
  return Deadline::in(60s);
}

// The receiver's engine stays, and keeps a connection to the sender's, whose end would tell too.
TEST(ReceiverClose, SendersHearOfItWhileTheEngineStays) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  const auto peer = decode.engine.open(prefill.engine.name(), soon()).value();
  ASSERT_TRUE(prefill.pool.admit({.request = 1, .num_pages = 2}).ok());
  ASSERT_TRUE(prefill.sender.push(1, 0).ok());
  ASSERT_TRUE(decode.pool.admit({.request = 1, .num_pages = 2}).ok());
  Relay relay(prefill.engine);
  relay.hold();
  ASSERT_TRUE(
      decode.receiver.expect({.request = 1, .senders = {relay.name()}, .deadline = soon()}).ok());
  relay.go_on();
  ASSERT_TRUE(decode.receiver.close(soon()).ok());
  const auto result = prefill.sender.wait(1, Deadline::in(20s));
  ASSERT_EQ(result.code(), Code::kCancelled) << result.error().describe();
  EXPECT_THAT(result.error().message, ::testing::HasSubstr("the KV receiver closes"));
}

// The request is delivered before the idle sender, whose connection is slow, has its ticket.
TEST(ReceiverClose, IdleSendersHearThatNothingIsAskedOfThem) {
  KvClusterOptions options;
  options.shape = {"mla", 3, 1, 576, 2, true};
  options.prefill_tp = 2;
  KvCluster cluster(options);
  auto& decode = *cluster.decode[0];
  for (auto& rank : cluster.prefill)
    ASSERT_TRUE(rank->pool.admit({.request = 1, .num_pages = 2}).ok());
  ASSERT_TRUE(decode.pool.admit({.request = 1, .num_pages = 2}).ok());
  Relay relay(cluster.prefill[1]->engine);
  relay.hold();
  Expectation expectation{.request = 1,
                          .senders = {cluster.prefill[0]->engine.name(), relay.name()}};
  expectation.deadline = soon();
  ASSERT_TRUE(decode.receiver.expect(expectation).ok());
  cluster.send(1);
  ASSERT_TRUE(decode.receiver.wait(1, soon()).ok());
  relay.go_on();
  ASSERT_TRUE(decode.receiver.close(soon()).ok());
  const auto result = cluster.prefill[1]->sender.wait(1, Deadline::in(20s));
  EXPECT_TRUE(result.ok()) << result.error().describe();
}

// Nobody writes: so it is closed, whether the sender can be told or not.
TEST(ReceiverClose, ASenderThatCannotBeToldDoesNotMakeItFail) {
  KvClusterOptions options;
  options.receiver.send_timeout = 200ms;
  KvCluster cluster(options);
  auto& decode = *cluster.decode[0];
  ASSERT_TRUE(decode.pool.admit({.request = 1, .num_pages = 2}).ok());
  Relay relay(cluster.prefill[0]->engine);
  relay.hold();
  ASSERT_TRUE(
      decode.receiver.expect({.request = 1, .senders = {relay.name()}, .deadline = soon()}).ok());
  const auto closed = decode.receiver.close(Deadline::in(20ms));
  EXPECT_TRUE(closed.ok()) << closed.error().describe();
  ASSERT_TRUE(decode.pool.release(1).ok());
  EXPECT_EQ(decode.pool.stats().free, 64u);
}

}  // namespace
}  // namespace crossdock::kv
