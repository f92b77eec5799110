// Peers that never come, on GPUs: every kernel that waits for them ends by its deadline with a
// record that names the peer, the context stays usable, and after a reset so is the group.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <gmock/gmock.h>
#include <map>

#include "gpu/symm/symm_fixture.hpp"
#include "symm/copy.hpp"
#include "symm/kernels/list.hpp"

namespace crossdock::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr auto kWait = 100ms;

using SymmFaultGpu = SymmGpuTest;

// After a fault: other work of the context runs, launches of the group leave at once with the same
// fault, and a reset makes everything work again.
void expect_usable_after_reset(SymmWorld& w) {
  symm::Rank& rank = w.group->rank(0);
  const std::vector<u32> sent{1, 2, 3, 4};
  const auto memory = rank.allocate(16).value();
  ASSERT_TRUE(symm::upload(rank, memory.as<u32>(), sent, soon()).ok()) << "the context lives";
  EXPECT_EQ(symm::download(rank, memory.as<u32>(), 4, soon()).value(), sent);
  // Rank 0 has a fault, so its launches leave at once instead of waiting for the others.
  const auto before = std::chrono::steady_clock::now();
  ASSERT_TRUE(w.suite->plain_barrier().launch(rank, 1).ok());
  EXPECT_EQ(w.launcher->synchronize(soon()).code(), Code::kPeerLost);
  EXPECT_LT(std::chrono::steady_clock::now() - before, w.shape.wait);
  const auto reset = w.group->reset(soon());
  ASSERT_TRUE(reset.ok()) << reset.error().describe();
  w.suite->forget();
  const auto again = w.suite->run_all(soon());
  EXPECT_TRUE(again.ok()) << again.error().describe();
}

void expect_peer_lost(const Result<>& result, const char* kernel, u32 peer) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code, Code::kPeerLost);
  EXPECT_EQ(result.error().scope, Scope::kPeer);
  EXPECT_THAT(result.error().message, HasSubstr(kernel));
  EXPECT_THAT(result.error().message, HasSubstr("for rank " + std::to_string(peer)));
  std::printf("%s\n", result.error().describe().c_str());
}

// Works on one GPU too: rank 0 waits for a flag that no rank sends.
TEST_F(SymmFaultGpu, AFlagThatNeverComesIsRecorded) {
  SymmWorld w = make(1);
  const symm::Rank& rank = w.group->rank(0);
  const auto kernel =
      w.launcher->prepare(symm::flag_ping_pong_kernel(true), {.threads = 32}, soon()).value();
  device::FlagPingPongParams p{};
  p.common = rank.common(device::KernelId::kFlagPingPong, kWait);
  p.view = rank.view();
  p.flag = w.areas.flag;
  p.first = 1;  // not in this world
  p.second = 0;
  p.rounds = 3;
  ASSERT_TRUE(w.launcher->launch(rank, kernel, {}, p).ok());
  expect_peer_lost(w.launcher->synchronize(soon()), "flag_ping_pong", 1);
  EXPECT_EQ(rank.fault().phase, device::Phase::kFlag);
  EXPECT_EQ(rank.fault().expected, 1u);
  EXPECT_EQ(rank.fault().seen, 0u);
  ASSERT_NO_FATAL_FAILURE(expect_usable_after_reset(w));
}

// Launches `launch` on every rank but rank 1, then resets and runs the whole suite.
void check_missing(SymmWorld& w, const char* kernel,
                   const std::function<Result<>(const symm::Rank&)>& launch) {
  SCOPED_TRACE(kernel);
  constexpr u32 kMissing = 1;
  // The suite used the same area: its counts there are ahead of those of the object under test.
  ASSERT_TRUE(w.group->reset(soon()).ok());
  w.suite->forget();
  for (const u32 r : w.group->local_ranks()) {
    if (r == kMissing) continue;
    const auto launched = launch(w.group->rank(r));
    ASSERT_TRUE(launched.ok()) << launched.error().describe();
  }
  expect_peer_lost(w.launcher->synchronize(soon()), kernel, kMissing);
  for (const u32 r : w.group->local_ranks()) {
    const auto& fault = w.group->rank(r).fault();
    EXPECT_EQ(fault.state,
              r == kMissing ? device::FaultRecord::kEmpty : device::FaultRecord::kWritten)
        << "rank " << r;
    EXPECT_TRUE(r == kMissing || fault.peer == kMissing)
        << "rank " << r << " blames " << fault.peer;
  }
  ASSERT_NO_FATAL_FAILURE(expect_usable_after_reset(w));
}

// Counts and rows of a rank, for the kernels that exchange them.
struct Buffers {
  std::vector<symm::LocalMemory> blocks;
  u32* counts(symm::Rank& rank, u32 value) {
    blocks.push_back(rank.allocate(rank.world() * sizeof(u32)).value());
    const std::vector<u32> values(rank.world(), value);
    EXPECT_TRUE(symm::upload(rank, blocks.back().as<u32>(), values, soon()).ok());
    return blocks.back().as<u32>();
  }
  u8* bytes(symm::Rank& rank, u64 size) {
    blocks.push_back(rank.allocate(size).value());
    return blocks.back().as<u8>();
  }
};

TEST_F(SymmFaultGpu, ARankThatNeverComesIsNamedByEveryKernel) {
  if (num_ranks() < 2) GTEST_SKIP() << "needs 2 GPUs, this machine has " << num_gpus_;
  // Up to four ranks every pair of the ring has a warp of its own, so nobody waits for a rank that
  // waits for the missing one.
  SymmWorld w = make(static_cast<u32>(std::min(num_ranks(), 4)));
  symm::Launcher& l = *w.launcher;
  auto barrier = symm::Barrier::create(l, w.areas.barrier, {.wait = kWait}, soon()).value();
  check_missing(w, "barrier", [&](const symm::Rank& rank) { return barrier.launch(rank, 3); });

  auto grid =
      symm::Barrier::create(l, w.areas.grid_barrier,
                            {.grid_sync = true, .blocks = w.shape.blocks, .wait = kWait}, soon())
          .value();
  check_missing(w, "barrier", [&](const symm::Rank& rank) { return grid.launch(rank, 3); });

  // Buffers come first: allocating while ranks wait would use up their deadline.
  Buffers buffers;
  const u64 size = u64{w.group->world()} * w.shape.ring_rows * w.shape.row_bytes;
  std::map<u32, symm::AllGatherCounts::Arguments> counts;
  std::map<u32, symm::RingAllToAll::Arguments> rows;
  for (const u32 r : w.group->local_ranks()) {
    symm::Rank& rank = w.group->rank(r);
    counts[r] = {.counts = buffers.counts(rank, 5),
                 .gathered = reinterpret_cast<u32*>(buffers.bytes(rank, 4096)),
                 .num_counts = 1};
    rows[r] = {.input = buffers.bytes(rank, size),
               .output = buffers.bytes(rank, size),
               .send_rows = buffers.counts(rank, w.shape.ring_rows),
               .receive_rows = buffers.counts(rank, w.shape.ring_rows),
               .max_rows = w.shape.ring_rows};
  }
  auto gather =
      symm::AllGatherCounts::create(l, w.areas.gather, {.blocks = 2, .wait = kWait}, soon())
          .value();
  check_missing(w, "all_gather_counts",
                [&](const symm::Rank& rank) { return gather.launch(rank, counts[rank.rank()]); });
  auto ring =
      symm::RingAllToAll::create(l, w.areas.ring, {.config = w.shape.ring, .wait = kWait}, soon())
          .value();
  check_missing(w, "ring_all_to_all",
                [&](const symm::Rank& rank) { return ring.launch(rank, rows[rank.rank()]); });
}

}  // namespace
}  // namespace crossdock::testing
