// A fence speaks for what a sender was told before it, and for nothing that the sender began since
// on a connection that the fence did not end.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <optional>

#include "support/played_sender.hpp"
#include "support/raw_client.hpp"

namespace crossdock::kv {
namespace {

using support::comes_true;
using support::KvClusterOptions;
using support::PlayedSender;

// A second session of the sender hangs: it confirms no fence until the test says so. The first one
// confirms at once, ends, and the sender opens the receiver anew.
class FencedSender : public PlayedSender {
 protected:
  FencedSender() : PlayedSender(quick()) {}
  static KvClusterOptions quick() {
    KvClusterOptions options;
    // Also how long a test may take to say that what it gave up has stopped.
    options.receiver.stop_timeout = std::chrono::seconds(1);
    options.receiver.fence_timeout = std::chrono::seconds(40);
    return options;
  }
  // Request 1 is given up, not answered, and fenced; the fence waits for the hanging session.
  void hang_in_fence() {
    hanging.emplace(decode.engine, engine->name(), engine->instance(), true);
    decode.receiver.abort(1, "gave up");
    ASSERT_EQ(std::get<message::Abort>(hear()).request, 1u);
    const auto revoke = hanging->receive<wire::Revoke>();
    ASSERT_TRUE(revoke.has_value());
    token = revoke->token;
    ASSERT_TRUE(comes_true([&] { return !peer->alive(); }));
    open();
  }
  void confirm() { hanging->send(wire::RevokeAck{.token = token}); }

  std::optional<testing::RawClient> hanging;
  std::uint64_t token = 0;
};

void expect_to_go_on(const message::Any& word, const message::Ticket& asked, KvReceiver& receiver) {
  ASSERT_TRUE(std::holds_alternative<message::Go>(word));
  EXPECT_EQ(std::get<message::Go>(word).ticket, asked.ticket);
  const auto result = receiver.wait(asked.request, Deadline::now());
  EXPECT_EQ(result.code(), Code::kDeadline)
      << "told to go ahead, and over: " << result.error().message;
}

TEST_F(FencedSender, ARequestThatBeginsOnALaterConnectionGoesOn) {
  const auto later = expect(2, 8);
  begin();
  ASSERT_NO_FATAL_FAILURE(hang_in_fence());
  ASSERT_TRUE(tell(message::Ready{2, later.ticket, 0}));
  confirm();
  expect_to_go_on(hear(), later, decode.receiver);
  ASSERT_EQ(decode.receiver.wait(1, soon()).code(), Code::kCancelled);
  // The Go stands for later tickets on the connection that lives: their pages are in doubt too.
  (void)expect(3, 8);
  destroy_receiver();
  for (const RequestId request : {1, 2, 3})
    ASSERT_TRUE(decode.pool.release(request).ok());
  EXPECT_EQ(decode.pool.stats().quarantined, 16u);
}

// Its ticket was sent while a Go stood for the connection that is fenced.
TEST_F(FencedSender, ARequestThatAsksAgainOnALaterConnectionGoesOn) {
  begin();
  const auto later = expect(2, 8);
  ASSERT_NO_FATAL_FAILURE(hang_in_fence());
  ASSERT_TRUE(tell(message::Ready{2, later.ticket, 0}));
  confirm();
  expect_to_go_on(hear(), later, decode.receiver);
}

TEST_F(FencedSender, ARequestGivenUpBeforeItsGoWasSentGetsNone) {
  const auto later = expect(2, 8);
  begin();
  ASSERT_NO_FATAL_FAILURE(hang_in_fence());
  ASSERT_TRUE(tell(message::Ready{2, later.ticket, 0}));
  decode.receiver.abort(2, "gave up");
  confirm();
  const auto word = hear();
  ASSERT_TRUE(std::holds_alternative<message::Abort>(word));
  EXPECT_EQ(std::get<message::Abort>(word).ticket, later.ticket);
  ASSERT_TRUE(tell(message::Stopped{2, later.ticket, 0, Code::kCancelled, "as told"}));
  EXPECT_EQ(decode.receiver.wait(2, soon()).code(), Code::kCancelled);
}

}  // namespace
}  // namespace crossdock::kv
