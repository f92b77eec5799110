// The helper of GPU tests that looks for leaks beside other processes: it must see every leak.
// SPDX-License-Identifier: Apache-2.0
#include "support/stays_level.hpp"

#include <string>
#include <vector>

namespace crossdock::testing {
namespace {

constexpr std::uint64_t kMiB = 1u << 20;

TEST(StaysLevel, WhatLeaksEachTimeIsSeen) {
  std::vector<std::uint64_t> in_use{100 * kMiB, 50 * kMiB};
  const auto result = stays_level([&] { return in_use; }, [&] { in_use[1] += 5 * kMiB; });
  EXPECT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("GPU 1: 52428800 bytes in use, then 57671680"),
            std::string::npos)
      << result.message();
}
TEST(StaysLevel, WhatOthersTakeNowAndThenIsNoLeak) {
  std::vector<std::uint64_t> in_use{100 * kMiB};
  int times = 0;
  EXPECT_TRUE(
      stays_level([&] { return in_use; }, [&] { in_use[0] += ++times % 3 == 0 ? 0 : 300 * kMiB; }));
  EXPECT_EQ(times, 3);
}
TEST(StaysLevel, SlackIsForWhatTheDriverKeeps) {
  std::vector<std::uint64_t> in_use{0};
  int times = 0;
  EXPECT_TRUE(stays_level([&] { return in_use; }, [&] { ++times, in_use[0] += 4 * kMiB; }));
  EXPECT_EQ(times, 1);
}

}  // namespace
}  // namespace crossdock::testing
