// One peer by several names, and opened by several threads at once: one object, one session.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "support/engines.hpp"

namespace crossdock::testing {
namespace {

std::string other_spelling(const Engine& engine) {
  const std::string& address = engine.address();
  return "localhost" + address.substr(address.rfind(':'));
}

std::size_t sessions_of(const Engine& source) {
  std::size_t n = 0;
  const std::string text = source.metrics();
  const std::string name = "\ncrossdock_peer_connects_total ";
  if (const auto at = text.find(name); at != std::string::npos)
    n = std::stoul(text.substr(at + name.size()));
  return n;
}

class PeerNames : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Transports, PeerNames, ::testing::Values("shm", "tcp"),
                         [](const auto& over) { return std::string(over.param); });

// The region is let go of while a copy of 4 GiB runs by the other spelling.
TEST_P(PeerNames, ARegionReleasedUnderACopyByAnotherName) {
  constexpr std::size_t kBytes = 64u << 20;
  auto target = make_engine(GetParam());
  auto source = make_engine(GetParam());
  auto remote = target.allocate(kBytes).value();
  auto local = source.allocate(kBytes).value();
  const auto first = source.open(target.name(), soon()).value();
  const auto second = source.open(other_spelling(target), soon()).value();
  EXPECT_EQ(first.instance(), second.instance());
  const std::vector<Request> batch(64, {Op::kWrite, local.address(), address_of(remote), kBytes});
  auto transfer = source.submit(second, batch, {.deadline = soon()}).value();
  while (transfer.status().bytes_done == 0 && !transfer::is_terminal(transfer.status().state))
    std::this_thread::yield();
  ASSERT_TRUE(remote.release(soon()).ok());
  const auto result = transfer.wait(soon());
  EXPECT_TRUE(result.ok() || result.code() == Code::kClosed) << result.error().describe();
}

TEST_P(PeerNames, OneNameGoesTheOtherStays) {
  Pair pair(GetParam(), 1 << 20);
  {
    const auto alias = pair.source.open(other_spelling(pair.target), soon()).value();
    const auto request = pair.write(0, 1 << 20);
    ASSERT_TRUE(pair.source.transfer(alias, std::span(&request, 1), {.deadline = soon()}).ok());
  }
  for (int i = 0; i < 10; ++i)
    ASSERT_TRUE(pair.run({pair.write(0, 1 << 20)}).ok());
  EXPECT_TRUE(pair.peer.alive());
  EXPECT_EQ(sessions_of(pair.source), 1u);
}

TEST_P(PeerNames, ThreadsThatOpenAtOnceShareOnePeer) {
  constexpr std::size_t kThreads = 12;
  for (int round = 0; round < 5; ++round) {
    std::vector<std::byte> a(4096), b(4096);
    auto target = make_engine(GetParam());
    auto source = make_engine(GetParam());
    auto local = source.register_memory(a.data(), a.size()).value();
    auto remote = target.register_memory(b.data(), b.size()).value();
    std::vector<std::optional<Peer>> peers(kThreads);
    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        go.wait(false);
        auto peer = source.open(t % 2 == 0 ? target.name() : other_spelling(target), soon());
        if (peer.ok()) peers[t] = *peer;
      });
    go.store(true);
    go.notify_all();
    for (auto& thread : threads)
      thread.join();
    EXPECT_EQ(sessions_of(source), 1u);
    const Request request{Op::kWrite, a.data(), address_of(remote), 4096};
    for (auto& peer : peers) {
      ASSERT_TRUE(peer.has_value());
      EXPECT_TRUE(source.transfer(*peer, std::span(&request, 1), {.deadline = soon()}).ok());
      peer.reset();
    }
  }
}

TEST(PeerNamesOnce, AnOpenThatFailsDoesNotKeepTheNameTaken) {
  auto source = make_engine("tcp");
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(source.open("127.0.0.1:1", Deadline::in(2s)).code(), Code::kUnreachable);
}

}  // namespace
}  // namespace crossdock::testing
