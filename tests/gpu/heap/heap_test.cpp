// Symmetric heaps on real GPUs of one process: 1 to all of them; large ones timed; many small ones
// without growth; out of memory on one rank. Data goes by copies here; kernels are in ../symm.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <gmock/gmock.h>
#include <vector>

#include "base/clock.hpp"
#include "cuda/memory.hpp"
#include "gpu/gpu_fixture.hpp"
#include "support/stays_level.hpp"
#include "support/symm_members.hpp"
#include "symm/group.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr u64 kMiB = u64{1} << 20;
constexpr u64 kGiB = u64{1} << 30;
// What the driver may keep for itself between two looks at the free memory.
constexpr u64 kSlack = 64 * kMiB;

Deadline soon() {
  return Deadline::in(60s);
}

device::SymmetricLayout layout_of(u64 bytes) {
  device::SymmetricLayout layout;
  (void)layout.add("data", bytes);
  return layout;
}

double milliseconds_since(std::uint64_t start_ns) {
  return static_cast<double>(base::now_ns() - start_ns) / 1e6;
}

class GpuHeap : public crossdock::testing::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    // Contexts that stay: making one takes longer than all that is measured here.
    for (int i = 0; i < num_gpus_; ++i)
      contexts_.push_back(context(i));
  }
  [[nodiscard]] u32 world() const { return static_cast<u32>(num_gpus_); }
  Result<std::unique_ptr<Group>> create(const GroupOptions& options, u64 bytes) {
    return Group::create(options, layout_of(bytes), driver_);
  }
  [[nodiscard]] std::vector<u64> free_bytes() const {
    std::vector<u64> free;
    for (const cuda::Context& context : contexts_)
      free.push_back(context.memory_info().value().free_bytes);
    return free;
  }
  [[nodiscard]] std::vector<u64> used_bytes() const {
    std::vector<u64> used;
    for (const cuda::Context& context : contexts_)
      used.push_back(crossdock::testing::used_bytes(context));
    return used;
  }
  std::vector<cuda::Context> contexts_;
};

// Every rank writes a word near both ends of every window and finds what the others wrote.
void talk(Group& group, u64 bytes) {
  const u32 world = group.world();
  const u64 far = bytes - 8 * world;
  for (u32 from = 0; from < world; ++from)
    for (u32 to = 0; to < world; ++to)
      for (const u64 place : {u64{0}, far}) {
        Rank& rank = group.rank(from);
        const u64 word = 1000 * from + to + place;
        const auto written =
            rank.write(rank.at<u64>(place + 8 * from, to), &word, sizeof word, soon());
        ASSERT_TRUE(written.ok()) << from << " to " << to << ": " << written.error().describe();
      }
  for (u32 to = 0; to < world; ++to)
    for (u32 from = 0; from < world; ++from)
      for (const u64 place : {u64{0}, far}) {
        const Rank& rank = group.rank(to);
        u64 word = 0;
        ASSERT_TRUE(rank.read(&word, rank.at<u64>(place + 8 * from), sizeof word, soon()).ok());
        EXPECT_EQ(word, 1000 * from + to + place) << from << " to " << to;
      }
}

TEST_F(GpuHeap, EveryNumberOfGpus) {
  for (u32 n = 1; n <= world(); ++n)
    for (const Addressing addressing : {Addressing::kStride, Addressing::kTable}) {
      SCOPED_TRACE(n);
      const std::uint64_t start = base::now_ns();
      const auto group = create({.world = n, .addressing = addressing}, 16 * kMiB);
      ASSERT_TRUE(group.ok()) << group.error().describe();
      std::printf("heap of %u x 16 MiB, %s: %.1f ms\n", n,
                  addressing == Addressing::kStride ? "stride" : "table",
                  milliseconds_since(start));
      ASSERT_NO_FATAL_FAILURE(talk(**group, 16 * kMiB));
      ASSERT_TRUE((*group)->reset(soon()).ok());
      u64 word = 1;
      ASSERT_TRUE((*group)->rank(0).read(&word, (*group)->rank(0).at<u64>(0), 8, soon()).ok());
      EXPECT_EQ(word, 0u);
      EXPECT_TRUE((*group)->check().ok());
    }
}

TEST_F(GpuHeap, ReachesItsControlMemory) {
  const auto group = create({.world = world()}, kMiB).value();
  for (u32 r = 0; r < world(); ++r) {
    Rank& rank = group->rank(r);
    std::printf("rank %u: %s\n", r, rank.device().describe().c_str());
    device::ControlBlock control;
    std::memset(static_cast<void*>(&control), 0xff, sizeof control);
    ASSERT_TRUE(rank.read(&control, rank.control(), sizeof control, soon()).ok());
    EXPECT_EQ(control.abort.value, 0u);
    // A record as a kernel leaves it, written by the GPU's copy engine into pinned memory.
    device::FaultRecord record{};
    record.state = device::FaultRecord::kWritten;
    record.kernel = device::KernelId::kBarrier;
    record.phase = device::Phase::kPeerBarrier;
    record.rank = r;
    record.peer = 0;
    auto* const target = rank.common(device::KernelId::kBarrier, 1ms).fault;
    ASSERT_TRUE(rank.write(target, &record, sizeof record, soon()).ok());
    EXPECT_EQ(rank.check().code(), Code::kPeerLost);
  }
  ASSERT_TRUE(group->reset(soon()).ok());
  EXPECT_TRUE(group->check().ok());
}

TEST_F(GpuHeap, EightGiBForEachRankNotUnderSanitizer) {
  const auto free = free_bytes();
  if (*std::min_element(free.begin(), free.end()) < 9 * kGiB)
    GTEST_SKIP() << "needs 9 GiB free on each GPU";
  std::uint64_t start = base::now_ns();
  auto group = create({.world = world()}, 8 * kGiB);
  const double created = milliseconds_since(start);
  ASSERT_TRUE(group.ok()) << group.error().describe();
  ASSERT_NO_FATAL_FAILURE(talk(**group, 8 * kGiB));
  start = base::now_ns();
  ASSERT_TRUE((*group)->reset(soon()).ok());
  const double reset = milliseconds_since(start);
  start = base::now_ns();
  group->reset();
  std::printf("heap of %u x 8 GiB: created in %.1f ms, reset in %.1f ms, destroyed in %.1f ms\n",
              world(), created, reset, milliseconds_since(start));
  EXPECT_LT(created, 10'000);
}

TEST_F(GpuHeap, OutOfMemoryOnOneRankFailsAllAndLeavesNothingNotUnderSanitizer) {
  const u32 full = world() - 1;
  const auto before = free_bytes();
  constexpr u64 kWindow = 2 * kGiB;
  if (*std::min_element(before.begin(), before.end()) < 4 * kGiB)
    GTEST_SKIP() << "needs 4 GiB free on each GPU";
  {
    const auto filler = cuda::DeviceMemory::allocate(contexts_[full], before[full] - kGiB);
    ASSERT_TRUE(filler.ok()) << filler.error().describe();
    const auto group = create({.world = world()}, kWindow);
    ASSERT_EQ(group.code(), Code::kNoMemory);
    std::printf("%s\n", group.error().describe().c_str());
    EXPECT_THAT(group.error().message,
                AllOf(HasSubstr("allocate the window of rank " + std::to_string(full)),
                      HasSubstr("CUDA_ERROR_OUT_OF_MEMORY")));
  }
  const auto after = free_bytes();
  for (u32 r = 0; r < world(); ++r)
    EXPECT_GE(after[r] + kSlack, before[r]) << "GPU " << r;
  const auto group = create({.world = world()}, kWindow);
  EXPECT_TRUE(group.ok()) << group.error().describe();
}

TEST_F(GpuHeap, TheSameGpuTwiceIsNamed) {
  const auto group =
      create({.world = 2, .ranks = {{.rank = 0, .device = 0}, {.rank = 1, .device = 0}}}, kMiB);
  ASSERT_EQ(group.code(), Code::kInvalidArgument);
  EXPECT_THAT(group.error().message, HasSubstr("rank 0 and rank 1 are on the same GPU, GPU-"));
}

TEST_F(GpuHeap, ThousandCyclesDoNotGrowNotUnderSanitizer) {
  const u32 n = std::min<u32>(world(), 2);
  const auto cycle = [&] {
    const auto group = create({.world = n}, 64 << 10);
    ASSERT_TRUE(group.ok()) << group.error().describe();
  };
  for (int i = 0; i < 50; ++i)
    ASSERT_NO_FATAL_FAILURE(cycle());
  const auto before = crossdock::testing::process_use();
  const auto thousand = [&] {
    const std::uint64_t start = base::now_ns();
    for (int i = 0; i < 1000; ++i)
      ASSERT_NO_FATAL_FAILURE(cycle());
    std::printf("1000 heaps of %u x 64 KiB: %.2f ms each\n", n, milliseconds_since(start) / 1000);
  };
  EXPECT_TRUE(crossdock::testing::stays_level([&] { return used_bytes(); }, thousand));
  const auto after = crossdock::testing::process_use();
  EXPECT_LE(after.descriptors, before.descriptors);
  EXPECT_LE(after.threads, before.threads);
  std::printf("descriptors %zu then %zu, threads %zu then %zu, resident %zu then %zu KiB\n",
              before.descriptors, after.descriptors, before.threads, after.threads,
              before.resident_kib, after.resident_kib);
  EXPECT_LE(after.resident_kib, before.resident_kib + (128 << 10));
}

}  // namespace
}  // namespace crossdock::symm
