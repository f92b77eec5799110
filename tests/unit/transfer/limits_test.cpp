// Bounds of the engine: transfers in flight, full queues, connections, descriptors; and what a
// failure leaves behind.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>
#include <utility>

#include "support/engines.hpp"
#include "support/process_use.hpp"

namespace crossdock::testing {
namespace {

// No more descriptors than now while it lives.
class NoMoreDescriptors {
 public:
  NoMoreDescriptors() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &old_), 0);
    // The listing itself takes one, which is free again afterwards.
    const rlimit tight{open_descriptors() - 1, old_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  }
  ~NoMoreDescriptors() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &old_), 0); }
  NoMoreDescriptors(const NoMoreDescriptors&) = delete;
  NoMoreDescriptors& operator=(const NoMoreDescriptors&) = delete;

 private:
  rlimit old_{};
};

TEST(Limits, SoManyTransfersMayBeInFlight) {
  EngineOptions options{
      .config = {{"transfer.max_pending", "4"}, {"transport.faulty.delay_max", "1min"}}};
  Pair pair("faulty+shm", 1 << 20, false, std::move(options));
  const std::vector<Request> batch{pair.write(0, 4096)};
  std::vector<Transfer> transfers;
  for (int i = 0; i < 4; ++i)
    transfers.push_back(
        pair.source.submit(pair.peer, batch, {.deadline = Deadline::in(10min)}).value());
  const auto refused = pair.source.submit(pair.peer, batch, {});
  ASSERT_EQ(refused.code(), Code::kWouldBlock);
  EXPECT_EQ(refused.error().retry, Retry::kLater);
  EXPECT_NE(refused.error().message.find("transfer.max_pending"), std::string::npos);
  transfers.front().cancel();
  EXPECT_EQ(transfers.front().wait(soon()).code(), Code::kCancelled);
  EXPECT_TRUE(pair.source.submit(pair.peer, batch, {.deadline = Deadline::in(1ms)}).ok());
}

// More shards than the rails' queues hold: they wait their turn, the caller does not notice.
TEST(Limits, AFullQueueIsWaitedOut) {
  EngineOptions options{.config = {{"transport.tcp.queue_shards", "16"},
                                   {"transfer.slice_bytes", "4KiB"},
                                   {"transfer.shard_bytes", "64KiB"}}};
  constexpr std::size_t kBytes = 64 << 20;
  Pair pair("tcp", kBytes, false, std::move(options));
  fill_pattern(pair.source_memory.data(), kBytes, 1);
  const auto result = pair.run({pair.write(0, kBytes)}, {.deadline = Deadline::in(60s)});
  ASSERT_TRUE(result.ok()) << result.error().describe();
  EXPECT_TRUE(has_pattern(pair.target_memory.data(), kBytes, 1));
  EXPECT_GT(metric(pair.source, "crossdock_shard_retries_total"), 0u) << "a queue was full";
  EXPECT_EQ(metric(pair.source, "crossdock_redials_total"), 0u) << "which is no fault of it";
}

TEST(Limits, TransfersOpenNoConnections) {
  Pair pair("tcp", 1 << 20);
  ASSERT_TRUE(pair.run({pair.write(0, 1 << 20)}).ok());
  const auto before = open_descriptors();
  for (int i = 0; i < 300; ++i)
    ASSERT_TRUE(pair.run({i % 2 == 0 ? pair.write(0, 1 << 16) : pair.read(0, 1 << 16)}).ok());
  EXPECT_EQ(open_descriptors(), before);
  EXPECT_EQ(metric(pair.source, "crossdock_peer_connects_total"), 1u);
  EXPECT_EQ(metric(pair.source, "crossdock_redials_total"), 0u);
}

// Two lanes and a control link to a peer, of which both ends lie in this process: they are made
// once, and neither load nor failures nor more handles add to them.
TEST(Limits, ConnectionsToAPeerAreFixedWhateverTheLoad) {
  constexpr std::size_t kThreads = 32, kEach = 64 << 10, kLinks = 3;
  std::vector<std::byte> from(kThreads * kEach), to(kThreads * kEach);
  auto target = make_engine("tcp");
  auto source = make_engine("tcp");
  auto local = source.register_memory(from.data(), from.size()).value();
  auto remote = target.register_memory(to.data(), to.size()).value();
  const std::size_t before = open_sockets();
  auto peer = source.open(target.name(), soon()).value();
  const auto write = [&](std::size_t offset, std::uint64_t to_address, std::size_t length) {
    const Request request{Op::kWrite, from.data() + offset, to_address, length};
    return source.transfer(peer, std::span(&request, 1), {.deadline = soon()});
  };
  ASSERT_TRUE(write(0, address_of(remote), from.size()).ok());
  const std::size_t fixed = open_sockets();
  EXPECT_EQ(fixed, before + 2 * kLinks);
  std::atomic<std::size_t> at_work{kThreads};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        const std::size_t offset = t * kEach;
        EXPECT_TRUE(write(offset, address_of(remote, offset), round % 2 == 0 ? 64 : kEach).ok());
        EXPECT_FALSE(write(offset, 8, 8).ok()) << "not in any region";
        EXPECT_TRUE(source.open(target.name(), soon()).ok());
      }
      at_work.fetch_sub(1);
    });
  std::size_t most = 0;
  while (at_work.load() != 0)
    most = std::max(most, open_sockets());
  for (auto& thread : threads)
    thread.join();
  EXPECT_LE(most, fixed);
  EXPECT_EQ(open_sockets(), fixed);
  EXPECT_EQ(metric(source, "crossdock_redials_total"), 0u);
}

// What 32 bits do not hold arrives whole: offsets into a region, and the length of one request.
TEST(Limits, MoreThanFourGibibytes) {
  constexpr std::size_t kBytes = std::size_t{9} << 30, kFar = std::size_t{5} << 30;
  // Pages get memory when they are touched, and few are.
  void* const memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  for (const std::string transport : {"shm", "tcp"}) {
    Pair pair(transport, 1 << 20);
    auto huge = pair.target.register_memory(memory, kBytes, {.label = "huge"}).value();
    ASSERT_TRUE(pair.peer.region("huge", soon()).ok());
    fill_pattern(pair.source_memory.data(), 1 << 20, 4);
    const Request far{Op::kWrite, pair.source_memory.data(), address_of(huge, kFar), 1 << 20};
    const auto moved = pair.source.transfer(pair.peer, std::span(&far, 1), {.deadline = soon()});
    ASSERT_TRUE(moved.ok()) << transport << ": " << moved.error().describe();
    EXPECT_TRUE(has_pattern(bytes_of(huge, kFar), 1 << 20, 4)) << transport;
    EXPECT_EQ(*bytes_of(huge, kFar & 0xffff'ffff), std::byte{0}) << transport;
    ASSERT_TRUE(huge.release(soon()).ok());
  }
  auto engine =
      make_engine("faulty+loopback", {.config = {{"transport.faulty.delay_max", "1min"}}});
  auto region = engine.register_memory(memory, kBytes).value();
  auto self = engine.open(engine.name(), soon()).value();
  const Request long_one{Op::kWrite, memory, address_of(region, kBytes / 2), kBytes / 2};
  auto transfer = engine.submit(self, std::span(&long_one, 1), {.deadline = Deadline::in(1h)});
  ASSERT_TRUE(transfer.ok()) << transfer.error().describe();
  EXPECT_EQ(transfer->status().bytes_total, kBytes / 2);
  transfer->cancel();
  EXPECT_EQ(transfer->wait(soon()).code(), Code::kCancelled);
  ASSERT_TRUE(region.release(soon()).ok());
  ::munmap(memory, kBytes);
}

// Memory that no peer maps is private, for which huge pages are easier to have.
TEST(Limits, OnlyWhatPeersMapIsSharedMemory) {
  for (const auto& [transports, mapped] : {std::pair{"tcp", 0U}, {"shm,tcp", 1U}}) {
    auto engine = make_engine(transports);
    const auto region = engine.allocate(1 << 20).value();
    EXPECT_EQ(mappings_of("memfd:crossdock-region"), mapped) << transports;
    EXPECT_EQ(*bytes_of(region, (1 << 20) - 1), std::byte{0});
  }
}

TEST(Limits, FailuresInFlightLeaveNothingBehind) {
  EngineOptions options{
      .config = {{"transport.faulty.fail_ppm", "1000000"}, {"transfer.max_retries", "1"}}};
  Pair pair("faulty+shm", 1 << 20, false, std::move(options));
  const auto fail = [&] {
    const auto until = soon();
    Result<> result;
    do
      result = pair.run({pair.write(0, 1 << 20), pair.read(0, 1 << 20)}, {.deadline = until});
    while (result.code() == Code::kUnreachable && result.error().scope == Scope::kPeer);
    ASSERT_EQ(result.code(), Code::kUnreachable) << result.error().describe();
  };
  for (int i = 0; i < 100; ++i)
    fail();
  const auto descriptors = open_descriptors();
  [[maybe_unused]] const auto kib = resident_kib();
  for (int i = 0; i < 200; ++i)
    fail();
  EXPECT_LE(open_descriptors(), descriptors + 4);
#if !defined(CROSSDOCK_SANITIZE_ADDRESS) && !defined(CROSSDOCK_SANITIZE_THREAD)
  EXPECT_LT(resident_kib(), kib + 4 * 1024);
#endif
  EXPECT_TRUE(pair.source.pending().empty());
  EXPECT_TRUE(pair.local.release(soon()).ok());
  EXPECT_TRUE(pair.remote.release(soon()).ok());
}

// 10,000 requests that touch are a few slices when merged, and more than one shard when not: each
// shard fails once and is tried again, those that come before the transfer has failed.
TEST(Limits, AdjacentRequestsAreMergedUnlessToldNotTo) {
  for (const bool merge : {true, false}) {
    EngineOptions options{.config = {{"transfer.merge", merge ? "true" : "false"},
                                     {"transport.faulty.fail_ppm", "1000000"},
                                     {"transfer.max_retries", "1"}}};
    Pair pair("faulty+shm", 1 << 20, false, std::move(options));
    std::vector<Request> batch;
    for (std::size_t i = 0; i < 10'000; ++i)
      batch.push_back(pair.write(16 * i, 16));
    const auto most = [&](std::uint64_t runs) {
      std::uint64_t tries = 0, before = 0;
      for (std::uint64_t i = 0; i < runs && tries < 2; ++i) {
        EXPECT_EQ(pair.run(batch).code(), Code::kUnreachable);
        const auto all = metric(pair.source, "crossdock_shard_retries_total");
        tries = std::max<std::uint64_t>(tries, all - std::exchange(before, all));
      }
      return tries;
    };
    if (merge)
      EXPECT_EQ(most(3), 1u);
    else
      EXPECT_GT(most(50), 1u);
  }
}

TEST(Limits, BothWaysOfMergingMoveTheSameBytes) {
  for (const char* merge : {"true", "false"}) {
    Pair pair("shm", 1 << 20, false, {.config = {{"transfer.merge", merge}}});
    fill_pattern(pair.source_memory.data(), 1 << 20, 2);
    std::vector<Request> batch;
    for (std::size_t i = 0; i < (1 << 20) / 64; ++i)
      batch.push_back(pair.write(64 * i, 64));
    ASSERT_TRUE(pair.run(batch).ok());
    EXPECT_TRUE(has_pattern(pair.target_memory.data(), 1 << 20, 2)) << merge;
  }
}

// The stages after the data see each shard's end once, however often it is reported.
TEST(Limits, DuplicateCompletionsReachNoLaterStage) {
  EngineOptions options{.config = {{"transport.faulty.duplicate_ppm", "1000000"},
                                   {"transport.faulty.reorder", "4"},
                                   {"transfer.shard_bytes", "64KiB"}}};
  Pair pair("faulty+shm", 1 << 20, false, std::move(options));
  auto mailbox = pair.target.mailbox("done").value();
  for (int round = 0; round < 20; ++round) {
    fill_pattern(pair.source_memory.data(), 1 << 20, static_cast<std::uint64_t>(round));
    TransferOptions both;
    both.checksum = true;
    both.notification = transfer::Notification{"done", std::to_string(round)};
    const auto result = pair.run({pair.write(0, 1 << 20)}, both);
    ASSERT_TRUE(result.ok()) << result.error().describe();
    EXPECT_EQ(mailbox.receive(soon()).value().payload, std::to_string(round));
  }
  EXPECT_FALSE(mailbox.try_receive().has_value()) << "one notification for each transfer";
}

TEST(Limits, OutOfDescriptorsInTheMiddleOfRedialsIsAnErrorAndPasses) {
  CROSSDOCK_SKIP_WITHOUT_DESCRIPTORS();
  EngineOptions options{.config = {{"transport.faulty.drop_ppm", "1000000"}}};
  Pair pair("faulty+tcp", 1 << 20, false, std::move(options));
  {
    const NoMoreDescriptors tight;
    for (int i = 0; i < 20; ++i) {
      const auto result = pair.run({pair.write(0, 1 << 20)}, {.deadline = Deadline::in(5s)});
      EXPECT_TRUE(result.ok() || result.error().retry != Retry::kNo) << result.error().describe();
    }
    EXPECT_TRUE(pair.source.pending().empty());
  }
  EXPECT_TRUE(pair.peer.alive()) << "the control connection needs no new descriptor";
  // The drops go on; what counts is that dialling works again.
  const auto before = metric(pair.source, "crossdock_redials_total");
  const auto until = soon();
  while (metric(pair.source, "crossdock_redials_total") == before && !until.passed())
    (void)pair.run({pair.write(0, 1 << 20)}, {.deadline = Deadline::in(5s)});
  EXPECT_GT(metric(pair.source, "crossdock_redials_total"), before);
}

}  // namespace
}  // namespace crossdock::testing
