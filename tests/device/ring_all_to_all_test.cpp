// ring_all_to_all in the twin: rings that wrap, uneven counts, several launches on the same totals,
// and peers that do not take part.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/kernel/ring_all_to_all.cuh>

#include "ranks.hpp"

namespace crossdock::testing {
namespace {

constexpr RingAllToAllConfig kConfig{.warp_pairs = 2, .stages = 2, .batch = 2};
constexpr u32 kRowBytes = 48;
constexpr u32 kSlots = 4;

struct Ring {
  u32 world;
  u32 channels;
  u32 max_rows;
  SymmetricLayout layout;
  RingLayout ring;

  Ring(u32 ranks, u32 channel_count, u32 rows)
      : world(ranks), channels(channel_count), max_rows(rows) {
    ring = add_ring(layout, world, {channels, kSlots, kRowBytes});
  }
  [[nodiscard]] u64 row_words() const { return u64{world} * max_rows * kRowBytes / sizeof(u32); }
  // Rows from one rank to another; zero for some pairs, max_rows for others.
  [[nodiscard]] u32 rows(u32 from, u32 to, u32 seed) const {
    const u32 value = mix(from * 131 + to + seed * 65537) % (max_rows + 4);
    return value >= max_rows ? (value == max_rows ? 0 : max_rows) : value;
  }

  RingAllToAllParams params(Ranks& ranks, u32 rank) const {
    RingAllToAllParams p{};
    p.common = ranks.common(rank, KernelId::kRingAllToAll);
    p.view = ranks.view(rank);
    p.ring = ring;
    p.totals = {ranks.local<u32>(rank, u64{world} * channels),
                ranks.local<u32>(rank, u64{world} * channels)};
    p.input = reinterpret_cast<u8*>(ranks.local<u32>(rank, row_words()));
    p.output = reinterpret_cast<u8*>(ranks.local<u32>(rank, row_words()));
    p.send_rows = ranks.local<u32>(rank, world);
    p.receive_rows = ranks.local<u32>(rank, world);
    p.max_rows = max_rows;
    return p;
  }
  [[nodiscard]] Ranks::Shape shape() const {
    return {channels, 64 * kConfig.warp_pairs, kernel::ring_shared_bytes(kConfig, kRowBytes),
            "ring_all_to_all"};
  }
  static u32 word(u32 from, u32 to, u32 row, u32 i, u32 seed) {
    return mix(from * 0x10001u + to * 257 + row * 17 + seed) + i;
  }
  void fill(const RingAllToAllParams& p, u32 rank, u32 seed) const {
    auto* in = reinterpret_cast<u32*>(const_cast<u8*>(p.input));
    for (u32 to = 0; to < world; ++to)
      for (u32 row = 0; row < max_rows; ++row)
        for (u32 i = 0; i < kRowBytes / 4; ++i)
          in[(u64{to} * max_rows + row) * (kRowBytes / 4) + i] = word(rank, to, row, i, seed);
    for (u32 peer = 0; peer < world; ++peer) {
      const_cast<u32*>(p.send_rows)[peer] = rows(rank, peer, seed);
      const_cast<u32*>(p.receive_rows)[peer] = rows(peer, rank, seed);
    }
    std::memset(p.output, 0xee, row_words() * sizeof(u32));
  }
  // Every row that was sent is there, and nothing else was written.
  void check(const RingAllToAllParams& p, u32 rank, u32 seed) const {
    const auto* out = reinterpret_cast<const u32*>(p.output);
    for (u32 from = 0; from < world; ++from)
      for (u32 row = 0; row < max_rows; ++row)
        for (u32 i = 0; i < kRowBytes / 4; ++i) {
          const bool sent = row < rows(from, rank, seed);
          ASSERT_EQ(out[(u64{from} * max_rows + row) * (kRowBytes / 4) + i],
                    sent ? word(from, rank, row, i, seed) : 0xeeeeeeeeu)
              << "seed " << seed << " from " << from << " to " << rank << " row " << row;
        }
  }
};

void check_wrapping_rings(u32 world) {
  // With two channels and four slots, 26 rows are more than three turns of each ring a launch;
  // at 32 ranks three launches make up for fewer rows.
  const Ring ring(world, world > 8 ? 1 : 2, world > 8 ? 6 : 26);
  Ranks ranks(world, ring.layout, world == 3);
  std::vector<RingAllToAllParams> params;
  for (u32 rank = 0; rank < world; ++rank)
    params.push_back(ring.params(ranks, rank));
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    for (u32 rank = 0; rank < world; ++rank) {
      ring.fill(params[rank], rank, seed);
      ranks.launch(rank, ring.shape(), kernel::ring_all_to_all<kConfig>, params[rank]);
    }
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
    for (u32 rank = 0; rank < world; ++rank)
      ASSERT_NO_FATAL_FAILURE(ring.check(params[rank], rank, seed));
  }
  // What was sent in all is what was received and what was given back as credit.
  for (u32 rank = 0; rank < world; ++rank)
    for (u32 peer = 0; peer < world; ++peer)
      for (u32 channel = 0; channel < ring.channels; ++channel) {
        const u64 mine = ring_index(ring.ring, peer, channel);
        const u32 sent = params[rank].totals.sent[mine];
        EXPECT_EQ(sent, params[peer].totals.received[ring_index(ring.ring, rank, channel)]);
        EXPECT_EQ(sent, *ranks.window<u32>(rank, ring.ring.credits + mine * sizeof(PaddedWord)));
        EXPECT_GE(sent, 3 * kSlots) << "the ring has wrapped three times";
      }
}

// The bound is a part of a minute; see barrier_test.cpp.
TEST(RingAllToAll, RowsArriveInPlaceThroughWrappingRings) {
  for (u32 world : kWorlds) {
    SCOPED_TRACE(world);
    bounded_at_32_ranks(world, 10, "rows all to all", [&] { check_wrapping_rings(world); });
  }
}

TEST(RingAllToAll, TotalsMayWrapAround) {
  const Ring ring(2, 1, 26);
  Ranks ranks(2, ring.layout);
  std::vector<RingAllToAllParams> params;
  constexpr u32 kNearEnd = ~0u - 7;  // a multiple of the slots below 2^32
  for (u32 rank = 0; rank < 2; ++rank) {
    params.push_back(ring.params(ranks, rank));
    for (u32 peer = 0; peer < 2; ++peer) {
      params[rank].totals.sent[peer] = kNearEnd;
      params[rank].totals.received[peer] = kNearEnd;
      *ranks.window<u32>(rank, ring.ring.credits + peer * sizeof(PaddedWord)) = kNearEnd;
      *ranks.window<u32>(rank, ring.ring.tails + peer * sizeof(PaddedWord)) = kNearEnd;
    }
    ring.fill(params[rank], rank, 3);
  }
  for (u32 rank = 0; rank < 2; ++rank)
    ranks.launch(rank, ring.shape(), kernel::ring_all_to_all<kConfig>, params[rank]);
  ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(3)));
  for (u32 rank = 0; rank < 2; ++rank)
    ASSERT_NO_FATAL_FAILURE(ring.check(params[rank], rank, 3));
}

TEST(RingAllToAll, APeerThatIsMissingIsNamedByCreditOrArrival) {
  constexpr u32 kWorld = 3, kMissing = 1;
  const Ring ring(kWorld, 2, 26);
  u32 credits = 0, arrivals = 0;
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    Ranks ranks(kWorld, ring.layout);
    std::vector<RingAllToAllParams> params;
    for (u32 rank = 0; rank < kWorld; ++rank) {
      params.push_back(ring.params(ranks, rank));
      ring.fill(params[rank], rank, seed);
      // All pairs exchange all rows, so that the missing rank is missed by everyone.
      for (u32 peer = 0; peer < kWorld; ++peer) {
        const_cast<u32*>(params[rank].send_rows)[peer] = ring.max_rows;
        const_cast<u32*>(params[rank].receive_rows)[peer] = ring.max_rows;
      }
    }
    for (u32 rank = 0; rank < kWorld; ++rank)
      if (rank != kMissing)
        ranks.launch(rank, ring.shape(), kernel::ring_all_to_all<kConfig>, params[rank]);
    ASSERT_NO_FATAL_FAILURE(ranks.run(fault_schedule(seed)));
    for (u32 rank : {0u, 2u}) {
      const FaultRecord& fault = ranks.fault(rank);
      const bool credit = fault.phase == Phase::kCredit;
      ++(credit ? credits : arrivals);
      expect_fault(fault, KernelId::kRingAllToAll, credit ? Phase::kCredit : Phase::kArrival, rank,
                   kMissing);
      EXPECT_EQ(fault.expected, 2u) << "the first batch, or the credit for the third";
      EXPECT_EQ(fault.seen, 0u);
    }
    ranks.reset();
    for (u32 rank = 0; rank < kWorld; ++rank) {
      std::memset(params[rank].totals.sent, 0, u64{kWorld} * ring.channels * sizeof(u32));
      std::memset(params[rank].totals.received, 0, u64{kWorld} * ring.channels * sizeof(u32));
      ring.fill(params[rank], rank, seed);
      ranks.launch(rank, ring.shape(), kernel::ring_all_to_all<kConfig>, params[rank]);
    }
    ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
    for (u32 rank = 0; rank < kWorld; ++rank)
      ASSERT_NO_FATAL_FAILURE(ring.check(params[rank], rank, seed));
  }
  EXPECT_GT(credits + arrivals, 0u);
}

}  // namespace
}  // namespace crossdock::testing
