// SPDX-License-Identifier: Apache-2.0
#include "wire/data.hpp"

#include <array>
#include <gtest/gtest.h>

#include "wire/checksum.hpp"

namespace crossdock::wire {
namespace {

using Buffer = std::vector<std::byte>;

const std::vector<Descriptor> kTwo = {{0x1000, 64}, {0xffff'ffff'0000'0000, 4096}};

Buffer write_frame(const RequestFrame& frame) {
  Buffer out(kMaxDataHeadBytes);
  out.resize(encode_write(frame, out).value());
  return out;
}

TEST(DataFrame, WriteAndReadSurviveARoundTrip) {
  for (const bool write : {true, false}) {
    const RequestFrame frame{.request_id = 77,
                             .expiry_ms = 1500,
                             .descriptors = kTwo,
                             .has_checksum = true,
                             .checksum = 0x1234};
    Buffer out(kMaxDataHeadBytes);
    const auto size = (write ? encode_write(frame, out) : encode_read(frame, out)).value();
    EXPECT_EQ(size, 64u) << "header and two descriptors";
    const auto header = decode_data_header(out).value();
    EXPECT_EQ(header.type, write ? DataType::kWrite : DataType::kRead);
    EXPECT_EQ(header.request_id, 77u);
    EXPECT_EQ(header.expiry_ms, 1500u);
    EXPECT_TRUE(header.has_checksum);
    EXPECT_EQ(header.checksum, write ? 0x1234u : 0u);
    EXPECT_EQ(header.payload_bytes, 4160u);
    EXPECT_EQ(header.trailing_bytes(), write ? 4160u : 0u);
    std::vector<Descriptor> got(header.count);
    ASSERT_TRUE(decode_descriptors(header, Bytes(out).subspan(40, header.body_bytes()), got).ok());
    EXPECT_EQ(got, kTwo);
  }
}

TEST(DataFrame, ReadDataAndAckSurviveARoundTrip) {
  Buffer out(kMaxDataHeadBytes);
  ASSERT_EQ(encode_read_data(
                {.request_id = 5, .payload_bytes = 9, .has_checksum = true, .checksum = 11}, out)
                .value(),
            64u);
  const auto data = decode_data_header(out).value();
  EXPECT_EQ(data.type, DataType::kReadData);
  EXPECT_EQ(data.trailing_bytes(), 9u);
  EXPECT_EQ(data.content_bytes(), 0u);
  EXPECT_EQ(data.body_bytes(), 24u) << "zeros";
  EXPECT_TRUE(check_payload(data, 11).ok());
  EXPECT_EQ(check_payload(data, 12).code(), Code::kCorrupt);

  const AckFrame ack{
      .request_id = 6, .status = Code::kDenied, .bytes_applied = 3, .message = "outside"};
  const auto size = encode_ack(ack, out).value();
  EXPECT_EQ(size, 64u);
  const auto header = decode_data_header(out).value();
  EXPECT_EQ(header.type, DataType::kAck);
  EXPECT_EQ(header.status, Code::kDenied);
  EXPECT_EQ(header.payload_bytes, 3u);
  EXPECT_EQ(header.trailing_bytes(), 0u);
  EXPECT_EQ(decode_ack_message(header, Bytes(out).subspan(40, 24)).value(), "outside");
}

TEST(DataFrame, LongAckMessagesAreCut) {
  Buffer out(kMaxDataHeadBytes);
  const std::string text(1000, 'x');
  const auto size = encode_ack({.request_id = 1, .message = text}, out).value();
  EXPECT_EQ(size, kMaxAckBytes);
  EXPECT_TRUE(decode_data_header(out).ok());
}

// What was in the buffer before must not travel, nor tell a frame from an equal one.
TEST(DataFrame, HeadsEndAtALineAndAreFilledWithZeros) {
  for (std::size_t n = 1; n < 40; ++n) {
    const std::vector<Descriptor> descriptors(n, {0x1000, 1});
    Buffer out(kMaxDataHeadBytes, std::byte{0xee});
    const auto size = encode_write({.request_id = 3, .descriptors = descriptors}, out).value();
    const auto header = decode_data_header(out).value();
    const std::size_t content = kDataHeaderBytes + n * kDescriptorBytes;
    EXPECT_EQ(size % 64, 0u);
    EXPECT_LT(size - content, 64u);
    EXPECT_EQ(size, header.head_bytes());
    EXPECT_EQ(out[size], std::byte{0xee}) << "behind the head";
    for (std::size_t i = content; i < size; ++i)
      EXPECT_EQ(out[i], std::byte{0}) << n << " descriptors, byte " << i;
    std::vector<Descriptor> got(n);
    EXPECT_TRUE(decode_descriptors(header, Bytes(out).subspan(40, header.body_bytes()), got).ok());
  }
}

TEST(DataFrame, EveryTruncationIsAnError) {
  const Buffer frame = write_frame({.request_id = 1, .descriptors = kTwo});
  for (std::size_t n = 0; n < kDataHeaderBytes; ++n)
    EXPECT_EQ(decode_data_header(Bytes(frame).first(n)).code(), Code::kCorrupt);
  const auto header = decode_data_header(frame).value();
  std::vector<Descriptor> out(2);
  for (std::size_t n = 0; n < header.body_bytes(); ++n)
    EXPECT_FALSE(decode_descriptors(header, Bytes(frame).subspan(40, n), out).ok());
  EXPECT_FALSE(decode_descriptors(header, Bytes(frame).subspan(40), std::span(out).first(1)).ok());
}

TEST(DataFrame, AnyFlippedBitOfHeaderOrDescriptorsIsNoticed) {
  const std::vector<Descriptor> three(3, {0x2000, 8});
  const Buffer good = write_frame({.request_id = 9, .descriptors = three});
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    Buffer bytes = good;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    const auto header = decode_data_header(bytes);
    if (bit / 8 < kDataHeaderBytes) {
      EXPECT_FALSE(header.ok()) << "bit " << bit;
      continue;
    }
    std::vector<Descriptor> out(3);
    EXPECT_EQ(decode_descriptors(*header, Bytes(bytes).subspan(40), out).code(), Code::kCorrupt)
        << "bit " << bit;
  }
}

TEST(DataFrame, AnyFlippedBitOfAMessageOrBehindItIsNoticed) {
  Buffer good(kMaxAckBytes);
  good.resize(encode_ack({.request_id = 4, .message = "outside"}, good).value());
  ASSERT_TRUE(decode_ack_message(decode_data_header(good).value(), Bytes(good).subspan(40)).ok());
  for (std::size_t bit = kDataHeaderBytes * 8; bit < good.size() * 8; ++bit) {
    Buffer bytes = good;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    const auto header = decode_data_header(bytes).value();
    EXPECT_EQ(decode_ack_message(header, Bytes(bytes).subspan(40)).code(), Code::kCorrupt) << bit;
  }
}

TEST(DataFrame, EncodersRefuseWhatDecodersWouldRefuse) {
  Buffer out(kMaxDataHeadBytes + 100);
  const auto refused = [&](std::vector<Descriptor> descriptors) {
    return encode_write({.request_id = 1, .descriptors = descriptors}, out).code();
  };
  EXPECT_EQ(refused({}), Code::kInvalidArgument);
  EXPECT_EQ(refused(std::vector<Descriptor>(kMaxDescriptors + 1, {0, 1})), Code::kInvalidArgument);
  EXPECT_EQ(refused({{1, 0}}), Code::kInvalidArgument);
  EXPECT_EQ(refused({{UINT64_MAX, 2}}), Code::kInvalidArgument);
  EXPECT_EQ(refused({{0, kMaxDataPayload}, {0, 1}}), Code::kInvalidArgument);
  EXPECT_EQ(refused(std::vector<Descriptor>(kMaxDescriptors, {0, 1})), Code::kOk);
  EXPECT_EQ(encode_read_data({.payload_bytes = kMaxDataPayload + 1}, out).code(),
            Code::kInvalidArgument);
  std::array<std::byte, 63> small;
  EXPECT_EQ(encode_write({.descriptors = kTwo}, small).code(), Code::kInvalidArgument);
  EXPECT_EQ(encode_ack({.message = "ab"}, small).code(), Code::kInvalidArgument);
  EXPECT_EQ(encode_read_data({.payload_bytes = 1}, small).code(), Code::kInvalidArgument);
}

// A header whose own checksum is right though its fields are not, as a hostile peer would send it.
template <class T>
Buffer forged(std::size_t offset, T value) {
  Buffer bytes = write_frame({.request_id = 1, .descriptors = kTwo});
  store_le(bytes.data() + offset, value);
  constexpr std::uint64_t kSeed = 0x6c616e65;
  store_le(bytes.data() + 36, static_cast<std::uint32_t>(xxh3_64(Bytes(bytes).first(36), kSeed)));
  return bytes;
}

TEST(DataFrame, ForgedHeadersMeetEveryLimit) {
  ASSERT_TRUE(decode_data_header(forged(20, std::uint32_t{5})).ok()) << "the forger works";
  EXPECT_EQ(decode_data_header(forged(2, std::uint8_t{0})).code(), Code::kCorrupt);
  EXPECT_EQ(decode_data_header(forged(2, std::uint8_t{5})).code(), Code::kCorrupt);
  EXPECT_EQ(decode_data_header(forged(3, std::uint8_t{2})).code(), Code::kCorrupt);
  EXPECT_EQ(decode_data_header(forged(4, std::uint16_t{kMaxDescriptors + 1})).code(),
            Code::kCorrupt);
  EXPECT_EQ(decode_data_header(forged(4, std::uint16_t{0})).code(), Code::kCorrupt);
  EXPECT_EQ(decode_data_header(forged(6, std::uint16_t{1})).code(), Code::kCorrupt);
  EXPECT_EQ(decode_data_header(forged(16, kMaxDataPayload + 1)).code(), Code::kCorrupt);
  const Buffer other_sum = forged(16, std::uint32_t{4159});
  const auto header = decode_data_header(other_sum).value();
  std::vector<Descriptor> out(2);
  EXPECT_EQ(decode_descriptors(header, Bytes(other_sum).subspan(40), out).code(), Code::kCorrupt);
}

TEST(Checksum, StreamEqualsOneShot) {
  Buffer bytes(10'000);
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(i * 7 >> 2);
  for (const std::size_t slice : {1u, 63u, 64u, 1000u, 10'000u}) {
    StreamChecksum sum;
    for (std::size_t at = 0; at < bytes.size(); at += slice)
      sum.update(Bytes(bytes).subspan(at, std::min(slice, bytes.size() - at)));
    EXPECT_EQ(sum.digest(), xxh3_64(bytes)) << slice;
    sum.reset();
    EXPECT_EQ(sum.digest(), xxh3_64({}));
  }
  EXPECT_EQ(xxh3_64({}), 0x2d06800538d394c2u) << "the published XXH3-64 of nothing";
}

}  // namespace
}  // namespace crossdock::wire
