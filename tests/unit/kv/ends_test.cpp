// Ends of senders and receivers that are not the usual ones: destroyed, replaced, lost before they
// did anything, reached by another name; and what may never be written after them.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <future>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <thread>

#include "kv/message.hpp"
#include "support/kv_cluster.hpp"
#include "support/played_sender.hpp"

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;
using support::all_are;
using support::comes_true;
using support::KvCluster;
using support::KvClusterOptions;
using support::PlayedSender;
using support::poison;
using testing::HasSubstr;

Deadline soon() {
  return Deadline::in(60s);
}

// --- one mailbox, one owner ---

TEST(HandoverEnds, ASecondSenderOrReceiverIsRefusedAndTheFirstGoesOn) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  const auto sender = KvSender::create(prefill.engine, prefill.pool);
  ASSERT_EQ(sender.code(), Code::kBusy);
  EXPECT_THAT(sender.error().message, HasSubstr("'kv.sender'"));
  EXPECT_EQ(KvReceiver::create(decode.engine, decode.pool).code(), Code::kBusy);
  cluster.admit_and_expect(1, 4, soon());
  cluster.send(1);
  EXPECT_TRUE(decode.receiver.wait(1, soon()).ok());
}

TEST(HandoverEnds, OnesThatReplaceClosedOnesHear) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  ASSERT_TRUE(prefill.sender.close(soon()).ok());
  prefill.sender = KvSender::create(prefill.engine, prefill.pool).value();
  ASSERT_TRUE(decode.receiver.close(soon()).ok());
  decode.receiver = KvReceiver::create(decode.engine, decode.pool).value();
  cluster.admit_and_expect(1, 4, soon());
  cluster.send(1);
  EXPECT_TRUE(decode.receiver.wait(1, soon()).ok());
  EXPECT_TRUE(prefill.sender.wait(1, soon()).ok());
}

TEST(HandoverEnds, ASenderThatReplacesOneOfAnotherMailboxHears) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  prefill.sender = KvSender::create(prefill.engine, prefill.pool, {.mailbox = "other"}).value();
  prefill.sender = KvSender::create(prefill.engine, prefill.pool).value();
  cluster.admit_and_expect(1, 4, soon());
  cluster.send(1);
  EXPECT_TRUE(decode.receiver.wait(1, soon()).ok());
}

// --- destroyed while senders may write ---

TEST(HandoverEnds, PagesOfADestroyedReceiverStayInQuarantineWhileASenderMayWrite) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  cluster.admit_and_expect(1, 32, soon());
  ASSERT_TRUE(prefill.sender.push(1, 0).ok());
  ASSERT_TRUE(decode.receiver.wait(1, 0, soon()).ok());  // it writes
  {
    const KvReceiver gone = std::move(decode.receiver);
  }
  ASSERT_TRUE(decode.pool.release(1).ok());
  EXPECT_EQ(decode.pool.stats().quarantined, 32u);
  ASSERT_TRUE(decode.pool.admit({.request = 2, .num_pages = 32}).ok());
  EXPECT_EQ(decode.pool.admit({.request = 3, .num_pages = 1}).code(), Code::kWouldBlock);
  // The end of the sender is the proof.
  cluster.prefill.clear();
  EXPECT_TRUE(decode.pool.admit({.request = 3, .num_pages = 32}, soon()).ok());
}

TEST(HandoverEnds, AFenceIsProofForADestroyedReceiver) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  cluster.admit_and_expect(1, 32, soon());
  ASSERT_TRUE(prefill.sender.push(1, 0).ok());
  ASSERT_TRUE(decode.receiver.wait(1, 0, soon()).ok());
  {
    const KvReceiver gone = std::move(decode.receiver);
  }
  ASSERT_TRUE(decode.pool.release(1).ok());
  EXPECT_EQ(decode.pool.stats().quarantined, 32u);
  ASSERT_TRUE(decode.engine.fence_instance(prefill.engine.instance(), soon()).ok());
  EXPECT_TRUE(decode.pool.admit({.request = 3, .num_pages = 64}, soon()).ok());
  poison(decode.pool, 0x5a);
  for (std::uint32_t layer = 1; layer < 3; ++layer)
    (void)prefill.sender.push(1, layer);
  (void)prefill.sender.close(soon());
  EXPECT_TRUE(all_are(decode.pool, 0x5a));
}

TEST(HandoverEnds, PagesOfADestroyedReceiverAreFreeWhenNobodyEverWrote) {
  KvCluster cluster({});
  auto& decode = *cluster.decode[0];
  ASSERT_TRUE(decode.pool.admit({.request = 1, .num_pages = 32}).ok());
  // This engine takes the ticket, and has nobody who would act on it.
  const auto mute = transfer::Engine::create({}).value();
  ASSERT_TRUE(
      decode.receiver.expect({.request = 1, .senders = {mute.name()}, .deadline = soon()}).ok());
  {
    const KvReceiver gone = std::move(decode.receiver);
  }
  ASSERT_TRUE(decode.pool.release(1).ok());
  EXPECT_EQ(decode.pool.stats().free, 64u);
}

TEST(HandoverEnds, QuarantineOutlivesTheHandlesOfThePool) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  cluster.admit_and_expect(1, 32, soon());
  ASSERT_TRUE(prefill.sender.push(1, 0).ok());
  ASSERT_TRUE(cluster.decode[0]->receiver.wait(1, 0, soon()).ok());
  cluster.decode.clear();  // receiver, pool, engine, in this order
  EXPECT_FALSE(prefill.sender.wait(1, soon()).ok());
}

// --- pages are pushed once ---

TEST(HandoverEnds, APageIsPushedOnce) {
  KvCluster cluster({});
  auto& sender = cluster.prefill[0]->sender;
  auto& decode = *cluster.decode[0];
  cluster.admit_and_expect(1, 8, soon());
  ASSERT_TRUE(sender.push(1, 0, 0, 4).ok());
  for (const auto& [first, count] : {std::pair{0u, 4u}, {3u, 2u}, {0u, 8u}}) {
    const auto again = sender.push(1, 0, first, count);
    ASSERT_EQ(again.code(), Code::kInvalidArgument) << first;
    EXPECT_THAT(again.error().message, HasSubstr("of layer 0 was pushed before"));
  }
  ASSERT_TRUE(sender.push(1, 1, 0, 4).ok()) << "another layer";
  ASSERT_TRUE(sender.push(1, 0, 4, 4).ok()) << "a refused push has pushed nothing";
  ASSERT_TRUE(sender.push(1, 1, 4, 4).ok());
  ASSERT_TRUE(sender.push(1, 2).ok());
  ASSERT_TRUE(decode.receiver.wait(1, soon()).ok());
  // The receiver is done and uses the pages anew.
  ASSERT_TRUE(decode.pool.release(1).ok());
  ASSERT_TRUE(decode.pool.admit({.request = 2, .num_pages = 64}).ok());
  poison(decode.pool, 0x5a);
  EXPECT_EQ(sender.push(1, 0).code(), Code::kInvalidArgument);
  ASSERT_TRUE(sender.finish(1).ok());
  ASSERT_TRUE(sender.wait(1, soon()).ok());
  EXPECT_TRUE(all_are(decode.pool, 0x5a));
}

// Pages may be given back at any time, and the id may be admitted again at once.
TEST(HandoverEnds, APushIsRefusedWhileAnEarlierTableOfItsIdIsInUse) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  ASSERT_TRUE(prefill.pool.admit({.request = 1, .num_pages = 2}).ok());
  ASSERT_TRUE(prefill.sender.push(1, 0).ok());
  ASSERT_TRUE(prefill.pool.release(1).ok());
  ASSERT_TRUE(prefill.pool.admit({.request = 1, .num_pages = 62}).ok());
  for (const auto& refused : {prefill.sender.push(1, 2), prefill.sender.push(1, 1, 0, 2)}) {
    ASSERT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr("admitted again"));
  }
  prefill.sender.abort(1, "its first use ends");
  EXPECT_EQ(prefill.sender.wait(1, soon()).code(), Code::kCancelled);
  EXPECT_EQ(prefill.pool.stats().quarantined, 0u);
}

// --- tickets that lead nowhere ---

TEST(HandoverEnds, RefusedTicketsLeaveNothingBehind) {
  KvClusterOptions options;
  options.decode_layout.page_tokens = 8;  // does not fit
  KvCluster cluster(options);
  auto& prefill = *cluster.prefill[0];
  for (RequestId id = 1; id <= 50; ++id) {
    cluster.admit_and_expect(id, 1, soon());
    ASSERT_EQ(cluster.decode[0]->receiver.wait(id, soon()).code(), Code::kIncompatible);
    ASSERT_TRUE(cluster.decode[0]->pool.release(id).ok());
  }
  EXPECT_EQ(prefill.sender.stats().active_requests, 0u);
  EXPECT_EQ(prefill.sender.wait(1, Deadline::now()).code(), Code::kNotFound);
}

TEST(HandoverEnds, ARefusedTicketLeavesARequestAsItWas) {
  KvCluster cluster({});
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  cluster.admit_and_expect(1, 2, soon());
  cluster.send(1);
  ASSERT_TRUE(prefill.sender.wait(1, soon()).ok());
  ASSERT_TRUE(decode.receiver.wait(1, soon()).ok());
  message::Ticket odd;
  odd.request = 1;
  odd.ticket = 5;
  odd.shape = decode.pool.layout().shape();
  odd.layout = decode.pool.layout().options();
  odd.layout.page_tokens *= 2;
  odd.expires_ms = 60'000;
  // A ticket whose second part comes alone is refused, too.
  message::Ticket late = odd;
  late.request = 2;
  late.layout = decode.pool.layout().options();
  late.total_pages = 2;
  late.chunk_first = 1;
  late.pages = {1};
  const auto peer = decode.engine.open(prefill.engine.name(), soon()).value();
  for (const auto& ticket : {odd, late})
    ASSERT_TRUE(decode.engine.notify(peer, {"kv.sender", message::encode(ticket)}, soon()).ok());
  // Tickets of one receiver are served in order: this one is looked at after those.
  cluster.admit_and_expect(3, 2, soon());
  cluster.send(3);
  ASSERT_TRUE(decode.receiver.wait(3, soon()).ok());
  ASSERT_TRUE(prefill.sender.wait(3, soon()).ok());
  EXPECT_TRUE(prefill.sender.wait(1, Deadline::now()).ok()) << "its outcome is still known";
  EXPECT_EQ(prefill.sender.stats().active_requests, 0u);
}

// --- peers that are lost before they did anything, or have other names ---

TEST(HandoverEnds, ASenderThatDiesBeforeItOpenedTheReceiverIsLost) {
  KvCluster cluster({});
  auto& decode = *cluster.decode[0];
  std::optional<transfer::Engine> mute = transfer::Engine::create({}).value();
  auto tickets = mute->mailbox("kv.sender").value();
  ASSERT_TRUE(decode.pool.admit({.request = 1, .num_pages = 64}).ok());
  ASSERT_TRUE(
      decode.receiver.expect({.request = 1, .senders = {mute->name()}, .deadline = soon()}).ok());
  ASSERT_TRUE(tickets.receive(soon()).ok());
  const std::string name = mute->name();
  mute.reset();
  const auto lost = decode.receiver.wait(1, Deadline::in(50s));
  ASSERT_EQ(lost.code(), Code::kPeerLost) << lost.error().describe();
  EXPECT_THAT(lost.error().message, HasSubstr(name));
  EXPECT_THAT(lost.error().message, HasSubstr("layer 0 of 3"));
  ASSERT_TRUE(decode.pool.release(1).ok());
  EXPECT_EQ(decode.pool.stats().free, 64u) << "it never had a connection to write on";
}

TEST_F(PlayedSender, PagesStayInQuarantineAfterACloseThatFoundNoProof) {
  begin();
  const auto closed = decode.receiver.close(Deadline::in(10ms));
  ASSERT_EQ(closed.code(), Code::kDeadline);
  EXPECT_THAT(closed.error().message, HasSubstr("their pages stay in quarantine"));
  destroy_receiver();
  ASSERT_TRUE(decode.pool.release(1).ok());
  EXPECT_EQ(decode.pool.stats().quarantined, 32u);
  ASSERT_TRUE(engine->close(soon()).ok());
  EXPECT_TRUE(decode.pool.admit({.request = 2, .num_pages = 64}, soon()).ok());
}

TEST_F(PlayedSender, ABrokenConnectionIsNotTakenForADeadSender) {
  // Ends the receiver's connection to the sender; the sender is there to be found again.
  ASSERT_TRUE(engine->fence_instance(decode.engine.instance(), soon()).ok());
  begin();
  EXPECT_EQ(decode.receiver.stats().active_requests, 1u);
  EXPECT_EQ(decode.receiver.wait(1, Deadline::now()).code(), Code::kDeadline);
}

// A receiver played by the test, word by word.
class PlayedReceiver : public testing::Test {
 protected:
  PlayedReceiver()
      : cluster({}),
        prefill(*cluster.prefill[0]),
        engine(transfer::Engine::create({}).value()),
        answers(engine.mailbox("kv").value()),
        pool(PagePool::create(engine, cluster.decode[0]->pool.layout()).value()),
        peer(engine.open(prefill.engine.name(), soon()).value()) {
    poison(pool, 0x5a);
  }
  bool tell(const message::Any& message) {
    return engine.notify(peer, {"kv.sender", message::encode(message)}, soon()).ok();
  }
  message::Any hear() {
    for (;;) {
      const auto word = answers.receive(soon()).value();
      if (word.kind == transfer::Message::Kind::kNotification)
        return message::decode(word.payload).value();
    }
  }
  // The next of this kind; what comes before it is taken.
  template <class Kind>
  Kind hear_next() {
    for (;;)
      if (const auto word = hear(); std::holds_alternative<Kind>(word)) return std::get<Kind>(word);
  }
  // Prefill has all of the request; it is asked for.
  void ask(RequestId request, std::uint64_t number, std::uint64_t life) {
    ASSERT_TRUE(prefill.pool.admit({.request = request, .num_pages = 2}).ok());
    cluster.send(request);
    ASSERT_TRUE(tell(ticket_for(request, number, life)));
  }
  message::Ticket ticket_for(RequestId request, std::uint64_t number, std::uint64_t life) {
    message::Ticket ticket;
    ticket.request = request;
    ticket.ticket = number;
    ticket.life = life;
    ticket.shape = pool.layout().shape();
    ticket.layout = pool.layout().options();
    ticket.base = reinterpret_cast<std::uint64_t>(pool.base());
    ticket.expires_ms = 60'000;
    ticket.total_pages = 2;
    ticket.pages = {0, 1};
    return ticket;
  }
  // What comes first after the ticket; takes what else the request brings.
  bool asks_before_it_writes(RequestId request, std::uint64_t number, std::uint64_t life) {
    ask(request, number, life);
    const auto first = hear();
    const bool asked = std::holds_alternative<message::Ready>(first);
    if (asked) {
      EXPECT_EQ(std::get<message::Ready>(first).ticket, number);
      EXPECT_TRUE(tell(message::Go{request, number, life, number + 1}));
    }
    EXPECT_TRUE(prefill.sender.wait(request, soon()).ok());
    while (answers.try_receive()) {
    }
    return asked;
  }
  KvCluster cluster;
  support::KvPrefillRank& prefill;
  transfer::Engine engine;
  transfer::Mailbox answers;
  PagePool pool;
  transfer::Peer peer;
};

TEST_F(PlayedReceiver, NothingIsWrittenBeforeItSaysGo) {
  ask(1, 10, 3);
  ASSERT_TRUE(std::holds_alternative<message::Ready>(hear()));
  ASSERT_TRUE(tell(message::Go{1, 9, 3, 9}));  // of another ticket
  ASSERT_TRUE(tell(message::Abort{1, 10, "changed my mind"}));
  EXPECT_EQ(prefill.sender.wait(1, soon()).code(), Code::kCancelled);
  EXPECT_EQ(prefill.sender.stats().transfers, 0u);
  EXPECT_TRUE(all_are(pool, 0x5a));
}

TEST_F(PlayedReceiver, OneGoStandsForLaterTicketsOfItsLifeAndNoOthers) {
  EXPECT_TRUE(asks_before_it_writes(1, 10, 3));
  EXPECT_FALSE(asks_before_it_writes(2, 11, 3));
  EXPECT_FALSE(asks_before_it_writes(3, 12, 3));
  EXPECT_TRUE(asks_before_it_writes(4, 9, 3)) << "from before the Go";
  EXPECT_TRUE(asks_before_it_writes(5, 13, 4)) << "another receiver of that engine";
}

// The link to a dead peer goes when another peer is heard of; the next one to it begins anew.
TEST_F(PlayedReceiver, AGoDoesNotStandForAConnectionMadeLater) {
  EXPECT_TRUE(asks_before_it_writes(1, 10, 3));
  EXPECT_FALSE(asks_before_it_writes(2, 11, 3));
  const auto connection = prefill.engine.open(engine.name(), soon()).value();
  ASSERT_TRUE(engine.fence_instance(prefill.engine.instance(), soon()).ok());
  ASSERT_TRUE(comes_true([&] { return !connection.alive(); }));
  auto other = transfer::Engine::create({}).value();
  auto its_answers = other.mailbox("kv").value();
  auto refused = ticket_for(50, 1, 1);
  refused.chunk_first = 1;
  refused.pages = {1};
  const auto to_prefill = other.open(prefill.engine.name(), soon()).value();
  ASSERT_TRUE(other.notify(to_prefill, {"kv.sender", message::encode(refused)}, soon()).ok());
  ASSERT_TRUE(its_answers.receive(soon()).ok());
  EXPECT_TRUE(asks_before_it_writes(3, 12, 3));
}

// The sender delivered while the receiver gave up; the Abort comes when the id is in use again.
TEST_F(PlayedReceiver, ALateAbortDoesNotStopALaterUseOfTheId) {
  EXPECT_TRUE(asks_before_it_writes(1, 10, 3));
  auto& sender = prefill.sender;
  const auto use_again = [&] {
    EXPECT_TRUE(sender.wait(1, soon()).ok());
    EXPECT_TRUE(prefill.pool.release(1).ok());
    EXPECT_TRUE(prefill.pool.admit({.request = 1, .num_pages = 2}).ok());
    EXPECT_TRUE(sender.push(1, 0).ok());
  };
  const auto abort = [&](std::uint64_t number) {
    EXPECT_TRUE(tell(message::Abort{1, number, "gave up"}));
    EXPECT_EQ(hear_next<message::Stopped>().ticket, number) << "it is answered all the same";
  };
  const auto push_rest = [&] {
    EXPECT_TRUE(sender.push(1, 1).ok());
    EXPECT_TRUE(sender.push(1, 2).ok());
    EXPECT_TRUE(sender.finish(1).ok());
  };
  use_again();
  abort(10);  // before the receiver asks again
  EXPECT_EQ(sender.wait(1, Deadline::now()).code(), Code::kDeadline);
  push_rest();
  ASSERT_TRUE(tell(ticket_for(1, 11, 3)));
  use_again();
  ASSERT_TRUE(tell(ticket_for(1, 12, 3)));
  while (hear_next<message::Parts>().ticket != 12) {
  }
  abort(10);  // after it
  EXPECT_EQ(sender.wait(1, Deadline::now()).code(), Code::kDeadline);
  push_rest();
  use_again();
  ASSERT_TRUE(tell(ticket_for(1, 13, 3)));
  while (hear_next<message::Parts>().ticket != 13) {
  }
  abort(13);
  EXPECT_EQ(sender.wait(1, soon()).code(), Code::kCancelled);
}

TEST(HandoverEnds, AReceiverWithANameOfItsOwnIsReachedByItsAddress) {
  KvClusterOptions options;
  options.decode_name = "decode-7";
  KvCluster cluster(options);
  ASSERT_EQ(cluster.decode[0]->engine.name(), "decode-7");
  cluster.admit_and_expect(1, 4, soon());
  cluster.send(1);
  const auto arrived = cluster.decode[0]->receiver.wait(1, Deadline::in(30s));
  ASSERT_TRUE(arrived.ok()) << arrived.error().describe();
  EXPECT_TRUE(cluster.prefill[0]->sender.wait(1, soon()).ok());
}

// An engine that listens everywhere tells the address on its way out; without a route it has none.
TEST(HandoverEnds, AReceiverThatNobodyCanDialIsRefusedWithTheFix) {
  auto engine = transfer::Engine::create({.listen = "0.0.0.0:0"}).value();
  const auto layout = PageLayout::create({"test", 1, 1, 16, 2, false}, {.num_pages = 4}).value();
  const auto pool = PagePool::create(engine, layout).value();
  const auto receiver = KvReceiver::create(engine, pool);
  if (engine.address().find("0.0.0.0") == std::string::npos) {
    EXPECT_TRUE(receiver.ok()) << engine.address();
  } else {
    ASSERT_EQ(receiver.code(), Code::kInvalidArgument);
    EXPECT_THAT(receiver.error().message, HasSubstr(engine.address()));
    EXPECT_THAT(receiver.error().message, HasSubstr("EngineOptions::advertise"));
  }
  auto advertised =
      transfer::Engine::create({.listen = "0.0.0.0:0", .advertise = "10.0.0.1:7000"}).value();
  EXPECT_TRUE(KvReceiver::create(advertised, PagePool::create(advertised, layout).value()).ok());
}

}  // namespace
}  // namespace crossdock::kv
