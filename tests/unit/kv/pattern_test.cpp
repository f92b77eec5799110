// Page content: what is filled checks, and any single wrong byte, place, layer or key is found.
// SPDX-License-Identifier: Apache-2.0
#include "kv/pattern.hpp"

#include <cstring>
#include <gtest/gtest.h>
#include <vector>

namespace crossdock::kv::pattern {
namespace {

TEST(Pattern, EveryFlippedByteIsFoundAndNamed) {
  const ModelShape shape{"t", 2, 2, 5, 1, false};  // rows of 5 bytes: no multiple of a word
  const auto layout = PageLayout::create(shape, {.num_pages = 2, .page_tokens = 2}).value();
  std::vector<std::byte> pool(layout.pool_bytes());
  fill_page(layout, pool.data(), 1, 1, {77, 32});
  ASSERT_FALSE(check_page(layout, pool.data(), 1, 1, {77, 32}));
  const std::size_t start = layout.cell_offset(1, 1, 0);
  for (std::size_t i = 0; i < 2 * layout.cell_bytes(); ++i) {
    pool[start + i] ^= std::byte{1};
    const auto mismatch = check_page(layout, pool.data(), 1, 1, {77, 32});
    ASSERT_TRUE(mismatch) << i;
    EXPECT_EQ(mismatch->byte, i % 5);
    EXPECT_EQ(mismatch->head, i / 5 % 2);
    pool[start + i] ^= std::byte{1};
  }
}

TEST(Pattern, ContentDiffersByKeyTokenAndLayer) {
  const ModelShape shape{"t", 2, 1, 64, 2, true};
  const auto layout = PageLayout::create(shape, {.num_pages = 2, .page_tokens = 4}).value();
  std::vector<std::byte> pool(layout.pool_bytes());
  fill_page(layout, pool.data(), 0, 0, {1, 0});
  fill_page(layout, pool.data(), 1, 0, {1, 0});
  EXPECT_FALSE(check_page(layout, pool.data(), 0, 0, {1, 0}));
  EXPECT_TRUE(check_page(layout, pool.data(), 0, 0, {2, 0}));
  EXPECT_TRUE(check_page(layout, pool.data(), 0, 0, {1, 4}));
  EXPECT_TRUE(check_page(layout, pool.data(), 0, 1, {1, 0}));
  EXPECT_NE(std::memcmp(pool.data(), pool.data() + layout.cell_offset(1, 0, 0), 128), 0);
}

TEST(Pattern, ShardsHoldTheSameContentAsTheWhole) {
  const ModelShape shape{"t", 1, 4, 8, 2, false};
  const auto whole = PageLayout::create(shape, {.num_pages = 1}).value();
  const auto half = PageLayout::create(shape, {.num_pages = 1, .tp_size = 2, .tp_rank = 1}).value();
  std::vector<std::byte> a(whole.pool_bytes()), b(half.pool_bytes());
  fill_page(whole, a.data(), 0, 0, {9, 0});
  std::vector<CopyRun> runs;
  const std::vector<PageId> page{0};
  ASSERT_TRUE(append_copy_runs(whole, half, {0, page, page, half.heads()}, runs).ok());
  for (const auto& run : runs)
    std::memcpy(b.data() + run.destination, a.data() + run.source, run.length);
  EXPECT_FALSE(check_page(half, b.data(), 0, 0, {9, 0}));
}

}  // namespace
}  // namespace crossdock::kv::pattern
