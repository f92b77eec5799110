// The contract of src/transport/transport.hpp, run against every transport: what it moves and what
// it refuses. Endings (cancel, sever, deadlines) are in transport_endings_test.cpp. A test here
// talks only to the contract; what is special to one transport is tested in tests/unit/transport.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <thread>

#include "support/transport_cases.hpp"
#include "support/transport_fixture.hpp"

namespace crossdock::testing {
namespace {

using transport::RemoteRegion;

constexpr std::size_t kMiB = std::size_t{1} << 20;

class TransportContract : public TransportFixture {};

TEST_P(TransportContract, MovesExactBytesBothWaysAtOddOffsets) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  const TestMemory local = memory(8 * kMiB + 64);
  const TestMemory there = memory(8 * kMiB + 64);
  RemoteRegion& region = expose(there, *endpoint);
  constexpr std::array<std::size_t, 12> kSizes = {
      1, 2, 63, 64, 4095, 4097, 65535, 65536, 65537, kMiB + 3, 3 * kMiB - 1, 8 * kMiB};
  std::uint64_t seed = 1;
  for (const std::size_t size : kSizes) {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      SCOPED_TRACE(::testing::Message() << size << " bytes, op " << static_cast<int>(op));
      const TestMemory& from = op == Op::kWrite ? local : there;
      const TestMemory& to = op == Op::kWrite ? there : local;
      fill_pattern(from.bytes(), ++seed);
      std::ranges::fill(to.bytes(), std::byte{0xEE});
      const std::size_t local_offset = 13;
      const std::size_t remote_offset = 7;
      TestSink sink;
      TestShard shard(op, sink);
      shard.add(local.data() + local_offset, address(there, remote_offset), size, region);
      ASSERT_TRUE(endpoint->post(shard.ready()).ok());
      ASSERT_TRUE(sink.wait(shard.shard));
      const auto outcome = sink.outcome(shard.shard);
      ASSERT_FALSE(outcome.error) << outcome.error->describe();
      const std::size_t source_offset = op == Op::kWrite ? local_offset : remote_offset;
      const std::size_t offset = op == Op::kWrite ? remote_offset : local_offset;
      EXPECT_TRUE(matches_pattern(to.bytes().subspan(offset, size), seed, source_offset));
      EXPECT_EQ(to.data()[offset - 1], std::byte{0xEE});
      EXPECT_EQ(to.data()[offset + size], std::byte{0xEE});
      EXPECT_TRUE(to.guards_intact());
    }
  }
  EXPECT_EQ(endpoint->queued_bytes(), 0u);
}

TEST_P(TransportContract, MovesThousandsOfScatteredSlices) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  constexpr std::size_t kSlices = 6000;
  constexpr std::size_t kStride = 512;
  const TestMemory local = memory(kSlices * kStride);
  const TestMemory there = memory(kSlices * kStride);
  RemoteRegion& region = expose(there, *endpoint);
  for (const Op op : {Op::kWrite, Op::kRead}) {
    const TestMemory& from = op == Op::kWrite ? local : there;
    const TestMemory& to = op == Op::kWrite ? there : local;
    fill_pattern(from.bytes(), 3);
    std::ranges::fill(to.bytes(), std::byte{0});
    TestSink sink;
    TestShard shard(op, sink);
    // Slot i goes to slot i * 7 mod n, with 1 to 500 bytes.
    for (std::size_t i = 0; i < kSlices; ++i)
      shard.add(local.data() + i * kStride, address(there, i * 7 % kSlices * kStride),
                1 + i * 37 % 500, region);
    ASSERT_TRUE(endpoint->post(shard.ready()).ok());
    ASSERT_TRUE(sink.wait(shard.shard));
    const auto outcome = sink.outcome(shard.shard);
    ASSERT_FALSE(outcome.error) << outcome.error->describe();
    EXPECT_EQ(outcome.slices_done, kSlices);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kSlices; ++i) {
      const std::size_t j = i * 7 % kSlices;
      const std::size_t source = (op == Op::kWrite ? i : j) * kStride;
      const std::size_t destination = (op == Op::kWrite ? j : i) * kStride;
      const std::size_t length = 1 + i * 37 % 500;
      wrong += !matches_pattern(to.bytes().subspan(destination, length), 3, source);
      wrong += to.data()[destination + length] != std::byte{0};
    }
    EXPECT_EQ(wrong, 0u);
  }
}

TEST_P(TransportContract, FinishesAnEmptyShard) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  ASSERT_TRUE(endpoint->post(shard.ready()).ok());
  ASSERT_TRUE(sink.wait(shard.shard));
  EXPECT_FALSE(sink.outcome(shard.shard).error);
}

TEST_P(TransportContract, SixteenThreadsPostAtOnce) {
  constexpr int kThreads = 16;
  constexpr int kRounds = 60;
  constexpr std::size_t kPart = 256 << 10;
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  const TestMemory local = memory(kThreads * kPart);
  const TestMemory there = memory(kThreads * kPart);
  RemoteRegion& region = expose(there, *endpoint);
  fill_pattern(local.bytes(), 8);
  std::atomic<int> wrong{0};
  const auto work = [&](int t) {
    const std::size_t base = static_cast<std::size_t>(t) * kPart;
    TestSink sink;
    for (int round = 0; round < kRounds; ++round) {
      // Small ones (inside post), large ones (queued), both directions.
      const std::size_t size = round % 3 == 0 ? 100 : round % 3 == 1 ? 5000 : kPart;
      const Op op = round % 2 == 0 ? Op::kWrite : Op::kRead;
      TestShard shard(op, sink);
      shard.add(local.data() + base, address(there, base), size, region, 16 << 10);
      if (!post_patiently(*endpoint, shard.ready()).ok() || !sink.wait(shard.shard) ||
          sink.outcome(shard.shard).error)
        ++wrong;
      const std::byte* const to = (op == Op::kWrite ? there : local).data() + base;
      // What one thread wrote is what it reads: its part belongs to it alone.
      if (op == Op::kWrite && !std::equal(to, to + size, local.data() + base)) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back(work, t);
  for (auto& thread : threads)
    thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(endpoint->queued_bytes(), 0u);
}

TEST_P(TransportContract, RefusesWhatLiesOutsideTheRegion) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  const TestMemory local = memory(8192);
  const TestMemory there = memory(8192);
  RemoteRegion& region = expose(there, *endpoint);
  fill_pattern(local.bytes(), 9);
  struct Bad {
    std::uint64_t remote;
    std::size_t length;
  };
  const std::array<Bad, 5> kBad = {{{address(there, 8191), 2},
                                    {address(there) - 1, 16},
                                    {address(there, 8192), 1},
                                    {~std::uint64_t{0} - 3, 8},
                                    {address(there, 4096), 4097}}};
  for (const Bad& bad : kBad) {
    SCOPED_TRACE(bad.remote);
    TestSink sink;
    TestShard shard(Op::kWrite, sink);
    shard.add(local.data(), bad.remote, bad.length, region);
    ASSERT_TRUE(endpoint->post(shard.ready()).ok());
    ASSERT_TRUE(sink.wait(shard.shard));
    const auto outcome = sink.outcome(shard.shard);
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->code, Code::kInvalidArgument) << outcome.error->describe();
    EXPECT_EQ(outcome.bytes, 0u);
  }
  EXPECT_TRUE(all_zero(there.bytes()));
  EXPECT_TRUE(there.guards_intact());
  // One bad request harms no other.
  TestSink sink;
  TestShard good(Op::kWrite, sink);
  good.add(local.data(), address(there), 8192, region);
  ASSERT_TRUE(endpoint->post(good.ready()).ok());
  ASSERT_TRUE(sink.wait(good.shard));
  EXPECT_FALSE(sink.outcome(good.shard).error);
  EXPECT_TRUE(matches_pattern(there.bytes(), 9));
}

TEST_P(TransportContract, RespectsReadOnlyRegions) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  const TestMemory local = memory(4096);
  const TestMemory there = memory(4096);
  fill_pattern(there.bytes(), 10);
  RemoteRegion& region = expose(there, *endpoint, transfer::Access::kRemoteRead);
  TestSink sink;
  TestShard write(Op::kWrite, sink);
  write.add(local.data(), address(there), 4096, region);
  ASSERT_TRUE(endpoint->post(write.ready()).ok());
  ASSERT_TRUE(sink.wait(write.shard));
  const auto refused = sink.outcome(write.shard);
  ASSERT_TRUE(refused.error);
  EXPECT_EQ(refused.error->code, Code::kDenied) << refused.error->describe();
  EXPECT_TRUE(matches_pattern(there.bytes(), 10));
  TestShard read(Op::kRead, sink);
  read.add(local.data(), address(there), 4096, region);
  ASSERT_TRUE(endpoint->post(read.ready()).ok());
  ASSERT_TRUE(sink.wait(read.shard));
  EXPECT_FALSE(sink.outcome(read.shard).error);
  EXPECT_TRUE(matches_pattern(local.bytes(), 10));
}

TEST_P(TransportContract, AttachesAgainAndDetaches) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  const TestMemory local = memory(64);
  const TestMemory there = memory(kMiB);
  RemoteRegion& region = expose(there, *endpoint);
  const auto again = endpoint->attach(region);
  ASSERT_TRUE(again.ok()) << again.error().describe();
  EXPECT_EQ(again->delta, region.attached[0]->delta);
  endpoint->detach(region);
  endpoint->detach(region);
  const auto anew = endpoint->attach(region);
  ASSERT_TRUE(anew.ok()) << anew.error().describe();
  region.attached[0] = *anew;
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  shard.add(local.data(), address(there), 64, region);
  ASSERT_TRUE(endpoint->post(shard.ready()).ok());
  ASSERT_TRUE(sink.wait(shard.shard));
  EXPECT_FALSE(sink.outcome(shard.shard).error);
}

// Two endpoints to one peer, as an engine has that dials again or knows the peer by two names: what
// one lets go of, the other still has.
TEST_P(TransportContract, DetachingOneEndpointLeavesTheOthersTheirs) {
  auto first = connect();
  const auto second = connect();
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  const TestMemory local = memory(kMiB);
  const TestMemory there = memory(kMiB);
  expose(there, *first);
  RemoteRegion& region = reexpose(*second);
  TestSink sink;
  const auto writes = [&](std::uint64_t seed) {
    fill_pattern(local.bytes(), seed);
    TestShard shard(Op::kWrite, sink);
    shard.add(local.data(), address(there), kMiB, region);
    EXPECT_TRUE(second->post(shard.ready()).ok());
    EXPECT_TRUE(sink.wait(shard.shard));
    return !sink.outcome(shard.shard).error && matches_pattern(there.bytes(), seed);
  };
  first->detach(region);
  first->detach(region);
  EXPECT_TRUE(writes(11));
  ASSERT_TRUE(first->attach(region).ok());
  first.reset();
  EXPECT_TRUE(writes(12)) << "an endpoint that goes takes only its own with it";
}

// "Terminal means quiesced": after the end, the caller reuses its buffers at once. Nothing of what
// it writes there may reach the peer, and nothing may arrive in it.
TEST_P(TransportContract, EveryRailMovesBytes) {
  const TestMemory local = memory(kMiB);
  const TestMemory there = memory(kMiB);
  std::vector<std::unique_ptr<Endpoint>> rails;
  for (std::uint32_t i = 0; i < initiator().transport->num_rails(); ++i) {
    rails.push_back(connect(i));
    ASSERT_NE(rails.back(), nullptr);
  }
  RemoteRegion& region = expose(there, *rails[0]);
  std::uint64_t seed = 20;
  for (const auto& rail : rails) {
    ASSERT_TRUE(rail->attach(region).ok());
    fill_pattern(local.bytes(), ++seed);
    TestSink sink;
    TestShard shard(Op::kWrite, sink);
    shard.add(local.data(), address(there), kMiB, region);
    ASSERT_TRUE(rail->post(shard.ready()).ok());
    ASSERT_TRUE(sink.wait(shard.shard));
    EXPECT_FALSE(sink.outcome(shard.shard).error);
    EXPECT_TRUE(matches_pattern(there.bytes(), seed));
  }
}

INSTANTIATE_TEST_SUITE_P(All, TransportContract, ::testing::ValuesIn(transport_cases()),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace crossdock::testing
