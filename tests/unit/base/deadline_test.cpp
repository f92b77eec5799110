// Deadline: nothing that is asked for overflows.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <gtest/gtest.h>
#include <limits>

#include <crossdock/core/deadline.hpp>

namespace crossdock {
namespace {

using Clock = Deadline::Clock;
using namespace std::chrono_literals;

constexpr auto kNineYears = 24h * 365 * 9;
constexpr auto kElevenYears = 24h * 365 * 11;

TEST(Deadline, WhatLiesTooFarAwayIsCut) {
  const Deadline all[] = {
      Deadline::in(std::chrono::nanoseconds::max()),
      Deadline::in(std::chrono::hours::max()),
      Deadline::in(std::numeric_limits<double>::max() * 1s),
      Deadline::at(Clock::time_point::max()),
      Deadline::now().after(std::chrono::nanoseconds::max()),
      Deadline::at(Clock::time_point::max()).after(std::chrono::nanoseconds::max())};
  for (const Deadline& deadline : all) {
    EXPECT_FALSE(deadline.passed());
    EXPECT_GT(deadline.remaining(), kNineYears);
    EXPECT_LT(deadline.remaining(), kElevenYears);
    EXPECT_GT(deadline.after(2s), Deadline::now());
  }
}

TEST(Deadline, WhatLiesTooFarBackHasPassed) {
  const Deadline all[] = {Deadline::in(std::chrono::nanoseconds::min()),
                          Deadline::at(Clock::time_point::min()),
                          Deadline::now().after(std::chrono::nanoseconds::min()),
                          Deadline::at(Clock::time_point::min()).after(-1h)};
  for (const Deadline& deadline : all) {
    EXPECT_TRUE(deadline.passed());
    EXPECT_EQ(deadline.remaining(), Clock::duration::zero());
    EXPECT_EQ(deadline.remaining_ms(), 0);
  }
}

TEST(Deadline, LaterByWhatWasAsked) {
  const Deadline now = Deadline::now();
  EXPECT_EQ(now.after(5ms).when(), now.when() + 5ms);
  EXPECT_EQ(now.after(-5ms).when(), now.when() - 5ms);
  EXPECT_EQ(Deadline::at(now.when() + 1h).when(), now.when() + 1h);
}

}  // namespace
}  // namespace crossdock
