// SPDX-License-Identifier: Apache-2.0
#include "base/strings.hpp"

#include <array>
#include <chrono>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>

namespace crossdock::base {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(EditDistance, CountsChangesAndSwaps) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("slice", "slcie"), 1u);
}

TEST(Closest, FindsTyposAndNothingElse) {
  constexpr std::array<std::string_view, 3> kNames = {"transfer.slice_bytes", "log.level", "tcp"};
  EXPECT_EQ(closest("transfer.slice_byte", kNames), "transfer.slice_bytes");
  EXPECT_EQ(closest("log.lvel", kNames), "log.level");
  EXPECT_EQ(closest("something.else", kNames), "");
  EXPECT_EQ(closest("x", kNames), "");
  EXPECT_EQ(did_you_mean("tpc", kNames), " (did you mean 'tcp'?)");
  EXPECT_EQ(did_you_mean("wholly different", kNames), "");
}

TEST(Split, TrimsAndKeepsEmptyParts) {
  EXPECT_THAT(split("a, b ,,c", ','), ElementsAre("a", "b", "", "c"));
  EXPECT_THAT(split("", ','), ElementsAre(""));
  EXPECT_EQ(trim(" \t x y\n"), "x y");
  EXPECT_EQ(trim("  "), "");
}

TEST(ParseSize, KnowsBothKindsOfUnits) {
  EXPECT_EQ(*parse_size("0"), 0u);
  EXPECT_EQ(*parse_size("17"), 17u);
  EXPECT_EQ(*parse_size("64KiB"), 65536u);
  EXPECT_EQ(*parse_size(" 2 MiB "), 2u << 20);
  EXPECT_EQ(*parse_size("3GB"), 3'000'000'000u);
  EXPECT_EQ(*parse_size("18446744073709551615"), std::numeric_limits<std::uint64_t>::max());
}

TEST(ParseSize, RefusesWhatIsNotASize) {
  for (const auto* text :
       {"", "KiB", "-1", "1.5GiB", "64kib", "64 KiB x", "0x10", "64K", "99999999999999999999"}) {
    const auto result = parse_size(text);
    ASSERT_EQ(result.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(result.error().message, HasSubstr("as in 64KiB")) << text;
  }
  EXPECT_THAT(parse_size("16777216TiB").error().message, HasSubstr("beyond 2^64"));
}

TEST(ParseDuration, NeedsAUnit) {
  EXPECT_EQ(*parse_duration("250ms"), 250ms);
  EXPECT_EQ(*parse_duration("5 s"), 5s);
  EXPECT_EQ(*parse_duration("2min"), 2min);
  EXPECT_EQ(*parse_duration("1h"), 1h);
  EXPECT_EQ(*parse_duration("20us"), 20us);
  EXPECT_EQ(*parse_duration("0"), 0ns);
  for (const auto* text : {"", "5", "-5s", "5sec", "s", "1.5s"})
    EXPECT_EQ(parse_duration(text).code(), Code::kInvalidArgument) << text;
  EXPECT_THAT(parse_duration("9999999999h").error().message, HasSubstr("292 years"));
}

TEST(ParseInt, TakesTheWholeText) {
  EXPECT_EQ(*parse_int(" -12 "), -12);
  for (const auto* text : {"", "1x", "x", "1 2", "--1"})
    EXPECT_EQ(parse_int(text).code(), Code::kInvalidArgument) << text;
  EXPECT_THAT(parse_int("9223372036854775808").error().message, HasSubstr("64 bits"));
}

TEST(ParseBool, KnowsFourSpellings) {
  for (const auto* text : {"true", "1", "on", "yes"})
    EXPECT_TRUE(*parse_bool(text));
  for (const auto* text : {"false", "0", "off", "no"})
    EXPECT_FALSE(*parse_bool(text));
  EXPECT_FALSE(parse_bool("TRUE").ok());
  EXPECT_FALSE(parse_bool("").ok());
}

TEST(Format, IsExactAndParsesBack) {
  EXPECT_EQ(format_size(0), "0B");
  EXPECT_EQ(format_size(65536), "64KiB");
  EXPECT_EQ(format_size(65537), "65537B");
  EXPECT_EQ(format_duration(0ns), "0ns");
  EXPECT_EQ(format_duration(250ms), "250ms");
  EXPECT_EQ(format_duration(90s), "90s");
  EXPECT_EQ(format_duration(120s), "2min");
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{4096}, std::uint64_t{12345678},
                                    std::numeric_limits<std::uint64_t>::max()})
    EXPECT_EQ(*parse_size(format_size(bytes)), bytes);
}

}  // namespace
}  // namespace crossdock::base
