// SPDX-License-Identifier: Apache-2.0
#include "wire/frame.hpp"

#include <gtest/gtest.h>
#include <malloc.h>

#include "support/wire_samples.hpp"

namespace crossdock::wire {
namespace {

std::vector<std::byte> all_samples() {
  std::vector<std::byte> stream;
  test::for_each_sample([&](const auto& message) {
    const auto frame = encode_frame(message).value();
    stream.insert(stream.end(), frame.begin(), frame.end());
  });
  return stream;
}

std::vector<MessageType> types_in(FrameReader& reader) {
  std::vector<MessageType> types;
  for (;;) {
    const auto frame = reader.next();
    EXPECT_TRUE(frame.ok()) << frame.error().describe();
    if (!frame.ok() || !frame->has_value()) return types;
    types.push_back((*frame)->type);
  }
}

TEST(Frame, AnyChunkingYieldsTheSameFrames) {
  const auto stream = all_samples();
  FrameReader whole;
  whole.feed(stream);
  const auto expected = types_in(whole);
  EXPECT_EQ(expected.size(), 15u);
  for (const std::size_t chunk : {1u, 2u, 3u, 7u, 16u, 17u, 100u}) {
    FrameReader reader;
    std::vector<MessageType> types;
    for (std::size_t at = 0; at < stream.size(); at += chunk) {
      reader.feed(Bytes(stream).subspan(at, std::min(chunk, stream.size() - at)));
      const auto more = types_in(reader);
      types.insert(types.end(), more.begin(), more.end());
    }
    EXPECT_EQ(types, expected) << "chunks of " << chunk;
    EXPECT_EQ(reader.buffered(), 0u);
  }
}

Error first_error(Bytes bytes, std::uint32_t max_payload = kMaxFramePayload) {
  FrameReader reader(max_payload);
  reader.feed(bytes);
  for (;;) {
    const auto frame = reader.next();
    if (!frame.ok()) return frame.error();
    if (!frame->has_value()) return make_error(Code::kOk, "no error");
  }
}

TEST(Frame, SomethingElseOnThePortIsNamed) {
  const Error error = first_error(as_bytes("GET / HTTP/1.1\r\n\r\n"));
  EXPECT_EQ(error.code, Code::kIncompatible);
  EXPECT_EQ(error.message, "not a crossdock peer (first bytes \"GET / HTTP/1.1\\x0d\\x0a\")");
  EXPECT_EQ(first_error(as_bytes("G")).code, Code::kIncompatible) << "one wrong byte is enough";
}

TEST(Frame, AnotherVersionNamesBoth) {
  auto bytes = encode_frame(Ping{.value = 1}).value();
  store_le(bytes.data() + 4, std::uint16_t{kWireVersion + 6});
  const Error error = first_error(bytes);
  EXPECT_EQ(error.code, Code::kIncompatible);
  const auto theirs = "wire version " + std::to_string(kWireVersion + 6);
  EXPECT_NE(error.message.find(theirs), std::string::npos) << error.message;
  const auto ours = "speaks " + std::to_string(kWireVersion);
  EXPECT_NE(error.message.find(ours), std::string::npos) << error.message;
  EXPECT_EQ(first_error(Bytes(bytes).first(6)).code, Code::kIncompatible) << "six bytes suffice";
}

TEST(Frame, TooLongIsRefusedFromTheHeaderAlone) {
  auto bytes = encode_frame(Ping{.value = 1}).value();
  store_le(bytes.data() + 8, kMaxFramePayload + 1);
  const Error error = first_error(Bytes(bytes).first(12));
  EXPECT_EQ(error.code, Code::kCorrupt);
  EXPECT_NE(error.message.find("262145"), std::string::npos);
  EXPECT_NE(error.message.find("limit is 262144"), std::string::npos);
  const auto greeting = encode_frame(Notify{.payload = std::string(5000, 'x')}).value();
  EXPECT_EQ(first_error(greeting, kMaxGreetingPayload).code, Code::kCorrupt);
  EXPECT_EQ(make_frame(MessageType::kNotify, std::vector<std::byte>(kMaxFramePayload + 1)).code(),
            Code::kInvalidArgument);
}

TEST(Frame, AnyFlippedBitIsNoticed) {
  const auto good = encode_frame(Notify{.sequence = 7, .payload = "payload"}).value();
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    auto bytes = good;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    FrameReader reader;
    reader.feed(bytes);
    const auto frame = reader.next();
    // A length that grew waits for bytes that never come; everything else is an error.
    if (frame.ok()) {
      EXPECT_FALSE(frame->has_value()) << "bit " << bit;
      EXPECT_TRUE(bit / 8 >= 8 && bit / 8 < 12) << "bit " << bit;
    }
  }
}

TEST(Frame, ErrorsAreSticky) {
  FrameReader reader;
  reader.feed(as_bytes("nonsense"));
  ASSERT_FALSE(reader.next().ok());
  reader.feed(encode_frame(Ping{}).value());
  EXPECT_EQ(reader.next().code(), Code::kIncompatible);
}

TEST(Frame, TruncatedStreamsOnlyAskForMore) {
  const auto frame = encode_frame(Ping{.value = 5}).value();
  for (std::size_t n = 0; n < frame.size(); ++n) {
    FrameReader reader;
    reader.feed(Bytes(frame).first(n));
    const auto next = reader.next();
    ASSERT_TRUE(next.ok());
    EXPECT_FALSE(next->has_value());
  }
}

// An Error of code kOk would pass for success where codes are compared.
TEST(Frame, ARefusalThatSaysOkIsMalformed) {
  auto payload = encode(Refused{.code = Code::kDenied, .message = "no key"}).value();
  payload[0] = payload[1] = std::byte{0};
  EXPECT_EQ(decode<Refused>(payload).code(), Code::kCorrupt);
  EXPECT_EQ(expect<Welcome>({MessageType::kRefused, payload}).code(), Code::kCorrupt);
  EXPECT_EQ(encode(Refused{.code = Code::kOk}).code(), Code::kInvalidArgument);
}

TEST(Frame, ExpectTurnsRefusedIntoItsError) {
  const auto payload = encode(Refused{.code = Code::kDenied, .message = "no key"}).value();
  const auto result = expect<Welcome>({MessageType::kRefused, payload});
  EXPECT_EQ(result.code(), Code::kDenied);
  EXPECT_NE(result.error().message.find("no key"), std::string::npos);
  const auto other = expect<Welcome>({MessageType::kPing, encode(Ping{}).value()});
  EXPECT_EQ(other.code(), Code::kCorrupt);
  EXPECT_NE(other.error().message.find("expected Welcome from the peer, got Ping"),
            std::string::npos);
}

TEST(Frame, BufferDoesNotGrowWithThePastOfTheStream) {
  FrameReader reader;
  const auto frame = encode_frame(Notify{.payload = std::string(1000, 'x')}).value();
  for (int i = 0; i < 1000; ++i) {
    reader.feed(Bytes(frame).first(500));
    ASSERT_FALSE(reader.next().value().has_value());
    reader.feed(Bytes(frame).subspan(500));
    ASSERT_TRUE(reader.next().value().has_value());
  }
  EXPECT_EQ(reader.buffered(), 0u);
}

TEST(Frame, WhatALongFrameTookIsNotKept) {
#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
  GTEST_SKIP() << "the sanitizer's allocator does not tell how much it handed out";
#endif
  constexpr FrameProtocol kLong{0x31313131, 16u << 20, "test"};
  const auto allocated = [] {
    const auto use = ::mallinfo2();
    return use.uordblks + use.hblkhd;
  };
  FrameReader reader(kLong);
  const std::size_t before = allocated();
  {
    const std::vector<std::byte> payload(kLong.max_payload);
    reader.feed(make_frame(kLong, 1, payload).value());
  }
  ASSERT_TRUE(reader.next().value().has_value());
  ASSERT_FALSE(reader.next().value().has_value());
  EXPECT_LT(allocated(), before + 128 * 1024);
}

}  // namespace
}  // namespace crossdock::wire
