// SPDX-License-Identifier: Apache-2.0
#include "base/clock.hpp"

#include <chrono>
#include <gtest/gtest.h>

namespace crossdock::base {
namespace {

TEST(Clock, IsTheSteadyClock) {
  const auto before = std::chrono::steady_clock::now().time_since_epoch();
  const auto mine = std::chrono::nanoseconds(now_ns());
  const auto after = std::chrono::steady_clock::now().time_since_epoch();
  EXPECT_LE(before, mine);
  EXPECT_LE(mine, after);
}

TEST(Clock, CpuTimeGrowsWithWork) {
  const auto process_start = process_cpu_ns();
  const auto thread_start = thread_cpu_ns();
  volatile unsigned sink = 0;
  while (thread_cpu_ns() < thread_start + 1'000'000)
    sink = sink + 1;
  EXPECT_GE(process_cpu_ns() - process_start, 1'000'000u);
}

TEST(Clock, WallClockIsAfter2020) {
  EXPECT_GT(wall_ns(), 1'577'836'800'000'000'000u);
}

}  // namespace
}  // namespace crossdock::base
