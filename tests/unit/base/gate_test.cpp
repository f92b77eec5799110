// SPDX-License-Identifier: Apache-2.0
#include "base/gate.hpp"

#include <atomic>
#include <chrono>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

namespace crossdock::base {
namespace {

using namespace std::chrono_literals;

TEST(Gate, LetsInUntilItIsClosed) {
  Gate gate;
  {
    const Gate::Pass pass(gate);
    EXPECT_TRUE(pass);
  }
  gate.close();
  EXPECT_FALSE(Gate::Pass(gate));
  EXPECT_TRUE(gate.wait_idle(Deadline::now()));
}

TEST(Gate, WaitsForThoseInsideAndNoLongerThanItsDeadline) {
  Gate gate;
  std::atomic<bool> inside{false}, leave{false};
  std::thread caller([&] {
    const Gate::Pass pass(gate);
    inside = true;
    while (!leave)
      std::this_thread::yield();
  });
  while (!inside)
    std::this_thread::yield();
  gate.close();
  EXPECT_FALSE(gate.wait_idle(Deadline::in(20ms)));
  leave = true;
  EXPECT_TRUE(gate.wait_idle(Deadline::in(20s)));
  caller.join();
}

TEST(Gate, KnowsWhoIsInside) {
  Gate gate, other;
  const Gate::Pass pass(gate);
  {
    const Gate::Pass inner(other);
    EXPECT_TRUE(gate.entered_here());
    EXPECT_TRUE(other.entered_here());
    std::thread([&] { EXPECT_FALSE(gate.entered_here()); }).join();
  }
  EXPECT_TRUE(gate.entered_here());
  EXPECT_FALSE(other.entered_here());
}

// What is guarded is destroyed once wait_idle() returns: no caller may be left inside.
TEST(Gate, NobodyIsInsideAfterTheWait) {
  for (int round = 0; round < 200; ++round) {
    Gate gate;
    std::atomic<int> guarded{1};
    std::vector<std::thread> callers;
    for (int t = 0; t < 3; ++t)
      callers.emplace_back([&] {
        while (true) {
          const Gate::Pass pass(gate);
          if (!pass) return;
          EXPECT_EQ(guarded.load(), 1);
        }
      });
    gate.close();
    EXPECT_TRUE(gate.wait_idle(Deadline::in(20s)));
    guarded = 0;
    for (auto& caller : callers)
      caller.join();
  }
}

}  // namespace
}  // namespace crossdock::base
