// SPDX-License-Identifier: Apache-2.0
#include "wire/store_protocol.hpp"

#include <gtest/gtest.h>

namespace crossdock::wire {
namespace {

Frame frame_of(FrameReader& reader, Bytes bytes) {
  reader.feed(bytes);
  return reader.next().value().value();
}

const StoreRequest kRequest{.id = 9,
                            .op = StoreOp::kCompareAndPut,
                            .key = "a/b",
                            .value = std::string("v\0w", 3),
                            .lease_ms = 5,
                            .expected_revision = 17};
const StoreReply kReply{.id = 9,
                        .code = Code::kNoMemory,
                        .message = "full",
                        .found = true,
                        .revision = 3,
                        .value = "v",
                        .keys = {"a", "", "c"}};

TEST(StoreProtocol, MessagesSurviveARoundTrip) {
  FrameReader reader(kStoreProtocol);
  const auto request = encode_store_request(kRequest).value();
  EXPECT_TRUE(decode_store_request(frame_of(reader, request)).value() == kRequest);
  const auto reply = encode_store_reply(kReply).value();
  EXPECT_TRUE(decode_store_reply(frame_of(reader, reply)).value() == kReply);
}

TEST(StoreProtocol, EveryTruncationIsAnError) {
  const auto request = encode_store_request(kRequest).value();
  const auto reply = encode_store_reply(kReply).value();
  const Bytes request_payload = Bytes(request).subspan(kFrameHeaderBytes);
  const Bytes reply_payload = Bytes(reply).subspan(kFrameHeaderBytes);
  for (std::size_t n = 0; n < request_payload.size(); ++n)
    EXPECT_EQ(decode_store_request(request_payload.first(n)).code(), Code::kCorrupt);
  for (std::size_t n = 0; n < reply_payload.size(); ++n)
    EXPECT_EQ(decode_store_reply(reply_payload.first(n)).code(), Code::kCorrupt);
}

TEST(StoreProtocol, LimitsHoldOnBothSides) {
  const std::string long_key(kMaxStoreKeyBytes + 1, 'k');
  EXPECT_EQ(encode_store_request({.key = long_key}).code(), Code::kInvalidArgument);
  EXPECT_EQ(encode_store_request({.value = std::string(kMaxStoreValueBytes + 1, 'v')}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(encode_store_reply({.keys = {long_key}}).code(), Code::kInvalidArgument);

  auto request = encode_store_request({.key = "k"}).value();
  auto with = [&](std::size_t offset, std::uint32_t value) {
    auto bytes = request;
    store_le(bytes.data() + kFrameHeaderBytes + offset, value);
    return decode_store_request(Bytes(bytes).subspan(kFrameHeaderBytes)).code();
  };
  EXPECT_EQ(with(9, kMaxStoreKeyBytes + 1), Code::kCorrupt);
  EXPECT_EQ(with(14, kMaxStoreValueBytes + 1), Code::kCorrupt);
  EXPECT_EQ(with(8, 0), Code::kCorrupt) << "no operation 0";
}

TEST(StoreProtocol, OnlyListMayHaveAnEmptyKey) {
  const auto get = encode_store_request({.op = StoreOp::kGet, .key = ""}).value();
  EXPECT_EQ(decode_store_request(Bytes(get).subspan(kFrameHeaderBytes)).code(), Code::kCorrupt);
  const auto list = encode_store_request({.op = StoreOp::kList, .key = ""}).value();
  EXPECT_TRUE(decode_store_request(Bytes(list).subspan(kFrameHeaderBytes)).ok());
}

TEST(StoreProtocol, AControlPeerIsNotAStore) {
  FrameReader reader(kStoreProtocol);
  reader.feed(encode_frame(Ping{.value = 1}).value());
  const auto frame = reader.next();
  ASSERT_FALSE(frame.ok());
  EXPECT_NE(frame.error().message.find("not a crossdock store (first bytes \"XDCK"),
            std::string::npos);
}

TEST(StoreRecord, SurvivesARoundTripAndNoticesEveryFlippedBit) {
  const StoreRecord record{.key = "k", .value = "value", .revision = 7, .expires_unix_ms = 8};
  const auto good = encode_store_record(record).value();
  EXPECT_TRUE(decode_store_record(good).value() == record);
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    auto bytes = good;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(decode_store_record(bytes).ok()) << "bit " << bit;
  }
  for (std::size_t n = 0; n < good.size(); ++n)
    EXPECT_FALSE(decode_store_record(Bytes(good).first(n)).ok());
}

TEST(GatherPart, SurvivesARoundTripAndTruncation) {
  const auto value = encode_gather_part({.rank = 3, .world = 8, .bytes = "abc"}).value();
  const auto part = decode_gather_part(value).value();
  EXPECT_EQ(part.rank, 3u);
  EXPECT_EQ(part.world, 8u);
  EXPECT_EQ(part.bytes, "abc");
  for (std::size_t n = 0; n < value.size(); ++n)
    EXPECT_FALSE(decode_gather_part(std::string_view(value).substr(0, n)).ok());
}

TEST(Percent, CodesEveryByte) {
  std::string all;
  for (int i = 0; i < 256; ++i)
    all += static_cast<char>(i);
  EXPECT_EQ(percent_decode(percent_encode(all)).value(), all);
  EXPECT_EQ(percent_encode("a/b c"), "a%2Fb%20c");
  for (const char* bad : {"%", "%4", "%zz", "abc%4", "%%41"})
    EXPECT_EQ(percent_decode(bad).code(), Code::kInvalidArgument) << bad;
}

}  // namespace
}  // namespace crossdock::wire
