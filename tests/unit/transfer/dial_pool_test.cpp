// The threads that wait for peers: one peer's wait is nobody else's.
// SPDX-License-Identifier: Apache-2.0
#include "transfer/dial_pool.hpp"

#include <array>
#include <atomic>
#include <gtest/gtest.h>
#include <latch>
#include <semaphore>

namespace crossdock::transfer::detail {
namespace {

TEST(DialPool, APeerThatHangsHoldsUpOnlyItself) {
  DialPool pool;
  const std::array<char, 3> peers{};
  std::binary_semaphore leave{0};
  std::atomic<int> behind{0};
  ASSERT_TRUE(pool.post(&peers[0], [&](bool) { leave.acquire(); }));
  ASSERT_TRUE(pool.post(&peers[0], [&](bool) { behind.fetch_add(1); }));
  for (int i = 0; i < 100; ++i) {
    std::latch both(2);
    ASSERT_TRUE(pool.post(&peers[1], [&](bool) { both.count_down(); }));
    ASSERT_TRUE(pool.post(&peers[2], [&](bool) { both.count_down(); }));
    both.wait();
  }
  EXPECT_EQ(behind.load(), 0) << "jobs of one peer run one after the other";
  std::latch after(1);
  ASSERT_TRUE(pool.post(&peers[0], [&](bool) { after.count_down(); }));
  leave.release();
  after.wait();
  EXPECT_EQ(behind.load(), 1);
}

TEST(DialPool, EveryJobIsCalledOnceAndToldOfTheEnd) {
  std::array<std::atomic<int>, 200> went_on{}, ended{};
  const std::array<char, 40> peers{};
  std::binary_semaphore inside{0};
  {
    DialPool pool;
    std::binary_semaphore leave{0};
    for (std::size_t i = 0; i < went_on.size(); ++i)
      ASSERT_TRUE(pool.post(&peers[i % peers.size()],
                            [&, i](bool go_on) { (go_on ? went_on : ended)[i].fetch_add(1); }));
    pool.stop();
    EXPECT_FALSE(pool.post(&peers[0], [](bool) { FAIL(); }));
  }
  for (std::size_t i = 0; i < went_on.size(); ++i)
    EXPECT_EQ(went_on[i].load() + ended[i].load(), 1) << i;
}

}  // namespace
}  // namespace crossdock::transfer::detail
