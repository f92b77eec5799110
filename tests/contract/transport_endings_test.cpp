// The contract of src/transport/transport.hpp, run against every transport: how shards end. Cancel,
// sever, deadlines, full queues, poisoned buffers, leaks.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <gtest/gtest.h>
#include <thread>

#include "support/process_use.hpp"
#include "support/transport_cases.hpp"
#include "support/transport_fixture.hpp"

namespace crossdock::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using transport::RemoteRegion;

constexpr std::size_t kMiB = std::size_t{1} << 20;

class TransportEndings : public TransportFixture {};

Error lost() {
  return Error{.code = Code::kPeerLost, .scope = Scope::kPeer, .message = "given up by the test"};
}

TEST_P(TransportEndings, MovesNothingWhenStoppedBefore) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  const TestMemory local = memory(kMiB);
  const TestMemory there = memory(kMiB);
  RemoteRegion& region = expose(there, *endpoint);
  fill_pattern(local.bytes(), 5);
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  shard.add(local.data(), address(there), kMiB, region);
  shard.stop = true;
  ASSERT_TRUE(endpoint->post(shard.ready()).ok());
  endpoint->cancel(shard.shard);
  ASSERT_TRUE(sink.wait(shard.shard));
  const auto outcome = sink.outcome(shard.shard);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->code, Code::kCancelled);
  EXPECT_EQ(outcome.slices_done, 0u);
  EXPECT_TRUE(all_zero(there.bytes()));
}

TEST_P(TransportEndings, DoesNotStartPastTheDeadline) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  const TestMemory local = memory(256);
  const TestMemory there = memory(256);
  RemoteRegion& region = expose(there, *endpoint);
  fill_pattern(local.bytes(), 5);
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  shard.add(local.data(), address(there), 256, region);
  shard.shard.deadline = Deadline::in(seconds(-1));
  ASSERT_TRUE(endpoint->post(shard.ready()).ok());
  ASSERT_TRUE(sink.wait(shard.shard));
  const auto outcome = sink.outcome(shard.shard);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->code, Code::kDeadline);
  EXPECT_TRUE(all_zero(there.bytes()));
}

TEST_P(TransportEndings, CancelDuringTheCopyKeepsThePrefix) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  constexpr std::size_t kBytes = 32 * kMiB;
  const TestMemory local = memory(kBytes);
  const TestMemory there = memory(kBytes);
  RemoteRegion& region = expose(there, *endpoint);
  fill_pattern(local.bytes(), 6);
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  shard.add(local.data(), address(there), kBytes, region);
  sink.on_progress = [&](Shard&) { shard.stop = true; };
  ASSERT_TRUE(endpoint->post(shard.ready()).ok());
  ASSERT_TRUE(sink.wait(shard.shard));
  endpoint->cancel(shard.shard);  // after the end: harmless
  const auto outcome = sink.outcome(shard.shard);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->code, Code::kCancelled);
  EXPECT_GT(outcome.slices_done, 0u);
  EXPECT_LT(outcome.slices_done, shard.slices.size());
  EXPECT_TRUE(matches_pattern(there.bytes().first(outcome.slices_done * std::size_t{65536}), 6));

  // The endpoint lives on.
  TestShard next(Op::kWrite, sink);
  sink.on_progress = {};
  next.add(local.data(), address(there), 1000, region);
  ASSERT_TRUE(endpoint->post(next.ready()).ok());
  ASSERT_TRUE(sink.wait(next.shard));
  EXPECT_FALSE(sink.outcome(next.shard).error);
}

TEST_P(TransportEndings, CancelWhileQueuedFinishesWithoutBytes) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  constexpr std::size_t kBytes = 16 * kMiB;
  const TestMemory local = memory(kBytes);
  const TestMemory there = memory(kBytes);
  const TestMemory victim = memory(kMiB);
  RemoteRegion& region = expose(there, *endpoint);
  RemoteRegion& victim_region = expose(victim, *endpoint);
  fill_pattern(local.bytes(), 6);
  TestSink sink;
  std::vector<std::unique_ptr<TestShard>> ahead;
  for (int i = 0; i < 4; ++i) {
    ahead.push_back(std::make_unique<TestShard>(Op::kWrite, sink));
    ahead.back()->add(local.data(), address(there), kBytes, region);
    ASSERT_TRUE(post_patiently(*endpoint, ahead.back()->ready()).ok());
  }
  TestShard queued(Op::kWrite, sink);
  queued.add(local.data(), address(victim), kMiB, victim_region);
  ASSERT_TRUE(post_patiently(*endpoint, queued.ready()).ok());
  queued.stop = true;
  endpoint->cancel(queued.shard);
  ASSERT_TRUE(sink.wait_all());
  const auto outcome = sink.outcome(queued.shard);
  // It may have won the race; then all of it is there.
  if (outcome.error) {
    EXPECT_EQ(outcome.error->code, Code::kCancelled);
    EXPECT_LT(outcome.slices_done, queued.slices.size());
  } else {
    EXPECT_TRUE(matches_pattern(victim.bytes(), 6));
  }
  for (const auto& shard : ahead)
    EXPECT_FALSE(sink.outcome(shard->shard).error);
}

TEST_P(TransportEndings, SeverEndsEveryShardAndLaterPosts) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  constexpr std::size_t kBytes = 16 * kMiB;
  const TestMemory local = memory(kBytes);
  const TestMemory there = memory(kBytes);
  RemoteRegion& region = expose(there, *endpoint);
  TestSink sink;
  // The transport stands in its first report until the cut is about to be made, so that much is
  // left however busy the machine is.
  std::atomic<bool> cut{false}, go{false};
  const Deadline end = Deadline::in(seconds(20));
  sink.on_progress = [&](Shard&) {
    cut = true;
    while (!go && !end.passed())
      std::this_thread::yield();
  };
  std::vector<std::unique_ptr<TestShard>> shards;
  for (int i = 0; i < 8; ++i) {
    shards.push_back(std::make_unique<TestShard>(Op::kWrite, sink));
    shards.back()->add(local.data(), address(there), kBytes, region);
    ASSERT_TRUE(post_patiently(*endpoint, shards.back()->ready()).ok());
  }
  while (!cut && !end.passed())
    std::this_thread::yield();
  go = true;
  ASSERT_TRUE(cut);
  endpoint->sever(lost());
  endpoint->sever(make_error(Code::kClosed, "again: the first reason stays"));
  ASSERT_TRUE(sink.wait_all());
  int failed = 0;
  for (const auto& shard : shards) {
    const auto outcome = sink.outcome(shard->shard);
    if (!outcome.error) continue;
    ++failed;
    EXPECT_EQ(outcome.error->code, Code::kPeerLost);
    EXPECT_NE(outcome.error->message.find("given up"), std::string::npos);
  }
  EXPECT_GT(failed, 0);
  TestShard late(Op::kWrite, sink);
  late.add(local.data(), address(there), 64, region);
  EXPECT_EQ(endpoint->post(late.ready()).code(), Code::kPeerLost);
  EXPECT_EQ(sink.outcome(late.shard).finished, 0);
  EXPECT_EQ(endpoint->queued_bytes(), 0u);
}

TEST_P(TransportEndings, FullQueueSaysWouldBlockAndTakesMoreLater) {
  const auto endpoint = connect();
  ASSERT_NE(endpoint, nullptr);
  const TestMemory local = memory(kMiB);
  const TestMemory there = memory(kMiB);
  RemoteRegion& region = expose(there, *endpoint);
  TestSink sink;
  std::vector<std::unique_ptr<TestShard>> shards;
  bool refused = false;
  for (int i = 0; i < 20000 && !refused; ++i) {
    auto shard = std::make_unique<TestShard>(Op::kWrite, sink);
    shard->add(local.data(), address(there), kMiB, region);
    const auto posted = endpoint->post(shard->ready());
    if (posted.ok()) {
      shards.push_back(std::move(shard));
      continue;
    }
    ASSERT_EQ(posted.code(), Code::kWouldBlock) << posted.error().describe();
    refused = true;
    EXPECT_EQ(sink.outcome(shard->shard).finished, 0);
    ASSERT_TRUE(post_patiently(*endpoint, shard->shard).ok());
    ASSERT_TRUE(sink.wait(shard->shard));
    EXPECT_FALSE(sink.outcome(shard->shard).error);
    shards.push_back(std::move(shard));
  }
  EXPECT_TRUE(refused) << "20,000 shards of 1 MiB were taken: the queue has no bound";
  for (const auto& shard : shards)
    shard->stop = true;
  for (const auto& shard : shards)
    endpoint->cancel(shard->shard);
  EXPECT_TRUE(sink.wait_all());
}

#ifdef CROSSDOCK_SANITIZE_THREAD
constexpr bool kUnderTsan = true;
#else
constexpr bool kUnderTsan = false;
#endif

TEST_P(TransportEndings, PoisonedBuffersStayPoisonedAfterTheEnd) {
  constexpr std::size_t kBytes = 8 * kMiB;
  constexpr std::byte kPoison{0xDB};
  const TestMemory local = memory(kBytes);
  const TestMemory there = memory(kBytes);
  RemoteRegion* region = nullptr;
  for (const Op op : {Op::kWrite, Op::kRead}) {
    for (const bool sever : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "op " << static_cast<int>(op) << " sever " << sever);
      const auto endpoint = connect();
      ASSERT_NE(endpoint, nullptr);
      TestSink sink;
      TestShard shard(op, sink);
      // Registered once; each new endpoint attaches it for itself.
      region = region == nullptr ? &expose(there, *endpoint) : &reexpose(*endpoint);
      std::ranges::fill(op == Op::kWrite ? local.bytes() : there.bytes(), std::byte{0x11});
      std::ranges::fill(op == Op::kWrite ? there.bytes() : local.bytes(), std::byte{0x22});
      std::atomic<bool> moving{false};
      sink.on_progress = [&](Shard&) { moving = true; };
      // In the callback itself: the earliest moment at which the buffers are the caller's again.
      sink.on_finished = [&](Shard&) { std::ranges::fill(local.bytes(), kPoison); };
      shard.add(local.data(), address(there), kBytes, *region, 16 << 10);
      ASSERT_TRUE(endpoint->post(shard.ready()).ok());
      const Deadline end = Deadline::in(seconds(20));
      while (!moving && !end.passed())
        std::this_thread::yield();
      if (sever) {
        endpoint->sever(lost());
      } else {
        shard.stop = true;
        endpoint->cancel(shard.shard);
      }
      ASSERT_TRUE(sink.wait(shard.shard));
      // Late bytes would come soon: watch for a while, and let the machine schedule others.
      const Deadline watch = Deadline::in(milliseconds(30));
      bool clean = true;
      do {
        clean =
            clean && std::ranges::all_of(local.bytes(), [](std::byte b) { return b == kPoison; });
        // A target that is cut off ends its last receive in its own time, and nothing orders that
        // before this look; it must not see poison all the same.
        if (!sever || !kUnderTsan)
          clean = clean && std::ranges::find(there.bytes(), kPoison) == there.bytes().end();
      } while (clean && !watch.passed());
      EXPECT_TRUE(clean);
    }
  }
}

TEST_P(TransportEndings, ConnectingManyTimesLeaksNothing) {
  const TestMemory there = memory(2 * kMiB);
  const TestMemory local = memory(2 * kMiB);
  RemoteRegion* region = nullptr;
  const auto cycle = [&] {
    const auto endpoint = connect();
    ASSERT_NE(endpoint, nullptr);
    region = region == nullptr ? &expose(there, *endpoint) : &reexpose(*endpoint);
    TestSink sink;
    TestShard small(Op::kWrite, sink);
    small.add(local.data() + kMiB, address(there) + kMiB, 100, *region);
    TestShard large(Op::kRead, sink);
    large.add(local.data(), address(there), kMiB, *region);
    ASSERT_TRUE(endpoint->post(small.ready()).ok());
    ASSERT_TRUE(endpoint->post(large.ready()).ok());
    ASSERT_TRUE(sink.wait_all());
    EXPECT_FALSE(sink.outcome(large.shard).error);
  };
  for (int i = 0; i < 3; ++i)
    cycle();
  const std::size_t descriptors = open_descriptors();
  const std::size_t threads = running_threads();
  const std::size_t mappings = mappings_of("/memfd:");
  for (int i = 0; i < 200 && !HasFailure(); ++i)
    cycle();
  // What the last connection held may be given back a moment later, by another thread.
  const Deadline end = Deadline::in(seconds(5));
  while ((open_descriptors() > descriptors || running_threads() > threads) && !end.passed())
    std::this_thread::yield();
  EXPECT_LE(open_descriptors(), descriptors);
  EXPECT_LE(running_threads(), threads);
  EXPECT_LE(mappings_of("/memfd:"), mappings);
}

INSTANTIATE_TEST_SUITE_P(All, TransportEndings, ::testing::ValuesIn(transport_cases()),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace crossdock::testing
