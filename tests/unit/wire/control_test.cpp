// SPDX-License-Identifier: Apache-2.0
#include "wire/control.hpp"

#include <gtest/gtest.h>

#include "support/wire_samples.hpp"

namespace crossdock::wire {
namespace {

TEST(Control, EveryMessageSurvivesARoundTrip) {
  test::for_each_sample([]<class M>(const M& message) {
    const auto bytes = encode(message);
    ASSERT_TRUE(bytes.ok()) << to_string(M::kType);
    const auto back = decode<M>(*bytes);
    ASSERT_TRUE(back.ok()) << back.error().describe();
    EXPECT_TRUE(*back == message) << to_string(M::kType);
  });
}

TEST(Control, EveryTruncationIsAnErrorAndSoIsOneByteMore) {
  test::for_each_sample([]<class M>(const M& message) {
    auto bytes = encode(message).value();
    for (std::size_t n = 0; n < bytes.size(); ++n) {
      const auto result = decode<M>(Bytes(bytes).first(n));
      ASSERT_FALSE(result.ok()) << to_string(M::kType) << " cut to " << n;
      ASSERT_EQ(result.code(), Code::kCorrupt);
    }
    bytes.push_back(std::byte{0});
    EXPECT_EQ(decode<M>(bytes).code(), Code::kCorrupt) << to_string(M::kType);
  });
}

TEST(Control, NoSingleByteChangeCrashesAndWhatDecodesEncodesAgain) {
  test::for_each_sample([]<class M>(const M& message) {
    const auto good = encode(message).value();
    for (std::size_t i = 0; i < good.size(); ++i) {
      for (const int flip : {0x01, 0x80, 0xff}) {
        auto bytes = good;
        bytes[i] ^= static_cast<std::byte>(flip);
        const auto result = decode<M>(bytes);
        const bool same = !result.ok() || encode(*result).value() == bytes;
        ASSERT_TRUE(same) << to_string(M::kType) << " byte " << i;
      }
    }
  });
}

template <class M>
void expect_too_long(const M& message, const char* field) {
  const auto bytes = encode(message);
  ASSERT_FALSE(bytes.ok()) << field;
  EXPECT_EQ(bytes.code(), Code::kInvalidArgument);
  EXPECT_NE(bytes.error().message.find(field), std::string::npos) << bytes.error().message;
}

TEST(Control, EveryLimitIsEnforcedWhenEncoding) {
  const auto text = [](std::uint32_t n) { return std::string(n, 'x'); };
  expect_too_long(Hello{.engine_name = text(kMaxNameBytes + 1)}, "engine name");
  expect_too_long(Hello{.host = {.boot_id = text(kMaxBootIdBytes + 1)}}, "boot id");
  expect_too_long(Welcome{.engine_name = text(kMaxNameBytes + 1)}, "engine name");
  expect_too_long(Welcome{.transports = std::vector<TransportOffer>(kMaxTransports + 1)},
                  "transports");
  expect_too_long(Welcome{.transports = {{.name = text(kMaxTransportNameBytes + 1)}}},
                  "transport name");
  expect_too_long(Welcome{.transports = {{.address = text(kMaxAddressBlobBytes + 1)}}},
                  "transport address");
  expect_too_long(Refused{.message = text(kMaxReasonBytes + 1)}, "message");
  expect_too_long(RegionAdded{.regions = {{.label = text(kMaxRegionLabelBytes + 1)}}}, "label");
  expect_too_long(RegionAdded{.regions = {{.keys = std::vector<RegionKey>(kMaxRegionKeys + 1)}}},
                  "keys");
  expect_too_long(RegionAdded{.regions = {{.keys = {{.blob = text(kMaxKeyBlobBytes + 1)}}}}},
                  "key");
  expect_too_long(Revoke{.region_ids = std::vector<std::uint32_t>(kMaxRegionIds + 1)},
                  "region ids");
  expect_too_long(Notify{.mailbox = text(kMaxMailboxBytes + 1)}, "mailbox");
  expect_too_long(Notify{.payload = text(kMaxNotifyBytes + 1)}, "payload");
  expect_too_long(Bye{.reason = text(kMaxReasonBytes + 1)}, "reason");
  expect_too_long(SegmentPage{.first = 0, .total = 0, .regions = {RegionEntry{}}}, "regions");
}

// The wire form of a message with one length or count replaced by `value`.
template <class M>
std::vector<std::byte> with_u32(const M& message, std::size_t offset, std::uint32_t value) {
  auto bytes = encode(message).value();
  store_le(bytes.data() + offset, value);
  return bytes;
}

TEST(Control, EveryLimitIsEnforcedWhenDecoding) {
  // Offsets follow the field order of the messages: a length precedes its bytes.
  EXPECT_EQ(decode<Hello>(with_u32(Hello{}, 0, kMaxNameBytes + 1)).code(), Code::kCorrupt);
  EXPECT_EQ(decode<Refused>(with_u32(Refused{}, 2, kMaxReasonBytes + 1)).code(), Code::kCorrupt);
  EXPECT_EQ(decode<Bye>(with_u32(Bye{}, 0, kMaxReasonBytes + 1)).code(), Code::kCorrupt);
  EXPECT_EQ(decode<Notify>(with_u32(Notify{}, 16, kMaxMailboxBytes + 1)).code(), Code::kCorrupt);
  EXPECT_EQ(decode<Notify>(with_u32(Notify{}, 20, kMaxNotifyBytes + 1)).code(), Code::kCorrupt);
  EXPECT_EQ(decode<Revoke>(with_u32(Revoke{}, 8, kMaxRegionIds + 1)).code(), Code::kCorrupt);
  EXPECT_EQ(decode<RegionAdded>(with_u32(RegionAdded{}, 8, UINT32_MAX)).code(), Code::kCorrupt);
  EXPECT_EQ(decode<SegmentPage>(with_u32(SegmentPage{}, 16, UINT32_MAX)).code(), Code::kCorrupt);
}

TEST(Control, UnknownEnumeratorsAndWrappingRangesAreMalformed) {
  auto nack = encode(NotifyAck{}).value();
  store_le(nack.data() + 8, std::uint16_t{999});
  EXPECT_EQ(decode<NotifyAck>(nack).code(), Code::kCorrupt);

  auto hello = encode(Hello{}).value();
  hello[4 + 8 + 8 + 16] = std::byte{2};  // purpose
  EXPECT_EQ(decode<Hello>(hello).code(), Code::kCorrupt);

  EXPECT_EQ(encode(RegionAdded{.regions = {{.addr = UINT64_MAX, .length = 2}}}).code(),
            Code::kInvalidArgument);
  auto added = encode(RegionAdded{.regions = {{.addr = UINT64_MAX, .length = 0}}}).value();
  store_le(added.data() + 8 + 4 + 4 + 8, std::uint64_t{2});
  EXPECT_EQ(decode<RegionAdded>(added).code(), Code::kCorrupt);
}

TEST(Control, NamesItsMessages) {
  test::for_each_sample(
      []<class M>(const M&) { EXPECT_NE(to_string(M::kType), "unknown message"); });
  EXPECT_EQ(to_string(static_cast<MessageType>(9999)), "unknown message");
}

}  // namespace
}  // namespace crossdock::wire
