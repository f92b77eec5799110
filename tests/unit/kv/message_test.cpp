// The KV control codec: round trips, every truncation refused, versions, limits.
// SPDX-License-Identifier: Apache-2.0
#include "kv/message.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

namespace crossdock::kv::message {
namespace {

Ticket sample_ticket() {
  Ticket t;
  t.request = 0x1122334455667788;
  t.shape = {"", 48, 4, 128, 2, false};
  t.layout = {.num_pages = 1000,
              .page_tokens = 16,
              .order = PoolOrder::kBlockFirst,
              .planes = Planes::kSplit,
              .cell = CellOrder::kHeadMajor,
              .tp_size = 4,
              .tp_rank = 3};
  t.base = 0x7f00'0000'1000;
  t.sender_tp = 2;
  t.sender_rank = 1;
  t.expires_ms = 30'000;
  t.first_page = 32;
  t.total_pages = 3;
  t.life = 17;
  t.address = "10.0.0.1:7000";
  t.pages = {5, 7, 999};
  return t;
}

std::vector<Any> samples() {
  return {sample_ticket(),
          Ready{7, 5, 3},
          Go{7, 5, 11, 6},
          Abort{9, 5, "the client went away"},
          Parts{7, 5, 1, {{0, 48, 0, 512}, {3, 1, 512, 4}}},
          Stopped{8, 5, 2, Code::kPeerLost, "lost"}};
}

TEST(Message, RoundTripsKeepEveryField) {
  for (const Any& message : samples()) {
    const std::string bytes = encode(message);
    const auto back = decode(bytes);
    ASSERT_TRUE(back.ok()) << back.error().describe();
    EXPECT_EQ(back->index(), message.index());
    EXPECT_EQ(encode(*back), bytes);
  }
  const auto back = decode(encode(sample_ticket())).value();
  const auto& ticket = std::get<Ticket>(back);
  EXPECT_TRUE(ticket.shape.same_bytes(sample_ticket().shape));
  EXPECT_EQ(ticket.life, 17u);
  EXPECT_EQ(ticket.address, "10.0.0.1:7000");
  EXPECT_EQ(ticket.layout.cell, CellOrder::kHeadMajor);
  EXPECT_THAT(ticket.pages, testing::ElementsAre(5, 7, 999));
}

TEST(Message, EveryTruncationAndExtensionIsRefused) {
  for (const Any& message : samples()) {
    const std::string bytes = encode(message);
    for (std::size_t n = 0; n < bytes.size(); ++n)
      EXPECT_EQ(decode(bytes.substr(0, n)).code(), Code::kInvalidArgument) << n;
    EXPECT_EQ(decode(bytes + '\0').code(), Code::kInvalidArgument);
  }
}

TEST(Message, AnotherVersionIsNamed) {
  std::string bytes = encode(Abort{1, 2, ""});
  bytes[2] = 9;
  const auto result = decode(bytes);
  ASSERT_EQ(result.code(), Code::kIncompatible);
  EXPECT_THAT(result.error().message, testing::HasSubstr("version 9; this side speaks version 2"));
}

TEST(Message, LyingCountsDoNotAllocate) {
  std::string bytes = encode(Parts{1, 2, 3, {}});
  bytes.replace(bytes.size() - 4, 4, "\xff\xff\xff\x7f");
  EXPECT_EQ(decode(bytes).code(), Code::kInvalidArgument);
  Ticket ticket = sample_ticket();
  ticket.total_pages = 2;  // fewer than it lists
  EXPECT_EQ(decode(encode(ticket)).code(), Code::kInvalidArgument);
  ticket.total_pages = UINT32_MAX;
  EXPECT_EQ(decode(encode(ticket)).code(), Code::kInvalidArgument);
}

TEST(Message, RandomBytesNeverCrash) {
  std::mt19937 random(3);
  const auto all = samples();
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = encode(all[random() % all.size()]);
    for (std::uint32_t flips = 1 + random() % 4; flips > 0; --flips)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    const auto message = decode(bytes);
    EXPECT_TRUE(!message.ok() || decode(encode(*message)).ok());
  }
}

TEST(Message, LongTablesAreCutAndLongTextsShortened) {
  Ticket ticket = sample_ticket();
  ticket.pages.assign(kMostPages * 2 + 5, 1);
  ticket.total_pages = static_cast<std::uint32_t>(ticket.pages.size());
  const auto chunks = chunks_of(ticket);
  ASSERT_EQ(chunks.size(), 3u);
  std::uint32_t at = 0;
  for (const Ticket& chunk : chunks) {
    EXPECT_EQ(chunk.chunk_first, at);
    at += static_cast<std::uint32_t>(chunk.pages.size());
    EXPECT_LT(encode(chunk).size(), 60u * 1024);
    EXPECT_TRUE(decode(encode(chunk)).ok());
  }
  EXPECT_EQ(at, ticket.total_pages);
  ticket.pages.clear();
  ticket.total_pages = 0;
  EXPECT_EQ(chunks_of(ticket).size(), 1u);
  const auto back = decode(encode(Abort{1, 2, std::string(5'000, 'x')})).value();
  EXPECT_EQ(std::get<Abort>(back).reason.size(), kLongestText);
}

}  // namespace
}  // namespace crossdock::kv::message
