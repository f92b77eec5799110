// Admission, sharing, eviction, quarantine, and a random walk that never loses or doubles a page.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <random>
#include <set>
#include <thread>

#include <crossdock/kv/page_pool.hpp>

namespace crossdock::kv {
namespace {

using namespace std::chrono_literals;

class PagePoolTest : public testing::Test {
 protected:
  static PagePool make(std::uint32_t pages) {
    static std::byte memory[1];  // the pool never touches it
    return PagePool::adopt(
               PageLayout::create({"t", 1, 1, 1, 1, false}, {.num_pages = pages}).value(), memory)
        .value();
  }
};

TEST_F(PagePoolTest, PagesComeLowestFirstAndGoBack) {
  auto pool = make(100);
  const auto a = pool.admit({.request = 1, .num_pages = 70});
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(a->pages.front(), 0u);
  EXPECT_EQ(a->pages.back(), 69u);
  EXPECT_EQ(pool.stats().in_use, 70u);
  EXPECT_EQ(pool.admit({.request = 2, .num_pages = 31}).code(), Code::kWouldBlock);
  EXPECT_EQ(pool.admit({.request = 1, .num_pages = 1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(pool.admit({.request = 2, .num_pages = 101}).code(), Code::kNoMemory);
  EXPECT_EQ(pool.admit({.request = 2, .num_pages = 0}).code(), Code::kInvalidArgument);
  ASSERT_TRUE(pool.release(1).ok());
  EXPECT_EQ(pool.release(1).code(), Code::kNotFound);
  EXPECT_EQ(pool.stats().free, 100u);
}

TEST_F(PagePoolTest, FullPrefixBlocksAreShared) {
  auto pool = make(100);
  const std::uint64_t hashes[] = {11, 12, 13};
  const auto a =
      pool.admit({.request = 1, .num_pages = 10, .prefix_hashes = hashes, .pages_per_hash = 4});
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(a->num_shared_pages, 0u);
  const auto b =
      pool.admit({.request = 2, .num_pages = 9, .prefix_hashes = hashes, .pages_per_hash = 4});
  ASSERT_TRUE(b.ok());
  EXPECT_EQ(b->num_shared_pages, 8u);
  EXPECT_THAT(b->depends_on, testing::ElementsAre(1));
  EXPECT_TRUE(std::equal(a->pages.begin(), a->pages.begin() + 8, b->pages.begin()));
  EXPECT_NE(a->pages[8], b->pages[8]);
  EXPECT_EQ(pool.stats().in_use, 11u);

  ASSERT_TRUE(pool.mark_ready(1).ok());
  const auto c =
      pool.admit({.request = 3, .num_pages = 8, .prefix_hashes = hashes, .pages_per_hash = 4});
  EXPECT_EQ(c->num_shared_pages, 8u);
  EXPECT_THAT(c->depends_on, testing::IsEmpty());
  for (RequestId id : {1, 2, 3})
    ASSERT_TRUE(pool.release(id).ok());
  EXPECT_EQ(pool.stats().cached, 8u);
  EXPECT_EQ(pool.stats().free, 92u);
}

TEST_F(PagePoolTest, TheSameHashTwiceInOneRequestIsHarmless) {
  auto pool = make(16);
  const std::uint64_t hashes[] = {5, 5};
  for (RequestId id = 1; id <= 3; ++id) {
    ASSERT_TRUE(
        pool.admit({.request = id, .num_pages = 8, .prefix_hashes = hashes, .pages_per_hash = 4})
            .ok());
    ASSERT_TRUE(pool.mark_ready(id).ok());
    ASSERT_TRUE(pool.release(id).ok());
    EXPECT_EQ(pool.stats().free + pool.stats().cached, 16u);
  }
}

TEST_F(PagePoolTest, CachedBlocksAreEvictedOldestFirst) {
  auto pool = make(8);
  const std::uint64_t first[] = {1}, second[] = {2};
  const auto fill = [&](RequestId id, std::span<const std::uint64_t> hash) {
    ASSERT_TRUE(
        pool.admit({.request = id, .num_pages = 4, .prefix_hashes = hash, .pages_per_hash = 4})
            .ok());
    ASSERT_TRUE(pool.mark_ready(id).ok());
    ASSERT_TRUE(pool.release(id).ok());
  };
  fill(1, first);
  fill(2, second);
  EXPECT_EQ(pool.stats().cached, 8u);
  ASSERT_TRUE(pool.admit({.request = 3, .num_pages = 3}).ok());
  const auto still =
      pool.admit({.request = 4, .num_pages = 4, .prefix_hashes = second, .pages_per_hash = 4});
  ASSERT_TRUE(still.ok());
  EXPECT_EQ(still->num_shared_pages, 4u);
}

TEST_F(PagePoolTest, AnAbortedOwnersBlocksAreNotFoundAgain) {
  auto pool = make(16);
  const std::uint64_t hash[] = {1};
  ASSERT_TRUE(
      pool.admit({.request = 1, .num_pages = 4, .prefix_hashes = hash, .pages_per_hash = 4}).ok());
  ASSERT_TRUE(pool.release(1).ok());  // never ready
  const auto next =
      pool.admit({.request = 2, .num_pages = 4, .prefix_hashes = hash, .pages_per_hash = 4});
  EXPECT_EQ(next->num_shared_pages, 0u);
  EXPECT_EQ(pool.stats().in_use, 4u);
}

TEST_F(PagePoolTest, LeasedPagesStayInQuarantineUntilTheLastLeaseEnds) {
  auto pool = make(8);
  ASSERT_TRUE(pool.admit({.request = 1, .num_pages = 6}).ok());
  auto lease = pool.lease(1);
  auto second = pool.lease(1);
  ASSERT_TRUE(lease.ok() && second.ok());
  ASSERT_TRUE(pool.release(1).ok());
  EXPECT_EQ(pool.stats().quarantined, 6u);
  EXPECT_EQ(pool.admit({.request = 1, .num_pages = 3}).code(), Code::kWouldBlock);
  lease->reset();
  EXPECT_EQ(pool.stats().quarantined, 6u);
  std::thread ender([&] { second->reset(); });
  EXPECT_TRUE(pool.admit({.request = 1, .num_pages = 8}, Deadline::in(10s)).ok());
  ender.join();
  EXPECT_EQ(pool.stats().quarantined, 0u);
  EXPECT_EQ(pool.lease(99).code(), Code::kNotFound);
}

TEST_F(PagePoolTest, ASharedPageOfAnAbortedRequestStaysWithTheOther) {
  auto pool = make(8);
  const std::uint64_t hash[] = {1};
  const Admission base{.num_pages = 4, .prefix_hashes = hash, .pages_per_hash = 4};
  Admission a = base, b = base;
  a.request = 1;
  b.request = 2;
  ASSERT_TRUE(pool.admit(a).ok());
  ASSERT_TRUE(pool.admit(b).ok());
  auto lease = pool.lease(1);
  ASSERT_TRUE(pool.release(1).ok());
  EXPECT_EQ(pool.stats().in_use, 4u);  // request 2 still has them
  ASSERT_TRUE(pool.release(2).ok());
  EXPECT_EQ(pool.stats().quarantined, 4u);
  lease->reset();
  EXPECT_EQ(pool.stats().free, 8u);
}

TEST_F(PagePoolTest, WaitingForPagesEndsAtTheDeadline) {
  auto pool = make(4);
  ASSERT_TRUE(pool.admit({.request = 1, .num_pages = 4}).ok());
  EXPECT_EQ(pool.admit({.request = 2, .num_pages = 1}, Deadline::in(5ms)).code(), Code::kDeadline);
}

// Model: pages of live tables may overlap only inside shared prefixes; totals always add up.
TEST_F(PagePoolTest, RandomWalkNeverLosesOrDoublesAPage) {
  auto pool = make(257);
  std::mt19937 random(4711);
  const auto roll = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  std::map<RequestId, BlockTable> live;
  std::vector<PageLease> leases;
  RequestId next = 1;
  for (int step = 0; step < 4'000; ++step) {
    const std::uint32_t what = roll(10);
    if (what < 5) {
      std::vector<std::uint64_t> hashes;
      const std::uint32_t chain = roll(6);
      for (std::uint32_t i = 0; i < 6; ++i)
        hashes.push_back(chain * 100 + i);
      const auto table = pool.admit({.request = next,
                                     .num_pages = 1 + roll(40),
                                     .prefix_hashes = hashes,
                                     .pages_per_hash = 8});
      if (table.ok()) live.emplace(next++, *table);
    } else if (!live.empty() && what < 9) {
      auto it = std::next(live.begin(), roll(static_cast<std::uint32_t>(live.size())));
      if (what == 5) leases.push_back(pool.lease(it->first).value());
      if (what == 6) {
        ASSERT_TRUE(pool.mark_ready(it->first).ok());
      }
      if (what >= 7) {
        ASSERT_TRUE(pool.release(it->first).ok());
        live.erase(it);
      }
    } else if (!leases.empty()) {
      leases.erase(leases.begin() + roll(static_cast<std::uint32_t>(leases.size())));
    }
    std::set<PageId> used;
    for (const auto& [id, table] : live) {
      std::set<PageId> own(table.pages.begin(), table.pages.end());
      ASSERT_EQ(own.size(), table.pages.size()) << "a page twice in one table";
      used.insert(own.begin(), own.end());
    }
    const PoolStats stats = pool.stats();
    ASSERT_EQ(stats.in_use, used.size()) << "step " << step;
    ASSERT_EQ(stats.free + stats.cached + stats.in_use + stats.quarantined, 257u);
  }
  leases.clear();
  for (const auto& [id, table] : live)
    ASSERT_TRUE(pool.release(id).ok());
  EXPECT_EQ(pool.stats().free + pool.stats().cached, 257u);
}

}  // namespace
}  // namespace crossdock::kv
