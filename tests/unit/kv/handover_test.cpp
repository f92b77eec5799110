// Sender and receiver together, over real engines in this process: every tensor-parallel pairing
// and layout byte for byte, order of events, early pushes, aborts with poisoned pages, expiry,
// refusal. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <future>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <mutex>
#include <thread>

#include "kv/message.hpp"
#include "support/kv_cluster.hpp"

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;
using support::all_are;
using support::KvCluster;
using support::KvClusterOptions;
using support::poison;
using testing::HasSubstr;

Deadline soon() {
  return Deadline::in(20s);
}

struct Pairing {
  std::uint32_t prefill_tp, decode_tp;
};

class HandoverTp : public testing::TestWithParam<Pairing> {};

TEST_P(HandoverTp, EveryByteArrivesInEveryLayoutPairAndMode) {
  for (int variant = 0; variant < 8; ++variant) {
    KvClusterOptions options;
    options.prefill_tp = GetParam().prefill_tp;
    options.decode_tp = GetParam().decode_tp;
    options.prefill_layout.order = variant & 1 ? PoolOrder::kBlockFirst : PoolOrder::kLayerFirst;
    options.decode_layout.order = variant & 2 ? PoolOrder::kBlockFirst : PoolOrder::kLayerFirst;
    options.prefill_layout.planes = variant & 2 ? Planes::kSplit : Planes::kJoined;
    options.decode_layout.cell = variant & 4 ? CellOrder::kHeadMajor : CellOrder::kTokenMajor;
    options.sender.mode = variant & 4 ? SendMode::kBatch : SendMode::kStreamed;
    KvCluster cluster(options);
    cluster.admit_and_expect(7, 9, soon());
    cluster.send(7);
    for (auto& rank : cluster.prefill) {
      const auto sent = rank->sender.wait(7, soon());
      ASSERT_TRUE(sent.ok()) << sent.error().describe();
    }
    for (auto& rank : cluster.decode) {
      const auto arrived = rank->receiver.wait(7, soon());
      ASSERT_TRUE(arrived.ok()) << arrived.error().describe();
      const auto bad = KvCluster::mismatch(*rank, 7);
      ASSERT_FALSE(bad) << "variant " << variant << ": " << bad->describe();
      EXPECT_EQ(rank->receiver.stats().bytes_received, 9 * rank->pool.layout().page_bytes());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, HandoverTp,
                         testing::Values(Pairing{1, 1}, Pairing{4, 2}, Pairing{2, 4}, Pairing{1, 8},
                                         Pairing{8, 1}, Pairing{16, 2}, Pairing{2, 16}),
                         [](const auto& test) {
                           return std::to_string(test.param.prefill_tp) + "to" +
                                  std::to_string(test.param.decode_tp);
                         });

TEST(Handover, LatentCachesGoToEveryRankOnce) {
  KvClusterOptions options;
  options.shape = {"mla", 4, 1, 576, 2, true};
  options.prefill_tp = 2;
  options.decode_tp = 4;
  KvCluster cluster(options);
  cluster.admit_and_expect(1, 5, soon());
  cluster.send(1);
  for (auto& rank : cluster.decode) {
    ASSERT_TRUE(rank->receiver.wait(1, soon()).ok());
    EXPECT_FALSE(KvCluster::mismatch(*rank, 1));
  }
}

TEST(Handover, LayersAreAnnouncedOneByOneAndUsableBeforeTheRest) {
  std::mutex mutex;
  std::vector<std::uint32_t> layers;
  std::promise<bool> done;  // set_value() twice would throw
  KvClusterOptions options;
  options.receiver.on_layer = [&](RequestId, std::uint32_t layer) {
    const std::lock_guard lock(mutex);
    layers.push_back(layer);
  };
  options.receiver.on_done = [&](RequestId, const Result<>& result) {
    done.set_value(result.ok());
  };
  KvCluster cluster(options);
  cluster.admit_and_expect(3, 4, soon());
  auto& receiver = cluster.decode[0]->receiver;
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(receiver.wait(3, layer, Deadline::now()).code(), Code::kDeadline);
    cluster.fill(3, layer);
    ASSERT_TRUE(cluster.prefill[0]->sender.push(3, layer).ok());
    ASSERT_TRUE(receiver.wait(3, layer, soon()).ok());
  }
  ASSERT_TRUE(cluster.prefill[0]->sender.finish(3).ok());
  ASSERT_TRUE(receiver.wait(3, soon()).ok());
  EXPECT_FALSE(KvCluster::mismatch(*cluster.decode[0], 3));
  auto over = done.get_future();
  ASSERT_EQ(over.wait_for(20s), std::future_status::ready);
  EXPECT_TRUE(over.get());
  const std::lock_guard lock(mutex);
  EXPECT_THAT(layers, testing::ElementsAre(0, 1, 2));
  EXPECT_EQ(receiver.wait(3, 9, soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(receiver.wait(4, soon()).code(), Code::kNotFound);
}

TEST(Handover, PushesBeforeTheRequestIsAskedForWait) {
  KvCluster cluster({});
  ASSERT_TRUE(cluster.prefill[0]->pool.admit({.request = 5, .num_pages = 6}).ok());
  cluster.send(5);
  EXPECT_EQ(cluster.prefill[0]->sender.wait(5, Deadline::now()).code(), Code::kDeadline);
  ASSERT_TRUE(cluster.decode[0]->pool.admit({.request = 5, .num_pages = 6}).ok());
  ASSERT_TRUE(cluster.expect(*cluster.decode[0], 5, soon()).ok());
  ASSERT_TRUE(cluster.decode[0]->receiver.wait(5, soon()).ok());
  EXPECT_TRUE(cluster.prefill[0]->sender.wait(5, soon()).ok());
  EXPECT_FALSE(KvCluster::mismatch(*cluster.decode[0], 5));
}

TEST(Handover, SharedPrefixPagesAreNotSent) {
  KvCluster cluster({});
  auto& decode = *cluster.decode[0];
  ASSERT_TRUE(cluster.prefill[0]->pool.admit({.request = 5, .num_pages = 6}).ok());
  const auto table = decode.pool.admit({.request = 5, .num_pages = 6}).value();
  ASSERT_TRUE(decode.receiver
                  .expect({.request = 5,
                           .senders = cluster.sender_names(),
                           .first_page = 4,
                           .deadline = soon()})
                  .ok());
  cluster.send(5);
  ASSERT_TRUE(decode.receiver.wait(5, soon()).ok());
  EXPECT_EQ(decode.receiver.stats().bytes_received, 2 * decode.pool.layout().page_bytes());
  for (std::uint32_t i = 0; i < 6; ++i) {
    const bool filled = !pattern::check_page(decode.pool.layout(), decode.pool.base(), 0,
                                             table.pages[i], {5, i * 4});
    EXPECT_EQ(filled, i >= 4) << i;
  }
}

TEST(Handover, ARequestThatNeedsNothingIsCompleteAtOnce) {
  KvCluster cluster({});
  auto& decode = *cluster.decode[0];
  ASSERT_TRUE(cluster.prefill[0]->pool.admit({.request = 5, .num_pages = 2}).ok());
  ASSERT_TRUE(decode.pool.admit({.request = 5, .num_pages = 2}).ok());
  ASSERT_TRUE(decode.receiver
                  .expect({.request = 5,
                           .senders = cluster.sender_names(),
                           .first_page = 2,
                           .deadline = soon()})
                  .ok());
  EXPECT_TRUE(decode.receiver.wait(5, Deadline::now()).ok());
  cluster.send(5);
  EXPECT_TRUE(cluster.prefill[0]->sender.wait(5, soon()).ok());
}

TEST(Handover, ChunkedPushesCompleteALayerOnlyWhenAllPagesAreThere) {
  KvCluster cluster({});
  cluster.admit_and_expect(2, 8, soon());
  auto& sender = cluster.prefill[0]->sender;
  auto& receiver = cluster.decode[0]->receiver;
  for (std::uint32_t layer = 0; layer < 3; ++layer)
    cluster.fill(2, layer);
  ASSERT_TRUE(sender.push(2, 0, 0, 4).ok());
  for (std::uint32_t layer = 1; layer < 3; ++layer)
    ASSERT_TRUE(sender.push(2, layer).ok());
  ASSERT_TRUE(receiver.wait(2, 2, soon()).ok());
  EXPECT_EQ(receiver.wait(2, 0, Deadline::in(20ms)).code(), Code::kDeadline);
  ASSERT_TRUE(sender.push(2, 0, 4, 4).ok());
  ASSERT_TRUE(sender.finish(2).ok());
  ASSERT_TRUE(receiver.wait(2, soon()).ok());
  EXPECT_FALSE(KvCluster::mismatch(*cluster.decode[0], 2));
}

TEST(Handover, ManyRequestsFromManyThreads) {
  KvClusterOptions options;
  options.prefill_tp = 2;
  options.decode_tp = 4;
  options.prefill_layout.num_pages = options.decode_layout.num_pages = 512;
  options.sender.max_inflight = 3;  // most pushes queue
  KvCluster cluster(options);
  for (RequestId id = 1; id <= 40; ++id)
    cluster.admit_and_expect(id, static_cast<std::uint32_t>(1 + id % 12), soon());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (RequestId id = 1; id <= 40; ++id)
        if (id % 4 == static_cast<RequestId>(t)) cluster.send(id);
    });
  for (auto& thread : threads)
    thread.join();
  for (RequestId id = 1; id <= 40; ++id)
    for (auto& rank : cluster.decode) {
      const auto arrived = rank->receiver.wait(id, soon());
      ASSERT_TRUE(arrived.ok()) << arrived.error().describe();
      EXPECT_FALSE(KvCluster::mismatch(*rank, id));
    }
}

// A request large enough that its transfers are in flight when it is aborted.
KvClusterOptions large() {
  KvClusterOptions options;
  options.shape = {"large", 8, 8, 128, 2, false};
  options.prefill_layout = {.num_pages = 128, .page_tokens = 16};
  options.decode_layout = {.num_pages = 128, .page_tokens = 16};
  return options;
}

// After both sides gave the pages back, nothing may write to decode's any more; what prefill puts
// into its own pages must never be seen at decode.
void expect_quiet(KvCluster& cluster, RequestId request) {
  auto& prefill = *cluster.prefill[0];
  auto& decode = *cluster.decode[0];
  EXPECT_FALSE(prefill.sender.wait(request, soon()).ok());
  EXPECT_FALSE(decode.receiver.wait(request, soon()).ok());
  ASSERT_TRUE(prefill.pool.release(request).ok());
  ASSERT_TRUE(decode.pool.release(request).ok());
  ASSERT_TRUE(prefill.pool.admit({.request = 900, .num_pages = 128}, soon()).ok());
  ASSERT_TRUE(decode.pool.admit({.request = 900, .num_pages = 128}, soon()).ok());
  poison(prefill.pool, 0xa5);
  poison(decode.pool, 0x5a);
  ASSERT_TRUE(prefill.sender.close(soon()).ok());
  ASSERT_TRUE(prefill.engine.close(soon()).ok());
  EXPECT_TRUE(all_are(decode.pool, 0x5a));
}

TEST(HandoverAbort, ByTheReceiverInTheMiddle) {
  for (std::uint32_t layers_first = 0; layers_first < 3; ++layers_first) {
    KvCluster cluster(large());
    cluster.admit_and_expect(1, 128, soon());
    for (std::uint32_t layer = 0; layer < 7; ++layer)  // so that it is not over before
      ASSERT_TRUE(cluster.prefill[0]->sender.push(1, layer).ok());
    if (layers_first > 0) {
      ASSERT_TRUE(cluster.decode[0]->receiver.wait(1, layers_first - 1, soon()).ok());
    }
    cluster.decode[0]->receiver.abort(1, "the client went away");
    const auto result = cluster.decode[0]->receiver.wait(1, soon());
    ASSERT_EQ(result.code(), Code::kCancelled);
    EXPECT_THAT(result.error().message, HasSubstr("the client went away"));
    expect_quiet(cluster, 1);
    EXPECT_EQ(cluster.prefill[0]->sender.push(1, 0).code(), Code::kNotFound);
  }
}

TEST(HandoverAbort, ByTheSenderInTheMiddle) {
  KvCluster cluster(large());
  cluster.admit_and_expect(1, 128, soon());
  for (std::uint32_t layer = 0; layer < 8; ++layer)
    ASSERT_TRUE(cluster.prefill[0]->sender.push(1, layer).ok());
  cluster.prefill[0]->sender.abort(1, "prefill ran out of memory");
  EXPECT_EQ(cluster.prefill[0]->sender.push(1, 0).code(), Code::kCancelled);
  const auto result = cluster.decode[0]->receiver.wait(1, soon());
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(result.error().message, HasSubstr("prefill ran out of memory"));
  EXPECT_THAT(result.error().message, HasSubstr(cluster.prefill[0]->engine.name()));
  expect_quiet(cluster, 1);
}

TEST(HandoverAbort, OneOfManySendersStopsAllOthers) {
  KvClusterOptions options;
  options.prefill_tp = 4;
  options.decode_tp = 2;
  KvCluster cluster(options);
  cluster.admit_and_expect(1, 8, soon());
  for (auto& rank : cluster.prefill)
    ASSERT_TRUE(rank->sender.push(1, 0).ok());
  cluster.prefill[3]->sender.abort(1, "rank 3 failed");
  EXPECT_FALSE(cluster.decode[1]->receiver.wait(1, soon()).ok());
  EXPECT_FALSE(cluster.prefill[2]->sender.wait(1, soon()).ok());
}

TEST(HandoverAbort, BeforeAnythingWasPushed) {
  KvCluster cluster({});
  cluster.admit_and_expect(1, 4, soon());
  cluster.decode[0]->receiver.abort(1, "changed my mind");
  EXPECT_EQ(cluster.decode[0]->receiver.wait(1, soon()).code(), Code::kCancelled);
  ASSERT_TRUE(cluster.decode[0]->pool.release(1).ok());
  EXPECT_EQ(cluster.decode[0]->pool.stats().free, 64u);
}

TEST(HandoverAbort, PagesAreInQuarantineUntilTheRequestIsQuiesced) {
  KvCluster cluster(large());
  cluster.admit_and_expect(1, 128, soon());
  ASSERT_TRUE(cluster.decode[0]->pool.release(1).ok());  // while it is still expected
  EXPECT_EQ(cluster.decode[0]->pool.stats().quarantined, 128u);
  cluster.decode[0]->receiver.abort(1, "gone");
  EXPECT_TRUE(cluster.decode[0]->pool.admit({.request = 2, .num_pages = 128}, soon()).ok());
}

TEST(HandoverExpiry, NamesRequestLayerAndPeer) {
  KvCluster cluster({});
  cluster.admit_and_expect(77, 4, Deadline::in(150ms));
  cluster.fill(77, 0);
  ASSERT_TRUE(cluster.prefill[0]->sender.push(77, 0).ok());
  const auto result = cluster.decode[0]->receiver.wait(77, soon());
  ASSERT_EQ(result.code(), Code::kDeadline);
  EXPECT_THAT(result.error().message, HasSubstr("request 77 expired: layer 1 of 3"));
  EXPECT_THAT(result.error().message, HasSubstr(cluster.prefill[0]->engine.name()));
  ASSERT_TRUE(cluster.decode[0]->pool.release(77).ok());
  EXPECT_TRUE(cluster.decode[0]->pool.admit({.request = 1, .num_pages = 64}, soon()).ok());
  EXPECT_FALSE(cluster.prefill[0]->sender.wait(77, soon()).ok());
}

TEST(HandoverExpiry, ASenderNobodyAsksGivesUp) {
  KvClusterOptions options;
  options.sender.ticket_timeout = 50ms;
  KvCluster cluster(options);
  ASSERT_TRUE(cluster.prefill[0]->pool.admit({.request = 1, .num_pages = 1}).ok());
  ASSERT_TRUE(cluster.prefill[0]->sender.push(1, 0).ok());
  const auto result = cluster.prefill[0]->sender.wait(1, soon());
  ASSERT_EQ(result.code(), Code::kDeadline);
  EXPECT_THAT(result.error().message, HasSubstr("0 receivers asked for it within 50 ms"));
}

TEST(HandoverRefusal, IncompatiblePoolsFailAtOnceNamingBoth) {
  KvClusterOptions options;
  options.decode_layout.page_tokens = 8;
  KvCluster cluster(options);
  cluster.admit_and_expect(1, 2, soon());
  const auto result = cluster.decode[0]->receiver.wait(1, soon());
  ASSERT_EQ(result.code(), Code::kIncompatible);
  EXPECT_THAT(result.error().message, HasSubstr("pages of 4 tokens"));
  EXPECT_THAT(result.error().message, HasSubstr("pages of 8 tokens"));
}

TEST(HandoverRefusal, UnreachableSendersFailAtOnce) {
  KvCluster cluster({});
  auto& decode = *cluster.decode[0];
  ASSERT_TRUE(decode.pool.admit({.request = 1, .num_pages = 2}).ok());
  ASSERT_TRUE(
      decode.receiver.expect({.request = 1, .senders = {"127.0.0.1:1"}, .deadline = soon()}).ok());
  const auto result = decode.receiver.wait(1, soon());
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(result.error().message, HasSubstr("127.0.0.1:1 (rank 0) cannot be reached"));
  EXPECT_NE(result.code(), Code::kDeadline);
  ASSERT_TRUE(decode.pool.release(1).ok());
  EXPECT_EQ(decode.pool.stats().free, 64u);
}

TEST(HandoverRefusal, MistakesOfTheCallerAreNamed) {
  KvCluster cluster({});
  auto& sender = cluster.prefill[0]->sender;
  auto& receiver = cluster.decode[0]->receiver;
  EXPECT_EQ(sender.push(1, 0).code(), Code::kNotFound);
  EXPECT_EQ(sender.finish(1).code(), Code::kNotFound);
  EXPECT_EQ(cluster.expect(*cluster.decode[0], 1, soon()).code(), Code::kNotFound);
  cluster.admit_and_expect(1, 4, soon());
  EXPECT_EQ(cluster.expect(*cluster.decode[0], 1, soon()).code(), Code::kInvalidArgument);
  EXPECT_EQ(sender.push(1, 3).code(), Code::kInvalidArgument);
  EXPECT_EQ(sender.push(1, 0, 3, 2).code(), Code::kInvalidArgument);
  EXPECT_EQ(sender.push(1, 0, 0, 0).code(), Code::kInvalidArgument);
  ASSERT_TRUE(cluster.decode[0]->pool.admit({.request = 2, .num_pages = 1}).ok());
  const auto name = cluster.prefill[0]->engine.name();
  EXPECT_EQ(receiver.expect({.request = 2, .senders = {name, name}, .deadline = soon()}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(receiver.expect({.request = 2, .senders = {}, .deadline = soon()}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(receiver.expect({.request = 2, .senders = {name}, .first_page = 2, .deadline = soon()})
                .code(),
            Code::kInvalidArgument);
}

TEST(HandoverRefusal, StrayMessagesAreCountedAndIgnored) {
  KvCluster cluster({});
  auto& decode = *cluster.decode[0];
  cluster.admit_and_expect(1, 4, soon());
  const auto peer = cluster.prefill[0]->engine.open(decode.engine.name(), soon()).value();
  for (const std::string payload : {"", "rubbish", "KV\x01\x03", "KV\x09\x03"})
    ASSERT_TRUE(cluster.prefill[0]->engine.notify(peer, {"kv", payload}, soon()).ok());
  cluster.send(1);
  ASSERT_TRUE(decode.receiver.wait(1, soon()).ok());
  EXPECT_EQ(decode.receiver.stats().ignored_messages, 4u);
}

TEST(HandoverEnd, ADestroyedSenderFailsItsRequestsWithoutLateWrites) {
  KvCluster cluster(large());
  cluster.admit_and_expect(1, 128, Deadline::in(5s));
  for (std::uint32_t layer = 0; layer < 8; ++layer)
    ASSERT_TRUE(cluster.prefill[0]->sender.push(1, layer).ok());
  cluster.prefill.clear();  // sender, pool and engine
  const auto result = cluster.decode[0]->receiver.wait(1, soon());
  if (result.ok()) return;  // everything had arrived before
  EXPECT_THAT(result.error().message, HasSubstr("request 1"));
  ASSERT_TRUE(cluster.decode[0]->pool.release(1).ok());
  ASSERT_TRUE(cluster.decode[0]->pool.admit({.request = 2, .num_pages = 128}, soon()).ok());
}

// The second ticket waits behind the first, whose handler is held, until its receiver is dead; so
// the loss is known before the ticket is looked at.
TEST(HandoverEnd, AReceiverThatDiesBeforeItsTicketIsAcceptedFailsTheRequest) {
  std::promise<void> held;
  std::promise<void> go_on;
  KvClusterOptions options;
  options.sender.on_asked = [&held, wait = go_on.get_future().share()](RequestId request) {
    if (request != 1) return;
    held.set_value();
    wait.wait_for(20s);
  };
  KvCluster cluster(options);
  auto& prefill = *cluster.prefill[0];
  // Once Go stands for the connection, on_asked runs on the link's thread: so it can be held.
  cluster.admit_and_expect(7, 2, soon());
  cluster.send(7);
  ASSERT_TRUE(prefill.sender.wait(7, soon()).ok());
  ASSERT_TRUE(prefill.pool.release(7).ok());
  cluster.admit_and_expect(1, 2, soon());
  ASSERT_EQ(held.get_future().wait_for(20s), std::future_status::ready);
  ASSERT_TRUE(prefill.pool.admit({.request = 2, .num_pages = 8}).ok());
  ASSERT_TRUE(prefill.sender.push(2, 0).ok());
  const auto receiver = prefill.engine.open(cluster.decode[0]->engine.name(), soon()).value();
  {
    auto& decode = *cluster.decode[0];
    message::Ticket ticket;
    ticket.request = 2;
    ticket.ticket = 99;
    ticket.shape = decode.pool.layout().shape();
    ticket.layout = decode.pool.layout().options();
    ticket.expires_ms = 60'000;
    ticket.total_pages = 8;
    ticket.pages = {0, 1, 2, 3, 4, 5, 6, 7};
    const auto peer = decode.engine.open(prefill.engine.name(), soon()).value();
    ASSERT_TRUE(decode.engine.notify(peer, {"kv.sender", message::encode(ticket)}, soon()).ok());
  }
  cluster.decode.clear();
  for (const Deadline limit = soon(); receiver.alive() && !limit.passed();)
    std::this_thread::yield();
  go_on.set_value();
  const auto sent = prefill.sender.wait(2, soon());
  ASSERT_EQ(sent.code(), Code::kPeerLost);
  EXPECT_THAT(sent.error().message, HasSubstr("asked for it and was lost"));
  EXPECT_THAT(sent.error().message, HasSubstr(receiver.name()));
  ASSERT_TRUE(prefill.pool.release(1).ok());
  ASSERT_TRUE(prefill.pool.release(2).ok());
  EXPECT_TRUE(prefill.pool.admit({.request = 3, .num_pages = 64}, soon()).ok());
}

// Decode may close as soon as it has every page: before the sender hears that the last transfer was
// taken, or before finish().
TEST(HandoverEnd, AReceiverThatClosesWithEverythingLosesNothing) {
  KvCluster cluster{KvClusterOptions()};
  auto& prefill = *cluster.prefill[0];
  // Told of losses after the sender's mailbox: they are told in the order of their names.
  auto after = prefill.engine.mailbox("kv.sender.after").value();
  cluster.admit_and_expect(1, 8, soon());
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    cluster.fill(1, layer);
    ASSERT_TRUE(prefill.sender.push(1, layer).ok());
  }
  ASSERT_TRUE(cluster.decode[0]->receiver.wait(1, soon()).ok());
  EXPECT_FALSE(KvCluster::mismatch(*cluster.decode[0], 1));
  ASSERT_TRUE(cluster.decode[0]->receiver.close(soon()).ok());
  ASSERT_TRUE(cluster.decode[0]->engine.close(soon()).ok());
  ASSERT_EQ(after.receive(soon()).value().kind, transfer::Message::Kind::kPeerLost);
  EXPECT_TRUE(prefill.sender.finish(1).ok());
  const auto sent = prefill.sender.wait(1, soon());
  EXPECT_TRUE(sent.ok()) << sent.error().describe();
}

// One page of the last layer is missing.
TEST(HandoverEnd, AReceiverThatClosesBeforeItHasEverythingIsLost) {
  KvCluster cluster{KvClusterOptions()};
  auto& prefill = *cluster.prefill[0];
  cluster.admit_and_expect(1, 8, soon());
  for (std::uint32_t layer = 0; layer < 3; ++layer)
    ASSERT_TRUE(prefill.sender.push(1, layer, 0, layer == 2 ? 7 : 8).ok());
  for (std::uint32_t layer = 0; layer < 2; ++layer)
    ASSERT_TRUE(cluster.decode[0]->receiver.wait(1, layer, soon()).ok());
  ASSERT_TRUE(cluster.decode[0]->engine.close(soon()).ok());
  const auto sent = prefill.sender.wait(1, soon());
  // Its memory is taken back first, which a transfer that runs just then may tell.
  EXPECT_THAT(sent.code(), ::testing::AnyOf(Code::kPeerLost, Code::kClosed))
      << sent.error().describe();
  EXPECT_THAT(sent.error().message, HasSubstr(cluster.decode[0]->engine.name()));
}

}  // namespace
}  // namespace crossdock::kv
