// fetch_rows in the twin: rows come from their owners, and a number that the table does not have
// ends the launch with no row left on its way.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/kernel/fetch_rows.cuh>

#include "ranks.hpp"

namespace crossdock::testing {
namespace {

constexpr FetchRowsConfig kFetch{.warps = 4, .stages = 4, .wide = false};
constexpr u32 kWorld = 2;
constexpr u32 kRows = 64;  // of the list
constexpr u32 kShardRows = 20;
constexpr u32 kRowBytes = 208;

struct Fetch {
  SymmetricLayout layout;
  u64 table = layout.add("table", u64{kShardRows} * kRowBytes);
  Ranks ranks{kWorld, layout};
  i32* numbers = ranks.local<i32>(0, kRows);
  u8* output = ranks.local<u8>(0, u64{kRows} * kRowBytes);

  Fetch() {
    for (u32 r = 0; r < kWorld; ++r)
      for (u32 i = 0; i < kShardRows; ++i)
        std::memset(ranks.window<u8>(r, table) + i * kRowBytes, value(r * kShardRows + i),
                    kRowBytes);
    for (u32 i = 0; i < kRows; ++i)
      numbers[i] = static_cast<i32>(i * 7 % (kWorld * kShardRows));
  }
  static u8 value(u32 row) { return static_cast<u8>(row + 1); }
  void launch() {
    FetchRowsParams p{};
    p.common = ranks.common(0, KernelId::kFetchRows);
    p.view = ranks.view(0);
    p.table = table;
    p.indices = numbers;
    p.zeros = ranks.local<u8>(0, kRowBytes);
    p.output = output;
    p.output_stride = p.row_bytes = kRowBytes;
    p.shard_rows = kShardRows;
    p.rows = kRows;
    ranks.launch(
        0, {2, kFetch.warps * kWarpSize, fetch_rows_shared_bytes(kFetch, kRowBytes), "fetch_rows"},
        kernel::fetch_rows<kFetch>, p);
  }
};

TEST(FetchRows, RowsComeFromTheirOwners) {
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    Fetch fetch;
    fetch.numbers[5] = -1;
    fetch.launch();
    ASSERT_NO_FATAL_FAILURE(fetch.ranks.run_clean(schedule(seed)));
    for (u32 i = 0; i < kRows; ++i) {
      const u8 want = i == 5 ? 0 : Fetch::value(static_cast<u32>(fetch.numbers[i]));
      ASSERT_EQ(fetch.output[i * kRowBytes], want) << "seed " << seed << " row " << i;
      ASSERT_EQ(fetch.output[(i + 1) * kRowBytes - 1], want) << "seed " << seed << " row " << i;
    }
  }
}
// The fault of one warp ends the others' waits for rows that come as late as is legal. The twin
// finds it when a block ends before they have.
TEST(FetchRows, NoRowIsOnItsWayAfterAWrongNumber) {
  for (u32 seed = 1; seed <= kSeeds; ++seed)
    for (const u32 place : {0u, 3u, 21u, kRows - 1}) {
      Fetch fetch;
      fetch.numbers[place] = kWorld * kShardRows;
      fetch.launch();
      twin::Schedule late = schedule(seed);
      late.async_mode = twin::AsyncMode::kLate;
      ASSERT_NO_FATAL_FAILURE(fetch.ranks.run(late)) << "place " << place;
      expect_fault(fetch.ranks.fault(0), KernelId::kFetchRows, Phase::kListedRow, 0, kNoPeer);
      EXPECT_EQ(fetch.ranks.fault(0).expected, place);
    }
}

}  // namespace
}  // namespace crossdock::testing
