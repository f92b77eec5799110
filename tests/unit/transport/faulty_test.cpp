// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <gtest/gtest.h>
#include <map>
#include <mutex>
#include <vector>

#include "support/transport_fixture.hpp"
#include "transport/faulty/transport.hpp"
#include "transport/loopback/transport.hpp"

namespace crossdock::transport {
namespace {

using testing::TestShard;
using testing::TestSink;

constexpr std::size_t kBytes = 256 << 10;
constexpr std::uint32_t kAlways = 1'000'000;

// loopback inside the injector.
struct Bench {
  explicit Bench(const FaultyOptions& options) : from(kBytes), to(kBytes) {
    TransportContext context;
    context.instance = 1;
    transport = make_faulty(make_loopback(context, LoopbackOptions{}), options).value();
    PeerInfo self;
    self.name = "self";
    self.instance = 1;
    endpoint = transport->connect(self, 0, Deadline::in(std::chrono::seconds(1))).value();
    testing::fill_pattern(from, 1);
    region.address = reinterpret_cast<std::uint64_t>(to.data());
    region.length = kBytes;
    region.attached[0] = endpoint->attach(region).value();
  }
  TestShard& shard(Op op = Op::kWrite) {
    shards.push_back(std::make_unique<TestShard>(op, sink));
    shards.back()->add(from.data(), region.address, kBytes, region);
    return *shards.back();
  }
  std::vector<std::byte> from;
  std::vector<std::byte> to;
  std::unique_ptr<Transport> transport;
  RemoteRegion region;
  TestSink sink;
  std::vector<std::unique_ptr<TestShard>> shards;
  std::unique_ptr<Endpoint> endpoint;
};

int differing_bits(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  int bits = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    bits += std::popcount(std::to_integer<unsigned>(a[i] ^ b[i]));
  return bits;
}

TEST(Faulty, NamesWhatItWraps) {
  Bench bench({});
  EXPECT_EQ(bench.transport->name(), "faulty+loopback");
}

TEST(Faulty, FlipsOneBitOfAWriteAndLeavesTheSourceAlone) {
  Bench bench({.corrupt_ppm = kAlways});
  const auto source = bench.from;
  TestShard& shard = bench.shard();
  ASSERT_TRUE(bench.endpoint->post(shard.ready()).ok());
  ASSERT_TRUE(bench.sink.wait(shard.shard));
  EXPECT_FALSE(bench.sink.outcome(shard.shard).error);
  EXPECT_EQ(bench.from, source);
  EXPECT_EQ(differing_bits(bench.from, bench.to), 1);
}

TEST(Faulty, FlipsOneBitOfARead) {
  Bench bench({.corrupt_ppm = kAlways});
  testing::fill_pattern(bench.to, 2);
  TestShard& shard = bench.shard(Op::kRead);
  ASSERT_TRUE(bench.endpoint->post(shard.ready()).ok());
  ASSERT_TRUE(bench.sink.wait(shard.shard));
  EXPECT_TRUE(testing::matches_pattern(bench.to, 2)) << "the peer's memory is not touched";
  EXPECT_EQ(differing_bits(bench.from, bench.to), 1);
}

TEST(Faulty, FailsHalfWay) {
  Bench bench({.fail_ppm = kAlways});
  TestShard& shard = bench.shard();
  ASSERT_TRUE(bench.endpoint->post(shard.ready()).ok());
  ASSERT_TRUE(bench.sink.wait(shard.shard));
  const auto outcome = bench.sink.outcome(shard.shard);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->code, Code::kUnreachable);
  EXPECT_EQ(outcome.slices_done, 2u);
  const std::span to(bench.to);
  EXPECT_TRUE(testing::matches_pattern(to.first(kBytes / 2), 1));
  EXPECT_TRUE(testing::all_zero(to.subspan(kBytes / 2)));
}

TEST(Faulty, LosesTheConnection) {
  Bench bench({.drop_ppm = kAlways});
  // From some moment on, perhaps while the first is being posted, posts say why.
  const Deadline end = Deadline::in(std::chrono::seconds(10));
  Code code = Code::kOk;
  while (code != Code::kPeerLost && !end.passed()) {
    TestShard& next = bench.shard();
    code = bench.endpoint->post(next.ready()).code();
    ASSERT_TRUE(code != Code::kOk || bench.sink.wait(next.shard));
  }
  EXPECT_EQ(code, Code::kPeerLost);
}

TEST(Faulty, DelaysWithoutHoldingTheCallerAndCancelEndsTheDelay) {
  Bench bench({.delay_max = std::chrono::hours(1)});
  TestShard& shard = bench.shard();
  ASSERT_TRUE(bench.endpoint->post(shard.ready()).ok());
  EXPECT_EQ(bench.sink.outcome(shard.shard).finished, 0);
  EXPECT_EQ(bench.endpoint->queued_bytes(), kBytes);
  shard.stop = true;
  bench.endpoint->cancel(shard.shard);
  ASSERT_TRUE(bench.sink.wait(shard.shard));
  EXPECT_EQ(bench.sink.outcome(shard.shard).error->code, Code::kCancelled);
  EXPECT_TRUE(testing::all_zero(bench.to));
}

TEST(Faulty, SeverEndsDelayedShards) {
  Bench bench({.delay_max = std::chrono::hours(1)});
  for (int i = 0; i < 3; ++i)
    ASSERT_TRUE(bench.endpoint->post(bench.shard().ready()).ok());
  bench.endpoint->sever(make_error(Code::kPeerLost, "cut"));
  ASSERT_TRUE(bench.sink.wait_all());
  for (const auto& shard : bench.shards)
    EXPECT_EQ(bench.sink.outcome(shard->shard).error->code, Code::kPeerLost);
  EXPECT_TRUE(testing::all_zero(bench.to));
}

TEST(Faulty, ReportsInAnotherOrderBySeed) {
  const auto order = [](std::uint64_t seed) {
    Bench bench({.seed = seed, .reorder = 8});
    std::vector<std::size_t> reported;
    std::mutex mutex;
    bench.sink.on_finished = [&](Shard& shard) {
      const std::lock_guard lock(mutex);
      reported.push_back(shard.transfer_id);
    };
    for (std::size_t i = 0; i < 64; ++i) {
      TestShard& shard = bench.shard();
      shard.slices.resize(1);
      shard.slices[0].length = 64;
      shard.shard.transfer_id = i;
      EXPECT_TRUE(bench.endpoint->post(shard.ready()).ok());
    }
    EXPECT_TRUE(bench.sink.wait_all());
    return reported;
  };
  const auto first = order(1);
  ASSERT_EQ(first.size(), 64u);
  EXPECT_FALSE(std::ranges::is_sorted(first));
}

// Counts finishes only; TestSink takes a second one for a failure of the transport.
class DuplicateSink final : public ShardSink {
 public:
  void shard_progress(Shard&, std::uint64_t) noexcept override {}
  void shard_finished(Shard& shard, const Error*) noexcept override {
    const std::lock_guard lock(mutex);
    const int count = ++counts.at(&shard);
    if (count == 1) ++finished;
    twice += count == 2;
    EXPECT_LE(count, 2);
    EXPECT_TRUE(count == 1 || finished < counts.size())
        << "a duplicate after the last shard could come after the end of the transfer";
  }
  std::mutex mutex;
  std::map<const Shard*, int> counts;
  std::size_t finished = 0;
  std::size_t twice = 0;
};

TEST(Faulty, ReportsTwiceButNeverAfterTheTransfersEnd) {
  Bench bench({.reorder = 4, .duplicate_ppm = kAlways});
  DuplicateSink sink;
  for (int i = 0; i < 32; ++i) {
    TestShard& shard = bench.shard();
    shard.ready();
    shard.shard.sink = &sink;
    sink.counts[&shard.shard] = 0;
  }
  for (const auto& shard : bench.shards)
    ASSERT_TRUE(bench.endpoint->post(shard->shard).ok());
  const Deadline end = Deadline::in(std::chrono::seconds(10));
  for (bool done = false; !done && !end.passed();) {
    const std::lock_guard lock(sink.mutex);
    done = sink.finished == 32;
  }
  bench.endpoint.reset();
  bench.transport.reset();  // joins: nobody calls the sink from here on
  EXPECT_EQ(sink.finished, 32u);
  EXPECT_GT(sink.twice, 0u);
  EXPECT_LT(sink.twice, 32u);
}

}  // namespace
}  // namespace crossdock::transport
