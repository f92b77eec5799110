// Who is tried again and who is not: refusals, cut rails, other transports; and what is counted.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "support/engines.hpp"

namespace crossdock::testing {
namespace {

// The target refuses what still comes for a region that it releases. That is its verdict on those
// requests: nothing is dialled again, and transfers to its other regions notice nothing.
TEST(Retry, ARefusalIsNoFaultOfTheRails) {
  constexpr std::size_t kBytes = 8u << 20;
  constexpr std::size_t kPiece = 1u << 20;
  constexpr std::size_t kPieces = 48;
  std::vector<std::byte> memory(kPieces * kPiece);
  Pair pair("tcp", 2 * kBytes);
  std::atomic<bool> stop{false};
  std::atomic<int> delivered{0};
  std::thread others([&] {
    while (!stop.load()) {
      const auto result = pair.run({pair.write(0, kBytes)});
      EXPECT_TRUE(result.ok()) << result.error().describe();
      delivered.fetch_add(1);
    }
  });
  for (int round = 0; round < 12; ++round) {
    auto region =
        pair.target.register_memory(memory.data(), memory.size(), {.label = std::to_string(round)})
            .value();
    ASSERT_TRUE(pair.peer.region(std::to_string(round), soon()).ok());
    std::vector<Request> batch;
    for (std::size_t i = 0; i < kPieces; ++i)
      batch.push_back(
          {Op::kWrite, bytes_of(pair.local, kBytes), address_of(region) + i * kPiece, kPiece});
    auto transfer = pair.source.submit(pair.peer, batch, {.deadline = soon()}).value();
    while (transfer.status().bytes_done == 0 && !transfer::is_terminal(transfer.status().state))
      std::this_thread::yield();
    EXPECT_TRUE(region.release(soon()).ok());
    const auto result = transfer.wait(soon());
    EXPECT_TRUE(result.ok() || result.code() == Code::kClosed) << result.error().describe();
  }
  stop.store(true);
  others.join();
  EXPECT_GT(delivered.load(), 0);
  EXPECT_EQ(metric(pair.source, "crossdock_shard_retries_total"), 0u);
  EXPECT_EQ(metric(pair.source, "crossdock_redials_total"), 0u);
}

// A shard that fails takes its rails down, and with them the shards of others, however often: their
// tries are not used up by that.
TEST(Retry, ThoseWhoseRailsWereCutLoseNoTry) {
  EngineOptions options{
      .config = {{"transport.faulty.drop_ppm", "100000"}, {"transfer.max_retries", "100"}}};
  Pair pair("faulty+tcp", 4 << 20, false, std::move(options));
  int delivered = 0;
  for (std::uint64_t round = 0; round < 20; ++round) {
    fill_pattern(pair.source_memory.data(), 4 << 20, round);
    const auto until = soon();
    Result<> result;
    do
      result = pair.run({pair.write(0, 4 << 20)}, {.deadline = until});
    while (!result.ok() && result.error().retry == Retry::kLater && !until.passed());
    ASSERT_TRUE(result.ok()) << result.error().describe();
    ASSERT_TRUE(has_pattern(pair.target_memory.data(), 4 << 20, round));
    ++delivered;
  }
  EXPECT_EQ(delivered, 20);
  EXPECT_GT(metric(pair.source, "crossdock_shard_retries_total"), 0u);
  EXPECT_GT(metric(pair.source, "crossdock_redials_total"), 0u);
  EXPECT_EQ(metric(pair.source, "crossdock_fallbacks_total"), 0u);
}

TEST(Retry, FallbackGoesOnByTheNextTransportAndIsCounted) {
  EngineOptions options{.config = {{"transport.faulty.fail_ppm", "1000000"},
                                   {"transfer.max_retries", "1"},
                                   {"transfer.fallback", "true"}}};
  std::vector<std::byte> a(1 << 20), b(1 << 20);
  auto target = make_engine("shm,tcp");
  auto source = make_engine("faulty+shm,tcp", std::move(options));
  auto local = source.register_memory(a.data(), a.size()).value();
  auto remote = target.register_memory(b.data(), b.size()).value();
  auto peer = source.open(target.name(), soon()).value();
  EXPECT_EQ(peer.transport(), "faulty+shm");
  const Request request{Op::kWrite, a.data(), address_of(remote), a.size()};
  fill_pattern(a.data(), a.size(), 3);
  for (std::uint64_t round = 0; round < 5; ++round) {
    fill_pattern(a.data(), a.size(), round);
    const auto result = source.transfer(peer, std::span(&request, 1), {.deadline = soon()});
    ASSERT_TRUE(result.ok()) << result.error().describe();
    ASSERT_TRUE(has_pattern(b.data(), b.size(), round));
  }
  EXPECT_GE(metric(source, "crossdock_fallbacks_total"), 1u);
  EXPECT_GE(metric(source, "crossdock_shard_retries_total"), 1u);
}

TEST(Retry, WithoutFallbackTheOtherTransportIsNotTried) {
  EngineOptions options{
      .config = {{"transport.faulty.fail_ppm", "1000000"}, {"transfer.max_retries", "1"}}};
  std::vector<std::byte> a(4096), b(4096);
  auto target = make_engine("shm,tcp");
  auto source = make_engine("faulty+shm,tcp", std::move(options));
  auto local = source.register_memory(a.data(), a.size()).value();
  auto remote = target.register_memory(b.data(), b.size()).value();
  auto peer = source.open(target.name(), soon()).value();
  const Request request{Op::kWrite, a.data(), address_of(remote), a.size()};
  EXPECT_EQ(source.transfer(peer, std::span(&request, 1), {.deadline = soon()}).code(),
            Code::kUnreachable);
  EXPECT_EQ(metric(source, "crossdock_fallbacks_total"), 0u);
}

TEST(Retry, WithNoTransportInCommonThePeerIsUnreachable) {
  auto target = make_engine("shm");
  auto source = make_engine("tcp");
  const auto peer = source.open(target.name(), soon());
  ASSERT_EQ(peer.code(), Code::kUnreachable);
  EXPECT_NE(peer.error().message.find("does not offer transport tcp"), std::string::npos)
      << peer.error().message;
}

TEST(Retry, WhyABetterTransportDoesNotReachAPeerIsLogged) {
  std::vector<std::byte> memory(4096);
  auto target = make_engine("tcp");
  auto both = make_engine("shm,tcp");
  auto region = both.register_memory(memory.data(), memory.size()).value();
  const auto log_of_opening = [](const Engine& engine) {
    ::testing::internal::CaptureStderr();
    {
      auto source = make_engine("shm,tcp",
                                {.config = {{"log.level", "info"}, {"transport.shm.copy", "map"}}});
      EXPECT_TRUE(source.open(engine.name(), soon()).ok());
    }
    return ::testing::internal::GetCapturedStderr();
  };
  const auto without = log_of_opening(target);
  EXPECT_NE(without.find("is reached by tcp with 2 rails; not by shm: peer '" + target.name() +
                         "' does not offer transport shm"),
            std::string::npos)
      << without;
  const auto partly = log_of_opening(both);
  EXPECT_NE(partly.find("is reached by tcp with 2 rails; without it some memory is not: "),
            std::string::npos)
      << partly;
}

// One thread hashes; whoever waits behind a long checksum is not bound to it.
TEST(Retry, ATransferThatWaitsForTheHashingThreadEndsAtItsDeadline) {
  constexpr std::size_t kBytes = 64u << 20;
  auto engine = make_engine("loopback", {.config = {{"transfer.quiesce_grace", "1ms"}}});
  auto region = engine.allocate(2 * kBytes).value();
  auto self = engine.open(engine.name(), soon()).value();
  const std::vector<Request> many(
      64, Request{Op::kWrite, region.address(), address_of(region, kBytes), kBytes});
  auto slow = engine.submit(self, many, {.deadline = Deadline::in(1min), .checksum = true}).value();
  while (slow.status().bytes_done < slow.status().bytes_total)
    std::this_thread::yield();
  const Request little{Op::kWrite, region.address(), address_of(region, kBytes), 4096};
  auto quick =
      engine.submit(self, std::span(&little, 1), {.deadline = Deadline::in(10ms), .checksum = true})
          .value();
  const auto result = quick.wait(Deadline::in(30s));
  EXPECT_TRUE(result.ok() || result.code() == Code::kDeadline) << result.error().describe();
  EXPECT_TRUE(transfer::is_terminal(quick.status().state));
  EXPECT_FALSE(transfer::is_terminal(slow.status().state)) << "it was not waited for";
  slow.cancel();
  EXPECT_EQ(slow.wait(Deadline::in(30s)).code(), Code::kCancelled);
}

}  // namespace
}  // namespace crossdock::testing
