// The end of an engine beside everything else: threads that submit and open, transfers under way,
// dials that hang, callbacks, a forked copy.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <poll.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "base/socket.hpp"
#include "support/engines.hpp"
#include "wire/frame.hpp"

namespace crossdock::testing {
namespace {

using transfer::Status;

bool is_end(Code code) {
  return code == Code::kClosed || code == Code::kPeerLost;
}

class LifecycleOver : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Transports, LifecycleOver, ::testing::Values("shm", "tcp"),
                         [](const auto& over) { return std::string(over.param); });

// Every transfer that was accepted ends, once, and after close() nothing touches memory.
TEST_P(LifecycleOver, CloseBesideThreadsThatSubmit) {
  constexpr std::size_t kBytes = 1 << 20;
  constexpr std::size_t kSlots = 8;
  constexpr std::size_t kSlotBytes = kBytes / 4 / kSlots;
  for (int round = 0; round < 20; ++round) {
    Pair pair(GetParam(), kBytes);
    std::atomic<int> accepted{0}, ended{0};
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        // Several transfers run at once, no two of them in one place.
        std::array<std::optional<Transfer>, kSlots> running;
        for (std::size_t i = 0;; ++i) {
          const std::size_t slot = i % kSlots;
          if (running[slot]) static_cast<void>(running[slot]->wait(soon()));
          std::vector<Request> batch;
          const std::size_t first = (t * kSlots + slot) * kSlotBytes;
          for (std::size_t at = 0; at < kSlotBytes; at += 4096)
            batch.push_back(pair.write(first + at, 2048));
          auto transfer = pair.source.submit(
              pair.peer, batch,
              {.deadline = soon(), .on_complete = [&](const Status&) { ++ended; }});
          if (transfer.ok()) {
            ++accepted;
            running[slot] = *transfer;
          } else if (is_end(transfer.code())) {
            return;
          }
        }
      });
    while (accepted < 1 + round)
      std::this_thread::yield();
    const auto closed = pair.source.close(soon());
    EXPECT_TRUE(closed.ok()) << closed.error().describe();
    EXPECT_EQ(pair.source.pending().size(), 0u);
    for (auto& thread : threads)
      thread.join();
    EXPECT_EQ(ended, accepted);
    ASSERT_TRUE(pair.remote.release(soon()).ok());
    std::memset(pair.target_memory.data(), 0x5a, kBytes);
    for (const auto byte : pair.target_memory)
      ASSERT_EQ(byte, std::byte{0x5a});
  }
}

// What these use is taken apart by close().
TEST_P(LifecycleOver, CloseBesideThreadsThatCancelDropPeersAndAllocate) {
  for (int round = 0; round < 20; ++round) {
    auto other = make_engine(GetParam());
    Pair pair(GetParam(), 1 << 20);
    std::atomic<int> turns{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t)
      threads.emplace_back([&, t] {
        // Never twice at a time to one place: sanitizers would see that.
        std::vector<Request> batch;
        for (std::size_t i = 0; i < 4; ++i)
          batch.push_back(pair.write((std::size_t(t) * 4 + i) << 17, 1 << 17));
        while (true) {
          auto transfer = pair.source.submit(pair.peer, batch, {.deadline = soon()});
          if (!transfer.ok()) return;
          ++turns;
          transfer->cancel();
          (void)transfer->wait(soon());
        }
      });
    threads.emplace_back([&] {
      while (pair.source.open(other.name(), soon()).code() != Code::kClosed)
        ++turns;
    });
    threads.emplace_back([&] {
      while (pair.source.allocate(4096).ok())
        ++turns;
    });
    while (turns < 1 + 3 * round)
      std::this_thread::yield();
    const auto closed = pair.source.close(soon());
    EXPECT_TRUE(closed.ok()) << closed.error().describe();
    for (auto& thread : threads)
      thread.join();
  }
}

TEST_P(LifecycleOver, CloseBesideThreadsThatOpen) {
  auto target = make_engine(GetParam());
  for (int round = 0; round < 40; ++round) {
    auto source = make_engine(GetParam());
    std::atomic<int> opened{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&] {
        while (true) {
          const auto peer = source.open(target.name(), soon());
          ++opened;
          if (peer.code() == Code::kClosed) return;
        }
      });
    while (opened < round % 5)
      std::this_thread::yield();
    EXPECT_TRUE(source.close(soon()).ok());
    for (auto& thread : threads)
      thread.join();
  }
}

TEST_P(LifecycleOver, CloseWhileTransfersRun) {
  constexpr std::size_t kBytes = 16 << 20;
  Pair pair(GetParam(), kBytes);
  std::vector<Transfer> transfers;
  for (int i = 0; i < 8; ++i) {
    const std::vector<Request> batch(16, pair.write(0, kBytes));
    transfers.push_back(pair.source.submit(pair.peer, batch, {.deadline = soon()}).value());
  }
  ASSERT_TRUE(pair.source.close(soon()).ok());
  for (auto& transfer : transfers) {
    ASSERT_TRUE(transfer::is_terminal(transfer.status().state));
    const auto result = transfer.wait(Deadline::now());
    EXPECT_TRUE(result.ok() || result.code() == Code::kClosed) << result.error().describe();
  }
  std::memset(pair.target_memory.data(), 0x5a, kBytes);
  std::this_thread::yield();
  for (const auto byte : pair.target_memory)
    ASSERT_EQ(byte, std::byte{0x5a});
}

// Something accepts the connection and never says a word.
TEST(Lifecycle, CloseCutsADialShort) {
  const auto silent = base::listen_tcp(base::parse_host_port("127.0.0.1:0").value(), soon());
  ASSERT_TRUE(silent.ok());
  auto engine = make_engine("tcp", {.config = {{"control.connect_timeout", "10min"}}});
  std::thread opening([&] {
    const auto peer = engine.open(silent->address.to_string(), Deadline::in(10min));
    EXPECT_EQ(peer.code(), Code::kClosed) << peer.error().describe();
  });
  ASSERT_TRUE(base::wait_ready(silent->fd.get(), POLLIN, soon()).value()) << "it dials";
  EXPECT_TRUE(engine.close(soon()).ok());
  opening.join();
}

// The handshake is done, and the segment never comes.
TEST(Lifecycle, CloseCutsAnOpenShortThatWaitsForTheSegment) {
  const auto listener = base::listen_tcp(base::parse_host_port("127.0.0.1:0").value(), soon());
  ASSERT_TRUE(listener.ok());
  auto engine = make_engine("tcp", {.config = {{"control.connect_timeout", "10min"}}});
  std::thread opening([&] {
    const auto peer = engine.open(listener->address.to_string(), Deadline::in(10min));
    EXPECT_EQ(peer.code(), Code::kClosed) << peer.error().describe();
  });
  ASSERT_TRUE(base::wait_ready(listener->fd.get(), POLLIN, soon()).value());
  const auto fd = std::move(base::accept_tcp(listener->fd.get()).value().value());
  const auto welcome =
      wire::encode_frame(wire::Welcome{.engine_name = "slow", .instance_id = 9}).value();
  ASSERT_TRUE(base::send_all(fd.get(), welcome, soon()).ok());
  // Its Hello, and then nothing but the end: the engine waits for us until it is closed.
  std::byte chunk[4096];
  ASSERT_GT(base::recv_some(fd.get(), chunk, soon()).value(), 0u);
  EXPECT_TRUE(engine.close(soon()).ok());
  opening.join();
}

TEST(Lifecycle, AnEngineIsNotClosedByItsOwnCallbacks) {
  Pair pair("tcp", 4096);
  auto mailbox = pair.target.mailbox("kv").value();
  std::atomic<int> refused{0};
  const auto close = [&](Engine& engine) {
    if (engine.close(soon()).code() == Code::kInvalidArgument) ++refused;
  };
  const auto listening = mailbox.on_message([&](transfer::Message) { close(pair.target); }).value();
  ASSERT_TRUE(pair.source.notify(pair.peer, {"kv", "x"}, soon()).ok());
  // An empty batch ends inside submit().
  ASSERT_TRUE(
      pair.source.submit(pair.peer, {}, {.on_complete = [&](const Status&) { close(pair.source); }})
          .ok());
  EXPECT_EQ(refused, 2);
  EXPECT_TRUE(pair.run({pair.write(0, 64)}).ok()) << "and it goes on";
}

TEST(Lifecycle, CloseTellsTheSameTwice) {
  auto engine = make_engine("tcp");
  EXPECT_TRUE(engine.close(soon()).ok());
  EXPECT_TRUE(engine.close(soon()).ok());
}

TEST_P(LifecycleOver, AForkedChildMayDestroyItsCopies) {
  for (const bool checksum : {false, true}) {
    auto pair = std::make_unique<Pair>(GetParam(), 1 << 20, true);
    auto back = std::make_optional(pair->target.open(pair->source.name(), soon()).value());
    auto mailbox = std::make_optional(pair->target.mailbox("kv").value());
    ASSERT_TRUE(pair->run({pair->write(0, 1 << 20)}, {.checksum = checksum}).ok());
    const auto request = pair->write(0, 1 << 20);
    auto transfer = std::make_optional(
        pair->source.submit(pair->peer, std::span(&request, 1), {.deadline = soon()}).value());
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(30);  // a destructor that hangs is a signal, which the parent sees
      transfer.reset();
      back.reset();
      mailbox.reset();
      pair.reset();
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_TRUE(transfer->wait(soon()).ok());
    EXPECT_TRUE(pair->peer.alive()) << "the child said nothing on the parent's connections";
    EXPECT_TRUE(pair->run({pair->read(0, 1 << 20)}, {.checksum = checksum}).ok());
    EXPECT_TRUE(pair->source.close(soon()).ok());
  }
}

// The threads that would answer are the parent's, and so are locks that were held at the fork.
TEST(Lifecycle, CallsInAForkedChildAreUnsupportedAtOnce) {
  Pair pair(
      "tcp", 4096, false,
      {.config = {{"transport.enabled", "faulty+tcp"}, {"transport.faulty.delay_max", "1min"}}});
  auto mailbox = pair.source.mailbox("m").value();
  const auto request = pair.write(0, 64);
  auto moving = pair.source.submit(pair.peer, std::span(&request, 1), {.deadline = soon()}).value();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    const std::array codes{moving.wait(soon()).code(), pair.peer.region("none", soon()).code(),
                           mailbox.receive(soon()).code(),
                           mailbox.on_message([](const transfer::Message&) {}).code()};
    moving.cancel();
    const bool nothing = !mailbox.try_receive() && pair.peer.regions().empty() &&
                         pair.peer.transport().empty() && pair.source.pending().empty() &&
                         pair.source.metrics().empty() && moving.status().bytes_total == 0;
    std::size_t right = 0;
    while (right < codes.size() && codes[right] == Code::kUnsupported)
      ++right;
    ::_exit(right == codes.size() && !nothing ? 100 : static_cast<int>(right));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 4) << "calls that said kUnsupported; 100: they know of something";
  EXPECT_FALSE(transfer::is_terminal(moving.status().state)) << "the parent's transfer goes on";
  moving.cancel();
  EXPECT_EQ(moving.wait(soon()).code(), Code::kCancelled);
}

TEST(Lifecycle, TenThousandRegionsAreOpened) {
  constexpr std::size_t kRegions = 10'500, kBytes = 64;
  std::vector<std::byte> memory(kRegions * kBytes), source_memory(kBytes);
  auto target = make_engine("tcp");
  auto source = make_engine("tcp");
  std::vector<transfer::MemoryRange> ranges;
  for (std::size_t i = 0; i < kRegions; ++i)
    ranges.push_back({memory.data() + i * kBytes, kBytes});
  auto regions = target.register_memory(ranges).value();
  auto local = source.register_memory(source_memory.data(), kBytes).value();
  auto peer = source.open(target.name(), soon());
  ASSERT_TRUE(peer.ok()) << peer.error().describe();
  EXPECT_EQ(peer->regions().size(), kRegions);
  fill_pattern(source_memory.data(), kBytes, 9);
  for (const std::size_t i : {std::size_t{0}, kRegions / 2, kRegions - 1}) {
    const Request write{Op::kWrite, source_memory.data(), address_of(regions[i]), kBytes};
    ASSERT_TRUE(source.transfer(*peer, std::span(&write, 1), {.deadline = soon()}).ok()) << i;
    EXPECT_TRUE(has_pattern(memory.data() + i * kBytes, kBytes, 9)) << i;
  }
}

}  // namespace
}  // namespace crossdock::testing
