// SPDX-License-Identifier: Apache-2.0
#include "transport/copy_rail.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <gtest/gtest.h>
#include <new>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "support/process_use.hpp"
#include "support/transport_fixture.hpp"
#include "transport/copy_bytes.hpp"

namespace {
// Counts allocations of the thread that asks for it, for the promise that none happens per shard.
thread_local std::uint64_t allocations = 0;
}  // namespace

#if !defined(CROSSDOCK_SANITIZE_ADDRESS) && !defined(CROSSDOCK_SANITIZE_THREAD)
#define CROSSDOCK_COUNTS_ALLOCATIONS 1
// GCC takes malloc in a replaced operator new for a mismatch with delete.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t size) {
  ++allocations;
  if (void* const p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
#endif

namespace crossdock::transport {
namespace {

using testing::TestShard;
using testing::TestSink;

// A copier that waits at a gate in each window, so that a test decides what the rail is doing.
class GatedCopier final : public SliceCopier {
 public:
  std::optional<Error> check(const Shard&) noexcept override { return std::nullopt; }
  std::uint32_t copy(const Shard& shard, std::uint32_t first, std::uint32_t end,
                     std::optional<Error>& error) noexcept override {
    const std::uint32_t n = running.fetch_add(1) + 1;
    running.notify_all();
    for (std::uint32_t seen = opened.load(); seen < n; seen = opened.load())
      opened.wait(seen);
    if (fail_at <= first) {
      error = make_error(Code::kUnreachable, "told to fail");
      return 0;
    }
    order.push_back(&shard);
    return end - first;
  }
  [[nodiscard]] std::uint32_t window_slices() const noexcept override { return 1; }

  // Lets `n` more windows pass.
  void open(std::uint32_t n) {
    opened.fetch_add(n);
    opened.notify_all();
  }
  void wait_for_window(std::uint32_t n) {
    for (std::uint32_t seen = running.load(); seen < n; seen = running.load())
      running.wait(seen);
  }
  std::atomic<std::uint32_t> running{0};
  std::atomic<std::uint32_t> opened{0};
  std::uint32_t fail_at = ~0u;
  std::vector<const Shard*> order;  // of the thread that copies
};

// A shard of `n` slices of one byte each to nowhere: GatedCopier touches none.
void make_slices(TestShard& shard, std::uint32_t n) {
  shard.slices.resize(n);
  for (Slice& slice : shard.slices)
    slice.length = 1;
}

TEST(CopyRail, RunsSmallShardsInTheCallerAndStartsNoThread) {
  const std::size_t threads = testing::running_threads();
  GatedCopier copier;
  copier.open(100);
  CopyRail rail({.inline_bytes = 64});
  CopyPort port(rail, copier);
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  make_slices(shard, 64);
  ASSERT_TRUE(port.post(shard.ready()).ok());
  EXPECT_EQ(sink.outcome(shard.shard).finished, 1) << "before post() returned";
  EXPECT_EQ(testing::running_threads(), threads);
}

TEST(CopyRail, SmallShardsQueueBehindWaitingOnes) {
  GatedCopier copier;
  CopyRail rail({.inline_bytes = 1});
  CopyPort port(rail, copier);
  TestSink sink;
  TestShard running(Op::kWrite, sink);
  TestShard waiting(Op::kWrite, sink);
  TestShard small(Op::kWrite, sink);
  make_slices(running, 2);
  make_slices(waiting, 2);
  make_slices(small, 1);
  ASSERT_TRUE(port.post(running.ready()).ok());
  copier.wait_for_window(1);
  ASSERT_TRUE(port.post(waiting.ready()).ok());
  ASSERT_TRUE(port.post(small.ready()).ok());
  EXPECT_EQ(sink.outcome(small.shard).finished, 0);
  EXPECT_EQ(port.queued_bytes(), 5u);
  copier.open(5);
  ASSERT_TRUE(sink.wait_all());
  EXPECT_EQ(copier.order.front(), &running.shard);
  EXPECT_EQ(port.queued_bytes(), 0u);
}

TEST(CopyRail, RefusesMoreThanItsQueueHolds) {
  GatedCopier copier;
  CopyRail rail({.queue_shards = 2, .inline_bytes = 0});
  CopyPort port(rail, copier);
  TestSink sink;
  std::vector<std::unique_ptr<TestShard>> shards;
  for (int i = 0; i < 4; ++i) {
    shards.push_back(std::make_unique<TestShard>(Op::kWrite, sink));
    make_slices(*shards.back(), 1);
  }
  ASSERT_TRUE(port.post(shards[0]->ready()).ok());
  copier.wait_for_window(1);
  ASSERT_TRUE(port.post(shards[1]->ready()).ok());
  ASSERT_TRUE(port.post(shards[2]->ready()).ok());
  const auto full = port.post(shards[3]->ready());
  EXPECT_EQ(full.code(), Code::kWouldBlock);
  EXPECT_EQ(full.error().retry, Retry::kLater);
  copier.open(4);
  ASSERT_TRUE(sink.wait(shards[2]->shard));
  ASSERT_TRUE(port.post(shards[3]->shard).ok());
  EXPECT_TRUE(sink.wait_all());
}

TEST(CopyRail, CancelReachesAWaitingShardWhileAnotherRuns) {
  GatedCopier copier;
  CopyRail rail({.inline_bytes = 0});
  CopyPort port(rail, copier);
  TestSink sink;
  TestShard running(Op::kWrite, sink);
  TestShard waiting(Op::kWrite, sink);
  make_slices(running, 3);
  make_slices(waiting, 3);
  ASSERT_TRUE(port.post(running.ready()).ok());
  copier.wait_for_window(1);
  ASSERT_TRUE(port.post(waiting.ready()).ok());
  waiting.stop = true;
  port.cancel(waiting.shard);
  copier.open(1);  // the first window of the running shard ends: the rail looks around
  ASSERT_TRUE(sink.wait(waiting.shard));
  EXPECT_EQ(sink.outcome(waiting.shard).error->code, Code::kCancelled);
  EXPECT_EQ(sink.outcome(running.shard).finished, 0) << "it does not have to wait for the other";
  copier.open(2);
  ASSERT_TRUE(sink.wait(running.shard));
  EXPECT_FALSE(sink.outcome(running.shard).error);
}

TEST(CopyRail, SeverOfOnePortLeavesTheOthersOfTheRailAlone) {
  GatedCopier copier;
  CopyRail rail({.inline_bytes = 0});
  CopyPort first(rail, copier);
  CopyPort second(rail, copier);
  TestSink sink;
  TestShard a(Op::kWrite, sink);
  TestShard b(Op::kWrite, sink);
  TestShard c(Op::kWrite, sink);
  for (TestShard* const shard : {&a, &b, &c})
    make_slices(*shard, 4);
  ASSERT_TRUE(first.post(a.ready()).ok());
  copier.wait_for_window(1);
  ASSERT_TRUE(first.post(b.ready()).ok());
  ASSERT_TRUE(second.post(c.ready()).ok());
  first.sever(make_error(Code::kPeerLost, "gone"));
  copier.open(1 + 4);
  ASSERT_TRUE(sink.wait_all());
  EXPECT_EQ(sink.outcome(a.shard).error->code, Code::kPeerLost);
  EXPECT_EQ(sink.outcome(a.shard).slices_done, 1u);
  EXPECT_EQ(sink.outcome(b.shard).slices_done, 0u);
  EXPECT_FALSE(sink.outcome(c.shard).error);
}

TEST(CopyRail, AnErrorKeepsTheCountOfThePrefix) {
  GatedCopier copier;
  copier.open(100);
  copier.fail_at = 3;
  CopyRail rail({.inline_bytes = 100});
  CopyPort port(rail, copier);
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  make_slices(shard, 9);
  ASSERT_TRUE(port.post(shard.ready()).ok());
  const auto outcome = sink.outcome(shard.shard);
  EXPECT_EQ(outcome.error->code, Code::kUnreachable);
  EXPECT_EQ(outcome.slices_done, 3u);
  EXPECT_EQ(outcome.bytes, 3u);
}

// A sink that only counts: TestSink allocates.
class CountingSink final : public ShardSink {
 public:
  void shard_progress(Shard&, std::uint64_t n) noexcept override { bytes += n; }
  void shard_finished(Shard&, const Error* error) noexcept override {
    failed += error != nullptr;
    finished.fetch_add(1, std::memory_order_release);
  }
  std::atomic<std::uint64_t> finished{0};
  std::uint64_t bytes = 0;
  std::uint64_t failed = 0;
};

class MemoryCopier final : public SliceCopier {
 public:
  std::optional<Error> check(const Shard& shard) noexcept override { return check_bounds(shard); }
  std::uint32_t copy(const Shard& shard, std::uint32_t first, std::uint32_t end,
                     std::optional<Error>&) noexcept override {
    return copy_mapped(shard, first, end, std::nullopt);
  }
};

TEST(CopyRail, AllocatesNothingPerShardOrSlice) {
#if !defined(CROSSDOCK_COUNTS_ALLOCATIONS)
  GTEST_SKIP() << "the sanitizer owns operator new";
#endif
  constexpr std::size_t kSlices = 512;
  std::vector<std::byte> from(kSlices * 64);
  std::vector<std::byte> to(kSlices * 64);
  RemoteRegion region;
  region.address = reinterpret_cast<std::uint64_t>(to.data());
  region.length = to.size();
  std::vector<Slice> slices;
  for (std::size_t i = 0; i < kSlices; ++i)
    slices.push_back({.local = from.data() + i * 64,
                      .remote = region.address + (kSlices - 1 - i) * 64,
                      .region = &region,
                      .length = 64});
  MemoryCopier copier;
  for (const std::uint64_t inline_bytes : {std::uint64_t{1} << 20, std::uint64_t{0}}) {
    CopyRail rail({.inline_bytes = inline_bytes});
    CopyPort port(rail, copier);
    CountingSink sink;
    Shard shard;
    shard.sink = &sink;
    shard.slices = slices;
    shard.bytes = from.size();
    shard.deadline = Deadline::in(std::chrono::seconds(60));
    std::uint64_t before = 0;
    for (std::uint64_t i = 0; i < 200; ++i) {
      if (i == 1) before = allocations;  // the first post may start the thread
      ASSERT_TRUE(port.post(shard).ok());
      while (sink.finished.load(std::memory_order_acquire) != i + 1)
        std::this_thread::yield();
    }
    EXPECT_EQ(allocations, before);
    EXPECT_EQ(sink.failed, 0u);
    EXPECT_EQ(sink.bytes, 200 * from.size());
  }
}

TEST(CopyRail, UsesNoCpuAtRest) {
  GatedCopier copier;
  copier.open(1000);
  CopyRail rail({.inline_bytes = 0});
  CopyPort port(rail, copier);
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  make_slices(shard, 10);
  ASSERT_TRUE(port.post(shard.ready()).ok());
  ASSERT_TRUE(sink.wait(shard.shard));
  // The thread goes to sleep soon after its last shard; then no more time is used.
  const Deadline end = Deadline::in(std::chrono::seconds(10));
  // Of all threads but this one. Two clocks read one after the other: it can be a little below 0.
  const auto others_ns = [] {
    return static_cast<std::int64_t>(base::process_cpu_ns() - base::thread_cpu_ns());
  };
  std::int64_t used = 0;
  do {
    const std::int64_t before = others_ns();
    const Deadline pause = Deadline::in(std::chrono::milliseconds(50));
    while (!pause.passed())
      std::this_thread::sleep_until(pause.when());  // watching for idleness takes time to pass
    used = others_ns() - before;
  } while (used > 100'000 && !end.passed());
  EXPECT_LE(used, 100'000) << "ns of CPU in 50 ms at rest";
}

TEST(CopyBytes, StreamsExactBytesAtEveryAlignmentByEveryVariant) {
  std::vector<std::byte> from(80 << 10);
  testing::fill_pattern(from, 3);
  for (const StreamingCopy copy : streaming_copies()) {
    for (const std::size_t bytes : {0, 1, 63, 64, 65, 127, 4096, 16384, 16385, 70001}) {
      for (std::size_t shift = 0; shift < 66; shift += 13) {
        std::vector<std::byte> to(bytes + 200, std::byte{0xCC});
        copy(to.data() + shift, from.data() + 7, bytes);
        finish_streaming();
        ASSERT_EQ(std::memcmp(to.data() + shift, from.data() + 7, bytes), 0)
            << bytes << " " << shift;
        ASSERT_EQ(to[shift + bytes], std::byte{0xCC});
        ASSERT_TRUE(shift == 0 || to[shift - 1] == std::byte{0xCC});
      }
    }
  }
}

// What copying one slice after the other gives.
void copy_in_order(const Shard& shard) {
  for (const Slice& slice : shard.slices) {
    auto* const remote = reinterpret_cast<std::byte*>(slice.remote);
    const bool write = shard.op == Op::kWrite;
    std::memmove(write ? remote : slice.local, write ? slice.local : remote, slice.length);
  }
}

// Pieces of a few pages in another order at the far end: of one length and mixed, on lines of the
// cache and off them.
TEST(CopyMapped, ScatteredPiecesOfEveryKindAreWhole) {
  std::mt19937 random(7);
  for (const Op op : {Op::kWrite, Op::kRead})
    for (const std::uint32_t bytes : {4096u, 4160u, 4100u, 8192u, 12288u, 16384u})
      for (const std::size_t shift : {0u, 32u})
        for (const bool mixed : {false, true}) {
          const std::size_t count = kStreamingBytes / bytes + 7;
          std::vector<std::byte> local(count * bytes + 256), far(count * bytes + 256);
          testing::fill_pattern(local, 1);
          testing::fill_pattern(far, 2);
          std::vector<std::size_t> order(count);
          std::iota(order.begin(), order.end(), 0u);
          std::shuffle(order.begin(), order.end(), random);
          TestSink sink;
          TestShard shard(op, sink);
          for (std::size_t i = 0; i < count; ++i) {
            Slice slice;
            slice.local = local.data() + shift + i * bytes;
            slice.remote = reinterpret_cast<std::uintptr_t>(far.data()) + shift + order[i] * bytes;
            slice.length = mixed && i % 6 == 5 ? bytes - 64 : bytes;
            shard.slices.push_back(slice);
          }
          Shard& ready = shard.ready();
          const auto local_before = local, far_before = far;
          const auto n = static_cast<std::uint32_t>(count);
          ASSERT_EQ(copy_mapped(ready, 0, n, std::nullopt), n);
          const auto local_after = local, far_after = far;
          local = local_before, far = far_before;
          copy_in_order(ready);
          EXPECT_TRUE(local == local_after && far == far_after)
              << bytes << " bytes, shifted by " << shift << (mixed ? ", mixed" : "");
        }
}

// Where a piece is read after another was written to its place, order decides.
TEST(CopyMapped, PiecesThatTouchEachOtherAreCopiedInTheirOrder) {
  constexpr std::size_t kPage = 4096, kCount = kStreamingBytes / kPage + 4;
  std::vector<std::byte> memory((kCount + 1) * kPage);
  testing::fill_pattern(memory, 5);
  TestSink sink;
  TestShard shard(Op::kWrite, sink);
  for (std::size_t i = 0; i < kCount; ++i) {
    Slice slice;
    slice.local = memory.data() + i * kPage;
    slice.remote = reinterpret_cast<std::uintptr_t>(memory.data() + (i + 1) * kPage);
    slice.length = kPage;
    shard.slices.push_back(slice);
  }
  Shard& ready = shard.ready();
  const auto before = memory;
  ASSERT_EQ(copy_mapped(ready, 0, kCount, std::nullopt), kCount);
  const auto after = memory;
  memory = before;
  copy_in_order(ready);
  EXPECT_TRUE(memory == after);
}

}  // namespace
}  // namespace crossdock::transport
