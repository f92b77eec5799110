// What must not grow: descriptors, threads, memory, allocations per slice; and what must not break:
// many threads, many cycles, a forked child, descriptors that ran out.
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdlib>
#include <malloc.h>
#include <new>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "support/engines.hpp"
#include "support/process_use.hpp"

namespace {
std::atomic<std::uint64_t> g_allocations{0};
}  // namespace

#if !defined(CROSSDOCK_SANITIZE_ADDRESS) && !defined(CROSSDOCK_SANITIZE_THREAD)
// Counts every allocation of the process. Not inlined: GCC would take free() for a mistake.
[[gnu::noinline]] void* operator new(std::size_t size) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
#define CROSSDOCK_COUNTS_ALLOCATIONS 1
#endif

namespace crossdock::testing {
namespace {

using transfer::Message;

// Handed out by malloc and not given back.
std::size_t allocated_bytes() {
  return ::mallinfo2().uordblks;
}

class EnduranceOver : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Transports, EnduranceOver, ::testing::Values("shm", "tcp"),
                         [](const auto& over) { return std::string(over.param); });

TEST_P(EnduranceOver, ConnectCyclesLeakNothing) {
#if defined(CROSSDOCK_SANITIZE_THREAD) || defined(CROSSDOCK_SANITIZE_ADDRESS)
  constexpr int kCycles = 100;
#else
  constexpr int kCycles = 1000;
#endif
  std::vector<std::byte> a(4096), b(4096);
  auto target = make_engine(GetParam());
  auto source = make_engine(GetParam());
  auto local = source.register_memory(a.data(), 4096).value();
  auto remote = target.register_memory(b.data(), 4096).value();
  auto losses = target.mailbox("losses").value();
  const Request request{Op::kWrite, a.data(), address_of(remote), 4096};
  std::size_t fds = 0, threads = 0;
  [[maybe_unused]] std::size_t bytes = 0;
  for (int i = 0; i < kCycles; ++i) {
    {
      auto peer = source.open(target.name(), soon()).value();
      ASSERT_TRUE(source.transfer(peer, std::span(&request, 1), {.deadline = soon()}).ok()) << i;
    }
    ASSERT_EQ(losses.receive(soon()).value().kind, Message::Kind::kPeerLost) << i;
    if (i == kCycles / 10) {
      fds = open_descriptors();
      threads = running_threads();
      bytes = allocated_bytes();
    }
  }
  // The last session may still be closing.
  const auto more_than_then = [&] {
    return open_descriptors() > fds || running_threads() > threads;
  };
  for (const auto patience = soon(); more_than_then() && !patience.passed();)
    std::this_thread::yield();
  EXPECT_LE(open_descriptors(), fds);
  EXPECT_LE(running_threads(), threads);
#if defined(CROSSDOCK_COUNTS_ALLOCATIONS)
  // Room for what pools keep on a busy machine.
  const std::size_t allowed = 40 * (kCycles - kCycles / 10);
  const auto grown = [&] {
    const std::size_t now = allocated_bytes();
    return now > bytes ? now - bytes : 0;
  };
  for (const auto patience = soon(); grown() > allowed && !patience.passed();)
    (void)losses.receive(Deadline::in(50ms));
  EXPECT_LT(grown(), allowed) << "bytes, for " << kCycles - kCycles / 10 << " cycles";
#endif
}

TEST_P(EnduranceOver, EnginesComeAndGo) {
  (void)make_engine(GetParam());
  const auto fds = open_descriptors();
  const auto threads = running_threads();
  [[maybe_unused]] std::size_t bytes = 0;
  for (int i = 0; i < 50; ++i) {
    if (i == 10) bytes = allocated_bytes();
    Pair pair(GetParam(), 4096);
    ASSERT_TRUE(pair.run({pair.write(0, 4096)}).ok());
  }
  // A thread that was joined may still be listed for an instant.
  for (const auto patience = soon(); running_threads() > threads && !patience.passed();)
    std::this_thread::yield();
  EXPECT_EQ(open_descriptors(), fds);
  EXPECT_EQ(running_threads(), threads);
#if defined(CROSSDOCK_COUNTS_ALLOCATIONS)
  // A transfer that an engine keeps for the next one takes more than 2,000.
  EXPECT_LT(allocated_bytes(), bytes + 40 * 1000) << "bytes, of 40 pairs of engines";
#endif
}

TEST_P(EnduranceOver, SixtyFourThreadsSubmit) {
  constexpr std::size_t kThreads = 64, kEach = 16384;
  Pair pair(GetParam(), kThreads * kEach);
  fill_pattern(pair.source_memory.data(), pair.source_memory.size(), 1);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (std::size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        const auto request = pair.write(t * kEach, kEach);
        if (!pair.source.transfer(pair.peer, std::span(&request, 1), {.deadline = soon()}).ok())
          failures.fetch_add(1);
      }
    });
  for (auto& thread : threads)
    thread.join();
  EXPECT_EQ(failures.load(), 0);
  EXPECT_EQ(std::memcmp(pair.source_memory.data(), pair.target_memory.data(), kThreads * kEach), 0);
}

TEST_P(EnduranceOver, RegistrationsWhileTransfersRun) {
  Pair pair(GetParam(), 1 << 20);
  std::atomic<bool> stop{false};
  std::thread registrar([&] {
    std::vector<std::byte> memory(64 * 4096);
    while (!stop.load()) {
      std::vector<Region> regions;
      for (std::size_t i = 0; i < 16; ++i)
        regions.push_back(pair.target.register_memory(memory.data() + i * 4096, 4096).value());
      for (auto& region : regions)
        EXPECT_TRUE(region.release(soon()).ok());
    }
  });
  for (int i = 0; i < 200; ++i)
    ASSERT_TRUE(pair.run({pair.write(0, 1 << 16)}).ok());
  stop.store(true);
  registrar.join();
}

TEST_P(EnduranceOver, FailedBatchesLeakNothing) {
  Pair pair(GetParam(), 1 << 20);
  std::vector<Request> batch;
  for (std::size_t i = 0; i < 3000; ++i)
    batch.push_back(pair.write(i * 256, 64));
  batch.push_back({Op::kWrite, pair.source_memory.data(), 8, 8});
  for (int i = 0; i < 20; ++i)
    ASSERT_FALSE(pair.run(batch).ok());
  const auto kib = resident_kib();
  for (int i = 0; i < 200; ++i)
    ASSERT_FALSE(pair.run(batch).ok());
#if defined(CROSSDOCK_COUNTS_ALLOCATIONS)
  EXPECT_LT(resident_kib(), kib + 4 * 1024);
#else
  (void)kib;
#endif
  EXPECT_TRUE(pair.source.pending().empty());
}

TEST(Endurance, NoAllocationPerSliceInSteadyState) {
#if !defined(CROSSDOCK_COUNTS_ALLOCATIONS)
  GTEST_SKIP() << "the sanitizer owns operator new";
#endif
  constexpr std::size_t kSlices = 4096;
  std::vector<std::byte> memory(2 * kSlices * 128);
  auto engine = make_engine("loopback");
  auto region = engine.register_memory(memory.data(), memory.size()).value();
  auto self = engine.open(engine.name(), soon()).value();
  std::vector<Request> batch;
  for (std::size_t i = 0; i < kSlices; ++i)
    batch.push_back(
        {Op::kWrite, memory.data() + i * 128, address_of(region, (kSlices + i) * 128), 64});
  for (int i = 0; i < 20; ++i)
    ASSERT_TRUE(engine.transfer(self, batch, {.deadline = soon()}).ok());
  const auto before = g_allocations.load();
  constexpr int kRounds = 50;
  for (int i = 0; i < kRounds; ++i)
    ASSERT_TRUE(engine.transfer(self, batch, {.deadline = soon()}).ok());
  const auto per_batch = static_cast<double>(g_allocations.load() - before) / kRounds;
  EXPECT_LT(per_batch, 40) << "allocations for a batch of " << kSlices << " slices";
}

TEST(Endurance, AForkedChildIsToldSo) {
  Pair pair("shm", 4096);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto request = pair.write(0, 8);
    const auto code = pair.source.submit(pair.peer, std::span(&request, 1)).code();
    ::_exit(code == Code::kUnsupported ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(pair.run({pair.write(0, 8)}).ok()) << "the parent goes on";
}

TEST(Endurance, OutOfDescriptorsIsAnErrorAndPasses) {
  CROSSDOCK_SKIP_WITHOUT_DESCRIPTORS();
  auto target = make_engine("tcp");
  auto source = make_engine("tcp");
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  const rlimit tight{open_descriptors() + 2, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  const auto failed = source.open(target.name(), Deadline::in(2s));
  const auto no_engine = Engine::create();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(no_engine.code(), Code::kNoMemory) << no_engine.error().describe();
  const auto opened = source.open(target.name(), soon());
  EXPECT_TRUE(opened.ok()) << opened.error().describe();
}

}  // namespace
}  // namespace crossdock::testing
