// Layouts, descriptors, swizzles and the pure parts of the protocols. No twin is run.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/grid_sync.cuh>
#include <crossdock/layout/ep_combine.cuh>
#include <crossdock/layout/exchange.cuh>
#include <crossdock/layout/probe.cuh>
#include <crossdock/ptx/wgmma.cuh>
#include <crossdock/role/role.cuh>

namespace {

using namespace crossdock::device;

TEST(SymmetricLayout, AreasAreAlignedDisjointAndInOrder) {
  SymmetricLayout layout;
  const PeerBarrierLayout barrier = add_peer_barrier(layout, 5);
  const RingLayout ring = add_ring(layout, 5, {3, 4, 48});
  const u64 page = layout.add("page", 100, 4096);
  const AllGatherCountsLayout gather = add_all_gather_counts(layout, 5, 7);
  EXPECT_EQ(barrier.signals, 0u);
  EXPECT_EQ(page % 4096, 0u);
  EXPECT_EQ(gather.words % 128, 0u);
  EXPECT_GE(ring.tails, ring.rings + 5 * 3 * 4 * 48);
  EXPECT_FALSE(layout.overflow);
  u64 end = 0;
  std::set<std::string> names;
  for (u32 i = 0; i < layout.count; ++i) {
    EXPECT_GE(layout.areas[i].offset, end);
    EXPECT_EQ(layout.areas[i].offset % SymmetricLayout::kLine, 0u);
    end = layout.areas[i].offset + layout.areas[i].bytes;
    names.insert(layout.areas[i].name);
  }
  EXPECT_EQ(names.size(), layout.count);
  EXPECT_GE(layout.bytes, end);
  EXPECT_EQ(layout.bytes % SymmetricLayout::kLine, 0u);
}

TEST(SymmetricLayout, TooManyAreasAreReported) {
  SymmetricLayout layout;
  for (u32 i = 0; i <= SymmetricLayout::kMaxAreas; ++i)
    layout.add("area", 1);
  EXPECT_TRUE(layout.overflow);
  EXPECT_EQ(layout.count, SymmetricLayout::kMaxAreas);
}

// The layout function is usable in constant expressions, as kernels need it.
constexpr u64 barrier_bytes(u32 world) {
  SymmetricLayout layout;
  (void)add_peer_barrier(layout, world);
  return layout.bytes;
}
static_assert(barrier_bytes(4) == 3 * 128);

TEST(SymmetricView, MapsByStrideAndByTable) {
  std::vector<u8> memory(8 * 256);
  SymmetricView view{memory.data() + 3 * 256, 256, nullptr, 3, 8};
  u32* mine = view.at<u32>(64);
  for (u32 peer = 0; peer < 8; ++peer) {
    EXPECT_EQ(reinterpret_cast<u8*>(view.map(mine, peer)), memory.data() + peer * 256 + 64);
    EXPECT_EQ(view.at<u8>(5, peer), memory.data() + peer * 256 + 5);
  }
  const i64 offsets[3] = {512, -256, 0};
  SymmetricView table{memory.data() + 512, 0, offsets, 2, 3};
  EXPECT_EQ(table.at<u8>(7, 0), memory.data() + 1024 + 7);
  EXPECT_EQ(table.at<u8>(7, 1), memory.data() + 256 + 7);
  EXPECT_EQ(table.at<u8>(7, 2), memory.data() + 512 + 7);
}

TEST(GridSync, TagsOfAllBlocksSumToTheFlippedBit) {
  for (u32 blocks : {1u, 2u, 3u, 132u, 1000u}) {
    u32 sum = 0;
    for (u32 block = 0; block < blocks; ++block)
      sum += grid_sync_tag(block, blocks);
    EXPECT_EQ(sum, kGridSyncBit);
    // As long as one block is missing, whichever, the bit is not flipped.
    for (u32 missing : {0u, blocks - 1})
      EXPECT_EQ((sum - grid_sync_tag(missing, blocks)) & kGridSyncBit, 0u);
  }
}

TEST(EpochWord, HoldsBothHalves) {
  const u64 word = epoch_word(0xfedcba98u, 0x12345678u);
  EXPECT_EQ(word_epoch(word), 0xfedcba98u);
  EXPECT_EQ(word_value(word), 0x12345678u);
}

TEST(Ring, EveryRowBelongsToOneChannel) {
  for (u32 channels : {1u, 2u, 5u}) {
    RingLayout ring{};
    ring.channels = channels;
    for (u32 rows = 0; rows < 40; ++rows) {
      u32 sum = 0;
      for (u32 channel = 0; channel < channels; ++channel) {
        const u32 mine = channel_rows(ring, rows, channel);
        if (mine > 0) {
          EXPECT_LT(channel + (mine - 1) * channels, rows);
        }
        EXPECT_GE(channel + mine * channels, rows);
        sum += mine;
      }
      EXPECT_EQ(sum, rows);
    }
  }
}

TEST(RowPeer, NeverThisRankAndAllOthers) {
  MoveRowsParams p{};
  p.fixed_peer = kNoPeer;
  p.view.world = 5;
  p.view.rank = 2;
  std::vector<u32> hits(5);
  for (u32 row = 0; row < 4000; ++row)
    ++hits[row_peer(p, row)];
  EXPECT_EQ(hits[2], 0u);
  for (u32 peer : {0u, 1u, 3u, 4u})
    EXPECT_NEAR(hits[peer], 1000, 150);
  p.fixed_peer = 4;
  EXPECT_EQ(row_peer(p, 17), 4u);
}

TEST(EpParts, CoverTheRowAndAreSmallWhereManyAreWanted) {
  for (const u32 row_bytes : {16u, 48u, 512u, 4096u, 14336u, 16384u, 32768u})
    for (const u32 most_rows : {1u, 2u, 4u, 8u, 32u})
      for (const u32 wanted : {1u, 2u, 7u, 28u, 1000u}) {
        const EpParts parts = EpParts::make(14336, row_bytes, most_rows, wanted);
        SCOPED_TRACE(::testing::Message() << row_bytes << " " << most_rows << " " << wanted);
        EXPECT_EQ(parts.bytes % kEpLine, 0u) << "parts begin inside a line of memory";
        EXPECT_LE(parts.bytes * most_rows, 14336u);
        EXPECT_GE(parts.bytes * parts.count, row_bytes);
        EXPECT_LT(parts.bytes * (parts.count - 1), row_bytes);
        EXPECT_EQ(parts.tickets_per_token(), 1u);
      }
  EXPECT_EQ(EpParts::make(14336, 14336, 2).count, 2u);
  EXPECT_EQ(EpParts::make(14336, 8192, 4).bytes, 2816u);  // 2736 would shift every other part
  EXPECT_EQ(EpParts::make(256, 208, 4).bytes, 64u);
  EXPECT_EQ(EpParts::make(14336, 14336, 2, 1000).bytes, EpParts::kFewest);
}

TEST(EpCombineBlocks, SendersAreSpreadAndTheLastBlockIsOne) {
  for (u32 blocks = 2; blocks <= 160; ++blocks)
    for (u32 senders = 1; senders < blocks; ++senders) {
      const EpCombineBlocks grid{senders, blocks};
      u32 seen = 0, longest = 0, run = 0;
      for (u32 block = 0; block < blocks; ++block) {
        EXPECT_EQ(grid.senders_before(block), seen);
        const bool sends = grid.sends(block);
        seen += sends;
        run = sends ? 0 : run + 1;
        longest = std::max(longest, run);
      }
      ASSERT_EQ(seen, senders) << blocks;
      EXPECT_TRUE(grid.sends(blocks - 1));
      EXPECT_LE(longest, ceil_div(blocks, senders)) << blocks << " " << senders;
    }
  EXPECT_EQ((EpCombineBlocks{0, 12}.adders()), 12u);
  EXPECT_FALSE((EpCombineBlocks{0, 12}.sends(11)));
}

TEST(Descriptor, FieldsAreWhereTheHardwareLooks) {
  const u64 d = ptx::matrix_descriptor(0x2400u, ptx::k_major(ptx::Swizzle::k128));
  EXPECT_EQ(d, u64{0x240} | u64{1} << 16 | u64{64} << 32 | u64{1} << 62);
  EXPECT_EQ(ptx::advanced(d, 32), d + 2);
  const u64 e = ptx::matrix_descriptor(0x100u, {ptx::Swizzle::k32, 512, 256});
  EXPECT_EQ(e, u64{0x10} | u64{32} << 16 | u64{16} << 32 | u64{3} << 62);
}

TEST(Swizzle, PermutesTheColumnsOfEachRowAndSpreadsTheBanks) {
  for (ptx::Swizzle s : {ptx::Swizzle::k128, ptx::Swizzle::k64, ptx::Swizzle::k32}) {
    std::set<u32> seen;
    for (u32 offset = 0; offset < 1024; ++offset) {
      const u32 at = ptx::swizzled(s, offset);
      EXPECT_EQ(at / 128, offset / 128);
      EXPECT_EQ(at % 16, offset % 16);
      seen.insert(at);
    }
    EXPECT_EQ(seen.size(), 1024u);
  }
  std::set<u32> columns;
  for (u32 row = 0; row < 8; ++row)
    columns.insert(ptx::swizzled(ptx::Swizzle::k128, row * 128) % 128);
  EXPECT_EQ(columns.size(), 8u);
  EXPECT_EQ(ptx::swizzled(ptx::Swizzle::kNone, 777), 777u);
}

TEST(Accumulator, EveryElementBelongsToOneThread) {
  std::set<std::pair<u32, u32>> seen;
  for (u32 thread = 0; thread < 128; ++thread)
    for (u32 i = 0; i < 64; ++i) {
      const u32 row = ptx::accumulator_row(thread, i), column = ptx::accumulator_column(thread, i);
      EXPECT_LT(row, 64u);
      EXPECT_LT(column, 128u);
      seen.insert({row, column});
    }
  EXPECT_EQ(seen.size(), 64u * 128u);
}

struct Loader {
  static constexpr u32 kWarps = 4, kRegisters = 88;
};
struct Math {
  static constexpr u32 kWarps = 8, kRegisters = 208;
};
static_assert(RegisterPlan<Loader, Math>::kAtLaunch == 168);
static_assert(RegisterPlan<Loader, Math>::kReallocates);
static_assert(RoleList<Loader, Math>::kThreads == 384);

}  // namespace
