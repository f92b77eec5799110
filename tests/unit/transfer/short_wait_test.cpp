// When a short wait ends, and when there is none.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/short_wait.hpp"

#include <gtest/gtest.h>
#include <thread>

namespace crossdock::transfer {
namespace {

using namespace std::chrono_literals;

Deadline soon() {
  return Deadline::in(30s);
}

TEST(ShortWait, EndsWithTheWord) {
  ShortWait wait(2);
  std::atomic<std::uint32_t> word{0};
  const auto begin = Deadline::now();
  std::thread other([&] { word = 1; });
  EXPECT_TRUE(wait.look(word, 30s, soon()));
  EXPECT_EQ(word.load(), 1u);
  EXPECT_LT(Deadline::now().when() - begin.when(), 30s);
  other.join();
}

TEST(ShortWait, EndsWithTheTimeAndWithTheDeadline) {
  ShortWait wait(2);
  const std::atomic<std::uint32_t> word{0};
  const auto begin = Deadline::now();
  EXPECT_TRUE(wait.look(word, 1ms, soon()));
  EXPECT_GE(Deadline::now().when() - begin.when(), 1ms);
  EXPECT_TRUE(wait.look(word, 30s, Deadline::now()));
  EXPECT_LT(Deadline::now().when() - begin.when(), 30s);
}

TEST(ShortWait, LeavesHalfOfTheCpusToTheOthers) {
  const std::atomic<std::uint32_t> never{0};
  EXPECT_FALSE(ShortWait(1).look(never, 30s, soon()));
  EXPECT_FALSE(ShortWait(8).look(never, 0s, soon()));

  ShortWait wait(2);
  std::atomic<std::uint32_t> word{0};
  std::thread first([&] {
    while (!wait.look(word, 30s, soon()))
      std::this_thread::yield();
  });
  const Deadline end = soon();
  // The other thread has the only place sooner or later.
  while (wait.look(never, 10us, end) && !end.passed())
    std::this_thread::yield();
  EXPECT_FALSE(end.passed());
  word = 1;
  first.join();
  EXPECT_TRUE(wait.look(never, 1us, soon()));
}

}  // namespace
}  // namespace crossdock::transfer
