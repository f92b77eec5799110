// Cutting shards into frames, and what becomes of them: pure bookkeeping, no sockets.
// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/shard_queue.hpp"
#include "unit/transport/tcp_support.hpp"

namespace crossdock::transport::tcp::test {
namespace {

class TcpShardQueue : public ::testing::Test {
 protected:
  ShardQueue make(std::uint32_t frame, std::uint64_t window) {
    TcpOptions options;
    options.frame_bytes = frame;
    options.window_bytes = window;
    return ShardQueue(options, "peer");
  }
  Shard& shard(OwnedShard& owned, std::size_t slices, std::uint32_t length, Op op = Op::kWrite) {
    for (std::size_t i = 0; i < slices; ++i)
      owned.slices.push_back(
          {memory_.data() + i * 2 * length, 0x1000 + i * 2 * length, nullptr, length, 0});
    return owned.make(op, sink_);
  }
  std::vector<std::byte> memory_ = std::vector<std::byte>(8 << 20);
  WaitingSink sink_;
  SendBatch batch_;
  bool idle_ = false;
};

TEST_F(TcpShardQueue, CutsAtTheFrameSizeAndInsideASlice) {
  ShardQueue queue = make(1000, 1 << 20);
  OwnedShard owned;
  ASSERT_TRUE(queue.push(shard(owned, 3, 700), idle_).ok());
  EXPECT_TRUE(idle_);
  queue.cut(batch_, 1 << 20);
  EXPECT_EQ(queue.flight_frames(), 3u);
  EXPECT_EQ(queue.flight_bytes(), 2100u);
  const std::uint32_t bytes[] = {1000, 1000, 100};
  const std::uint32_t first[] = {0, 1, 2};
  const std::uint32_t offset[] = {0, 300, 600};
  const std::uint32_t end[] = {1, 2, 3};
  std::uint64_t stream = 0;
  for (std::uint64_t i = 0; i < 3; ++i) {
    const FlightRecord record = *queue.oldest();
    EXPECT_EQ(record.request_id, i);
    EXPECT_EQ(record.bytes, bytes[i]);
    EXPECT_EQ(record.first_slice, first[i]);
    EXPECT_EQ(record.first_offset, offset[i]);
    EXPECT_EQ(record.slices_end, end[i]);
    stream += wire::data_head_bytes((i == 2 ? 1 : 2) * wire::kDescriptorBytes) + bytes[i];
    EXPECT_EQ(record.stream_end, stream);
    queue.settle(std::nullopt);
    EXPECT_EQ(owned.shard.slices_done, end[i]);
  }
  EXPECT_EQ(batch_.pieces.bytes(), stream);
  EXPECT_EQ(queue.take_done(), &owned.shard);
  EXPECT_EQ(ShardQueue::take_error(owned.shard), nullptr);
  EXPECT_EQ(queue.take_done(), nullptr);
}

TEST_F(TcpShardQueue, NeverMoreDescriptorsThanOneCallTakes) {
  ShardQueue queue = make(1 << 20, 1 << 20);
  OwnedShard owned;
  ASSERT_TRUE(queue.push(shard(owned, 5000, 16), idle_).ok());
  std::size_t bytes = 0;
  while (true) {
    batch_.clear();
    queue.cut(batch_, 1 << 20);
    if (batch_.empty()) break;
    EXPECT_LE(batch_.pieces.size(), kMaxIov);
    while (const auto record = queue.oldest()) {
      bytes += record->bytes;
      queue.settle(std::nullopt);
    }
  }
  EXPECT_EQ(bytes, 5000u * 16u);
  EXPECT_EQ(owned.shard.slices_done, 5000u);
}

TEST_F(TcpShardQueue, ManySmallShardsShareABatch) {
  ShardQueue queue = make(1 << 20, 1 << 20);
  std::vector<OwnedShard> owned(20);
  for (auto& o : owned)
    ASSERT_TRUE(queue.push(shard(o, 1, 64), idle_).ok());
  EXPECT_FALSE(idle_);
  queue.cut(batch_, 1 << 20);
  EXPECT_EQ(queue.flight_frames(), 20u);
  EXPECT_EQ(batch_.payload_bytes, 20u * 64u);
}

TEST_F(TcpShardQueue, TheWindowHoldsBackAndAlwaysLetsOneThrough) {
  ShardQueue queue = make(1000, 10);
  OwnedShard owned;
  ASSERT_TRUE(queue.push(shard(owned, 3, 1000), idle_).ok());
  queue.cut(batch_, 1 << 20);
  EXPECT_EQ(queue.flight_frames(), 1u);
  EXPECT_FALSE(queue.sendable());
  queue.settle(std::nullopt);
  EXPECT_TRUE(queue.sendable());
}

TEST_F(TcpShardQueue, ARangeThatWrapsFailsItsShardOnly) {
  ShardQueue queue = make(1000, 1 << 20);
  OwnedShard bad, good;
  bad.slices.push_back({memory_.data(), UINT64_MAX - 3, nullptr, 100, 0});
  ASSERT_TRUE(queue.push(bad.make(Op::kWrite, sink_), idle_).ok());
  ASSERT_TRUE(queue.push(shard(good, 1, 100), idle_).ok());
  queue.cut(batch_, 1 << 20);
  EXPECT_EQ(queue.flight_frames(), 1u);
  EXPECT_EQ(batch_.pieces.bytes(), wire::data_head_bytes(wire::kDescriptorBytes) + 100);
  ASSERT_EQ(queue.take_done(), &bad.shard);
  EXPECT_EQ(ShardQueue::take_error(bad.shard)->code, Code::kInvalidArgument);
}

TEST_F(TcpShardQueue, SweepTakesTheStoppedOnesOutOfTheMiddle) {
  ShardQueue queue = make(1000, 1 << 20);
  std::vector<OwnedShard> owned(4);
  for (auto& o : owned)
    ASSERT_TRUE(queue.push(shard(o, 1, 100), idle_).ok());
  owned[1].stop = true;
  owned[3].stop = true;
  queue.sweep();
  for (const std::size_t i : {1u, 3u})
    EXPECT_EQ(ShardQueue::take_error(owned[i].shard)->code, Code::kCancelled);
  Shard* done = queue.take_done();
  ASSERT_EQ(done, &owned[1].shard);
  ASSERT_EQ(done->next, &owned[3].shard);
  OwnedShard more;
  ASSERT_TRUE(queue.push(shard(more, 1, 50), idle_).ok());
  queue.cut(batch_, 1 << 20);
  EXPECT_EQ(queue.flight_bytes(), 250u);
}

TEST_F(TcpShardQueue, CloseGivesEveryShardTheFirstReason) {
  ShardQueue queue = make(100, 200);
  std::vector<OwnedShard> owned(3);
  for (auto& o : owned)
    ASSERT_TRUE(queue.push(shard(o, 4, 100), idle_).ok());
  queue.cut(batch_, 1 << 20);
  EXPECT_EQ(queue.flight_frames(), 2u);
  queue.refuse(make_error(Code::kPeerLost, "first"));
  queue.refuse(make_error(Code::kClosed, "second"));
  queue.close();
  std::size_t over = 0;
  for (Shard* s = queue.take_done(); s != nullptr; ++over) {
    Shard& shard = *s;
    s = s->next;
    EXPECT_EQ(ShardQueue::take_error(shard)->message, "first");
    EXPECT_EQ(shard.in_doubt, &shard == &owned[0].shard) << "nothing of the others was sent";
  }
  EXPECT_EQ(over, 3u);
  EXPECT_EQ(queue.queued_bytes(), 0u);
  OwnedShard late;
  EXPECT_EQ(queue.push(shard(late, 1, 1), idle_).code(), Code::kPeerLost);
}

}  // namespace
}  // namespace crossdock::transport::tcp::test
