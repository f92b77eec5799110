// Two tcp transports in one process, joined by real loopback connections: data arrives where it
// shall, from many threads, in both directions, and ends cleanly.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <random>
#include <thread>

#include "transport/tcp/transport.hpp"
#include "unit/transport/tcp_support.hpp"

namespace crossdock::transport::tcp::test {
namespace {

struct Side {
  mem::RegionTable regions;
  std::unique_ptr<TcpTransport> transport;
  Side(std::uint64_t instance, const TcpOptions& options) {
    TransportContext context;
    context.regions = &regions;
    context.instance = instance;
    transport = std::make_unique<TcpTransport>(context, options);
  }
};

class TcpTransportTest : public ::testing::Test {
 protected:
  void make(const TcpOptions& options = {}) {
    a_ = std::make_unique<Side>(1, options);
    b_ = std::make_unique<Side>(2, options);
  }
  std::unique_ptr<Endpoint> connect(Side& from, Side& to, std::uint32_t rail = 0,
                                    std::uint64_t from_instance = 1) {
    PeerInfo peer;
    peer.name = "target";
    peer.dial = [&, from_instance](std::uint16_t lane, Deadline) -> Result<base::UniqueFd> {
      SocketPair pair = tcp_pair();
      CROSSDOCK_CHECK_OK(
          to.transport->accept({std::move(pair.target), "initiator", from_instance, lane}));
      return std::move(pair.initiator);
    };
    auto endpoint = from.transport->connect(peer, rail, in_seconds(5));
    EXPECT_TRUE(endpoint.ok()) << endpoint.error().describe();
    return std::move(endpoint).value();
  }
  static void expose(Side& side, std::span<std::byte> memory,
                     transfer::Access access = transfer::Access::kRemoteReadWrite) {
    const mem::NewRegion region{memory.data(), memory.size(), {}};
    ASSERT_TRUE(side.regions.add({&region, 1}, {.access = access, .label = {}}).ok());
  }
  std::unique_ptr<Side> a_;
  std::unique_ptr<Side> b_;
};

TEST_F(TcpTransportTest, WritesThenReadsBackEverySize) {
  make();
  std::vector<std::byte> source(9 << 20), target(9 << 20), back(9 << 20);
  fill_pattern(source, 1);
  expose(*b_, target);
  auto endpoint = connect(*a_, *b_);
  for (const std::size_t size : {1u, 63u, 64u, 4096u, 32768u, 32769u, 1u << 20, (9u << 20)}) {
    std::fill(target.begin(), target.end(), std::byte{0});
    WaitingSink sink;
    OwnedShard write;
    write.add(source.data(), target.data(), size);
    ASSERT_TRUE(endpoint->post(write.make(Op::kWrite, sink)).ok());
    ASSERT_TRUE(sink.wait(1));
    ASSERT_FALSE(sink.error(0)) << sink.error(0)->describe();
    EXPECT_EQ(sink.progress(), size);
    EXPECT_EQ(write.shard.slices_done, 1u);
    EXPECT_TRUE(std::equal(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(size),
                           source.begin()));
    EXPECT_TRUE(size == target.size() || target[size] == std::byte{0});
    OwnedShard read;
    read.add(back.data(), target.data(), size);
    ASSERT_TRUE(endpoint->post(read.make(Op::kRead, sink)).ok());
    ASSERT_TRUE(sink.wait(2));
    ASSERT_FALSE(sink.error(1)) << sink.error(1)->describe();
    EXPECT_TRUE(
        std::equal(back.begin(), back.begin() + static_cast<std::ptrdiff_t>(size), source.begin()));
  }
  EXPECT_EQ(endpoint->queued_bytes(), 0u);
}

// Pages in random order, both directions, several lanes and threads at once.
TEST_F(TcpTransportTest, ScattersPagesFromManyThreads) {
  TcpOptions options;
  options.lanes = 3;
  options.window_bytes = 1 << 20;
  make(options);
  constexpr std::size_t kPages = 512, kPage = 4096, kThreads = 6, kShard = 37;
  std::vector<std::byte> source(kThreads * kPages * kPage), target(source.size());
  std::vector<std::byte> back(source.size());
  fill_pattern(source, 7);
  expose(*b_, target);
  std::vector<std::unique_ptr<Endpoint>> rails;
  for (std::uint32_t i = 0; i < options.lanes; ++i)
    rails.push_back(connect(*a_, *b_, i));

  auto move = [&](std::size_t thread, Op op, std::vector<std::byte>& local) {
    std::vector<std::size_t> order(kPages);
    for (std::size_t i = 0; i < kPages; ++i)
      order[i] = thread * kPages + i;
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(thread)));
    WaitingSink sink;
    std::vector<std::unique_ptr<OwnedShard>> shards;
    for (std::size_t i = 0; i < kPages; i += kShard) {
      auto& shard = shards.emplace_back(std::make_unique<OwnedShard>());
      for (std::size_t k = i; k < std::min(i + kShard, kPages); ++k)
        shard->add(local.data() + order[k] * kPage, target.data() + order[k] * kPage, kPage);
      ASSERT_TRUE(rails[shards.size() % rails.size()]->post(shard->make(op, sink)).ok());
    }
    ASSERT_TRUE(sink.wait(shards.size()));
    for (std::size_t i = 0; i < shards.size(); ++i)
      ASSERT_FALSE(sink.error(i)) << sink.error(i)->describe();
  };
  for (const Op op : {Op::kWrite, Op::kRead}) {
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] { move(t, op, op == Op::kWrite ? source : back); });
    for (auto& t : threads)
      t.join();
  }
  EXPECT_TRUE(target == source);
  EXPECT_TRUE(back == source);
}

TEST_F(TcpTransportTest, RefusesWhatIsNotRegisteredAndGoesOn) {
  make();
  std::vector<std::byte> source(1 << 20), target(1 << 20), secret(4096), fixed(4096);
  fill_pattern(source, 3);
  expose(*b_, target);
  expose(*b_, fixed, transfer::Access::kRemoteRead);
  const std::vector<std::byte> untouched = target;
  auto endpoint = connect(*a_, *b_);
  WaitingSink sink;
  OwnedShard outside, past_end, read_only, mixed, secret_read, good;
  outside.add(source.data(), secret.data(), 4096);
  past_end.add(source.data(), target.data() + target.size() - 100, 101);
  read_only.add(source.data(), fixed.data(), 10);
  mixed.add(source.data(), target.data(), 512 << 10);  // the good part must not be written either
  mixed.add(source.data(), secret.data(), 4096);
  secret_read.add(source.data(), secret.data(), 4096);
  good.add(source.data(), target.data(), target.size());
  ASSERT_TRUE(endpoint->post(outside.make(Op::kWrite, sink)).ok());
  ASSERT_TRUE(endpoint->post(past_end.make(Op::kWrite, sink)).ok());
  ASSERT_TRUE(endpoint->post(read_only.make(Op::kWrite, sink)).ok());
  ASSERT_TRUE(endpoint->post(mixed.make(Op::kWrite, sink)).ok());
  ASSERT_TRUE(endpoint->post(secret_read.make(Op::kRead, sink)).ok());
  ASSERT_TRUE(sink.wait(5));
  EXPECT_EQ(sink.error(0)->code, Code::kInvalidArgument);
  EXPECT_NE(sink.error(0)->message.find("target"), std::string::npos);
  EXPECT_EQ(sink.error(1)->code, Code::kInvalidArgument);
  EXPECT_EQ(sink.error(2)->code, Code::kDenied);
  EXPECT_EQ(sink.error(3)->code, Code::kInvalidArgument);
  EXPECT_EQ(sink.error(4)->code, Code::kInvalidArgument);
  EXPECT_EQ(sink.progress(), 0u);
  EXPECT_TRUE(target == untouched);
  ASSERT_TRUE(endpoint->post(good.make(Op::kWrite, sink)).ok());
  ASSERT_TRUE(sink.wait(6));
  EXPECT_FALSE(sink.error(5)) << sink.error(5)->describe();
  EXPECT_TRUE(target == source);
}

TEST_F(TcpTransportTest, SeverInboundEndsTheLanesOfOneInstance) {
  make();
  std::vector<std::byte> source(64 << 10), target(64 << 10);
  expose(*b_, target);
  auto first = connect(*a_, *b_, 0, 1);
  auto other = connect(*a_, *b_, 0, 77);
  EXPECT_TRUE(b_->transport->sever_inbound(1));
  EXPECT_TRUE(b_->transport->sever_inbound(12345));  // nobody
  WaitingSink sink;
  OwnedShard lost, fine;
  lost.add(source.data(), target.data(), source.size());
  fine.add(source.data(), target.data(), source.size());
  if (first->post(lost.make(Op::kWrite, sink)).ok()) {
    ASSERT_TRUE(sink.wait(1));
    EXPECT_EQ(sink.error(0)->code, Code::kPeerLost);
    EXPECT_NE(sink.error(0)->message.find("target"), std::string::npos);
  }
  WaitingSink sink2;
  ASSERT_TRUE(other->post(fine.make(Op::kWrite, sink2)).ok());
  ASSERT_TRUE(sink2.wait(1));
  EXPECT_FALSE(sink2.error(0));
  EXPECT_TRUE(eventually([&] {
    OwnedShard more;
    more.add(source.data(), target.data(), 1);
    WaitingSink s;
    const auto posted = first->post(more.make(Op::kWrite, s));
    return posted.ok() ? !s.wait(1) : posted.code() == Code::kPeerLost;
  }));
}

// What was sent on a lane must not arrive once its successor is welcomed.
TEST_F(TcpTransportTest, RetireLaneEndsTheLaneOfThatNumberOnly) {
  make();
  std::vector<std::byte> source(64 << 10), target(64 << 10);
  expose(*b_, target);
  auto old = connect(*a_, *b_, 0, 1);
  auto next = connect(*a_, *b_, 1, 1);
  auto other = connect(*a_, *b_, 0, 77);
  b_->transport->retire_lane(1, 0);
  b_->transport->retire_lane(5, 0);  // nobody
  for (auto* endpoint : {next.get(), other.get()}) {
    WaitingSink sink;
    OwnedShard fine;
    fine.add(source.data(), target.data(), source.size());
    ASSERT_TRUE(endpoint->post(fine.make(Op::kWrite, sink)).ok());
    ASSERT_TRUE(sink.wait(1));
    EXPECT_FALSE(sink.error(0));
  }
  WaitingSink sink;
  OwnedShard lost;
  lost.add(source.data(), target.data(), source.size());
  const auto posted = old->post(lost.make(Op::kWrite, sink));
  if (!posted.ok()) {
    EXPECT_EQ(posted.code(), Code::kPeerLost);
  } else {
    ASSERT_TRUE(sink.wait(1));
    EXPECT_EQ(sink.error(0)->code, Code::kPeerLost);
  }
}

// A thousand connections come and go without leaving descriptors behind.
TEST_F(TcpTransportTest, ReconnectingLeaksNoDescriptor) {
  make();
  std::vector<std::byte> source(64), target(64);
  expose(*b_, target);
  const auto descriptors = [] { return ::dup(0); };  // the lowest free number, then closed
  connect(*a_, *b_).reset();
  for (int i = 0; i < 1000; ++i) {
    auto endpoint = connect(*a_, *b_);
    WaitingSink sink;
    OwnedShard shard;
    shard.add(source.data(), target.data(), 64);
    ASSERT_TRUE(endpoint->post(shard.make(Op::kWrite, sink)).ok());
    ASSERT_TRUE(sink.wait(1));
    ASSERT_FALSE(sink.error(0));
  }
  EXPECT_TRUE(eventually([&] {
    const base::UniqueFd lowest(descriptors());
    return lowest.get() < 40;
  }));
}

TEST_F(TcpTransportTest, AtRestItsThreadsUseNoCpu) {
  TcpOptions options;
  options.spin = std::chrono::microseconds(50);
  make(options);
  std::vector<std::byte> source(64), target(64);
  expose(*b_, target);
  auto endpoint = connect(*a_, *b_);
  WaitingSink sink;
  OwnedShard shard;
  shard.add(source.data(), target.data(), 64);
  ASSERT_TRUE(endpoint->post(shard.make(Op::kWrite, sink)).ok());
  ASSERT_TRUE(sink.wait(1));
  ::poll(nullptr, 0, 20);
  timespec before{}, after{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  ::poll(nullptr, 0, 300);  // the time span that is measured, not a synchronisation
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const auto used_us =
      (after.tv_sec - before.tv_sec) * 1000000 + (after.tv_nsec - before.tv_nsec) / 1000;
  EXPECT_LT(used_us, 3000);
}

}  // namespace
}  // namespace crossdock::transport::tcp::test
