// A KV sender played by the test, word by word: the other side is a real receiver.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <optional>
#include <utility>
#include <variant>

#include "kv/message.hpp"
#include "support/kv_cluster.hpp"

namespace crossdock::support {

// Request 1 is expected of it, in 32 pages.
class PlayedSender : public ::testing::Test {
 protected:
  explicit PlayedSender(const KvClusterOptions& options = {})
      : cluster(options),
        decode(*cluster.decode[0]),
        engine(transfer::Engine::create({})),
        words(engine->mailbox("kv.sender").value()),
        ticket(expect(1, 32)) {
    open();
  }
  static Deadline soon() { return Deadline::in(std::chrono::seconds(60)); }
  // A connection on which the receiver's memory can be written.
  void open() { peer.emplace(engine->open(decode.engine.name(), soon()).value()); }
  // The receiver's ticket for `pages` pages.
  kv::message::Ticket expect(kv::RequestId request, std::uint32_t pages) {
    decode.pool.admit({.request = request, .num_pages = pages}).value();
    decode.receiver.expect({.request = request, .senders = {engine->name()}, .deadline = soon()})
        .value();
    return std::get<kv::message::Ticket>(hear());
  }
  bool tell(const kv::message::Any& message) {
    return engine->notify(*peer, {"kv", kv::message::encode(message)}, soon()).ok();
  }
  kv::message::Any hear() {
    for (;;) {
      const auto word = words.receive(soon()).value();
      if (word.kind == transfer::Message::Kind::kNotification)
        return kv::message::decode(word.payload).value();
    }
  }
  void begin() {
    ASSERT_TRUE(tell(kv::message::Ready{1, ticket.ticket, 0}));
    ASSERT_TRUE(std::holds_alternative<kv::message::Go>(hear()));
  }
  void destroy_receiver() { const kv::KvReceiver gone = std::move(decode.receiver); }

  KvCluster cluster;
  KvDecodeRank& decode;
  Result<transfer::Engine> engine;
  transfer::Mailbox words;
  kv::message::Ticket ticket;
  std::optional<transfer::Peer> peer;
};

}  // namespace crossdock::support
