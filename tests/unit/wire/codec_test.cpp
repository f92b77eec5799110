// SPDX-License-Identifier: Apache-2.0
#include "wire/codec.hpp"

#include <array>
#include <gtest/gtest.h>

namespace crossdock::wire {
namespace {

TEST(Codec, IsLittleEndian) {
  std::vector<std::byte> out;
  Writer writer{VectorSink(out)};
  writer.u8("a", 0x01);
  writer.u16("b", 0x0302);
  writer.u32("c", 0x07060504);
  writer.u64("d", 0x0f0e0d0c0b0a0908);
  ASSERT_TRUE(writer.finish("test").ok());
  ASSERT_EQ(out.size(), 15u);
  for (std::size_t i = 0; i < out.size(); ++i)
    EXPECT_EQ(std::to_integer<int>(out[i]), int(i) + 1);
}

TEST(Codec, StaysFailedAndNamesTheFirstField) {
  const std::array<std::byte, 3> in{};
  Reader reader(in);
  std::uint32_t a = 1;
  std::uint8_t b = 1;
  reader.u32("first", a);
  reader.u8("second", b);
  EXPECT_EQ(a, 0u);
  EXPECT_EQ(b, 0u);
  const auto result = reader.finish("Thing");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.code(), Code::kCorrupt);
  EXPECT_EQ(result.error().scope, Scope::kPeer);
  EXPECT_EQ(result.error().message,
            "malformed Thing: first needs 4 more than the 3 bytes that are left");
}

TEST(Codec, RefusesBytesLeftOver) {
  const std::array<std::byte, 3> in{};
  Reader reader(in);
  std::uint16_t a = 0;
  reader.u16("a", a);
  EXPECT_EQ(reader.finish("Thing").code(), Code::kCorrupt);
}

TEST(Codec, CountsNeverExceedWhatTheBytesCanHold) {
  std::vector<std::byte> in;
  Writer writer{VectorSink(in)};
  writer.u32("count", 1'000'000'000);
  in.resize(in.size() + 100);
  Reader reader(in);
  EXPECT_EQ(reader.count("count", UINT32_MAX, 8), 0u);
  EXPECT_TRUE(reader.failed());
}

TEST(Codec, LengthsOverTheLimitFailOnBothSides) {
  std::vector<std::byte> bytes;
  Writer writer{VectorSink(bytes)};
  writer.string("name", "too long", 3);
  const auto result = writer.finish("Thing");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.code(), Code::kInvalidArgument);
  EXPECT_EQ(result.error().message, "cannot encode Thing: name is 8, the limit is 3");

  bytes.clear();
  Writer fine{VectorSink(bytes)};
  fine.string("name", "too long", 8);
  Reader reader(bytes);
  std::string name;
  reader.string("name", name, 3);
  EXPECT_EQ(reader.finish("Thing").error().message, "malformed Thing: name is 8, the limit is 3");
}

TEST(Codec, SpanWriterStopsAtTheEndOfItsBuffer) {
  std::array<std::byte, 6> out{};
  SpanWriter writer{SpanSink(out)};
  writer.u32("a", 1);
  writer.u32("b", 2);
  EXPECT_EQ(writer.finish("Thing").code(), Code::kInvalidArgument);
  EXPECT_EQ(writer.sink().used(), 4u);
  EXPECT_EQ(out[4], std::byte{0});
}

TEST(Codec, QuotesUnprintableBytes) {
  EXPECT_EQ(quote_bytes(as_bytes("GET \x01\"")), "\"GET \\x01\\\"\"");
  EXPECT_EQ(quote_bytes(as_bytes("abcdef"), 3), "\"abc\"");
  EXPECT_EQ(quote_bytes({}), "\"\"");
}

}  // namespace
}  // namespace crossdock::wire
