// Groups on GPUs of one process, with the fake driver: where windows lie, and what is left behind
// when anything fails, which is nothing.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <gmock/gmock.h>

#include "cuda/stream.hpp"
#include "support/fake_cuda/fixture.hpp"
#include "support/symm_members.hpp"
#include "symm/group.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr u64 kMiB = u64{1} << 20;

Deadline soon() {
  return Deadline::in(30s);
}

device::SymmetricLayout layout_of(u64 bytes) {
  device::SymmetricLayout layout;
  (void)layout.add("data", bytes);
  return layout;
}

class GpuGroup : public crossdock::testing::FakeCudaTest {
 protected:
  Result<std::unique_ptr<Group>> create(const GroupOptions& options, u64 bytes = 3 * kMiB) {
    return Group::create(options, layout_of(bytes), driver_);
  }
  // create() fails with this, and nothing is left.
  void expect_failure(const GroupOptions& options, Code code,
                      const ::testing::Matcher<std::string>& text, u64 bytes = 3 * kMiB) {
    const auto made = create(options, bytes);
    ASSERT_EQ(made.code(), code) << (made.ok() ? "it worked" : made.error().describe());
    EXPECT_THAT(made.error().message, text);
    EXPECT_TRUE(fake_->live() == before_) << "something was left behind";
  }
};

TEST_F(GpuGroup, WithoutADriverTheSettingNamesIt) {
  ASSERT_EQ(::setenv("CROSSDOCK_CUDA_DRIVER", CROSSDOCK_FAKE_CUDA, 1), 0);
  {
    const auto group = Group::create({.world = 2}, layout_of(kMiB));
    ASSERT_TRUE(group.ok()) << group.error().describe();
    EXPECT_EQ((*group)->driver(), driver_);
  }
  ASSERT_EQ(::setenv("CROSSDOCK_CUDA_DRIVER", "/nonexistent/driver.so", 1), 0);
  const auto group = Group::create({.world = 2}, layout_of(kMiB));
  ::unsetenv("CROSSDOCK_CUDA_DRIVER");
  ASSERT_FALSE(group.ok());
  EXPECT_THAT(group.error().message, HasSubstr("/nonexistent/driver.so"));
}

TEST_F(GpuGroup, WindowsLieAtAStrideInOneRange) {
  for (u32 world = 1; world <= 4; ++world) {
    SCOPED_TRACE(world);
    const auto group = create({.world = world}).value();
    EXPECT_EQ(fake_->live().ranges, 1);
    EXPECT_EQ(fake_->live().mappings, static_cast<int>(world));
    EXPECT_EQ(group->twin(), nullptr);
    EXPECT_TRUE(group->all_local());
    for (u32 r = 0; r < world; ++r) {
      const auto& view = group->rank(r).view();
      EXPECT_EQ(view.stride, static_cast<i64>(4 * kMiB)) << "rounded up to the granularity";
      EXPECT_EQ(view.offsets, nullptr);
      EXPECT_EQ(view.base, group->rank(0).view().base + r * view.stride);
      EXPECT_EQ(group->rank(r).device().context()->ordinal(), static_cast<int>(r));
      EXPECT_EQ(*view.at<u64>(3 * kMiB - 8), 0u);
    }
    // What one rank writes into another's window, that one reads in its own.
    for (u32 from = 0; from < world; ++from)
      for (u32 to = 0; to < world; ++to)
        *group->rank(from).at<u64>(8 * from, to) = 100 * from + to;
    for (u32 to = 0; to < world; ++to)
      for (u32 from = 0; from < world; ++from)
        EXPECT_EQ(*group->rank(to).at<u64>(8 * from), 100 * from + to);
  }
}

TEST_F(GpuGroup, WindowsMayLieAnywhere) {
  const u32 world = 4;
  const auto group = create({.world = world, .addressing = Addressing::kTable}).value();
  EXPECT_EQ(fake_->live().ranges, static_cast<int>(world));
  for (u32 r = 0; r < world; ++r) {
    const auto& view = group->rank(r).view();
    ASSERT_NE(view.offsets, nullptr);
    EXPECT_EQ(view.offsets[r], 0);
    for (u32 peer = 0; peer < world; ++peer)
      EXPECT_EQ(view.at<u8>(64, peer), group->rank(peer).at<u8>(64));
  }
}

TEST_F(GpuGroup, RanksMayBeOnAnyGpuInAnyOrder) {
  const auto group =
      create(
          {.world = 3,
           .ranks = {{.rank = 2, .device = 0}, {.rank = 0, .device = 3}, {.rank = 1, .device = 1}}})
          .value();
  EXPECT_EQ(group->rank(0).device().context()->ordinal(), 3);
  EXPECT_EQ(group->rank(2).device().context()->ordinal(), 0);
  EXPECT_THAT(group->rank(2).device().describe(), HasSubstr("GPU 0 (Fake GPU, GPU-fa"));
}

TEST_F(GpuGroup, ResetZeroesEverythingButPlainMemory) {
  const auto group = create({.world = 2}).value();
  Rank& rank = group->rank(1);
  auto state = rank.allocate_state(256).value();
  auto plain = rank.allocate(256).value();
  auto host = rank.allocate_host(256).value();
  EXPECT_EQ(host.host<u8>()[255], 0);
  const u32 one = 1;
  for (void* target : {state.address(), plain.address(), static_cast<void*>(rank.at<u8>(kMiB)),
                       static_cast<void*>(rank.control())})
    ASSERT_TRUE(rank.write(target, &one, sizeof one, soon()).ok());
  auto* const record = rank.common(device::KernelId::kPushRows, 1ms).fault;
  record->kernel = device::KernelId::kPushRows;
  record->peer = 0;
  record->phase = device::Phase::kFlag;
  record->state = device::FaultRecord::kWritten;
  EXPECT_EQ(group->check().code(), Code::kPeerLost);
  ASSERT_TRUE(group->reset(soon()).ok());
  EXPECT_TRUE(group->check().ok());
  u32 got[4] = {9, 9, 9, 9};
  ASSERT_TRUE(rank.read(&got[0], state.address(), 4, soon()).ok());
  ASSERT_TRUE(rank.read(&got[1], plain.address(), 4, soon()).ok());
  ASSERT_TRUE(rank.read(&got[2], rank.at<u8>(kMiB), 4, soon()).ok());
  ASSERT_TRUE(rank.read(&got[3], rank.control(), 4, soon()).ok());
  EXPECT_THAT(got, ::testing::ElementsAre(0, 1, 0, 0));
}

TEST_F(GpuGroup, AResetThatCannotEndBreaksTheGroup) {
  const auto group = create({.world = 2}).value();
  fake_->hold_work(true);
  EXPECT_EQ(group->reset(Deadline::in(10ms)).code(), Code::kDeadline);
  fake_->hold_work(false);
  EXPECT_EQ(group->check().code(), Code::kClosed);
  EXPECT_EQ(group->reset(soon()).code(), Code::kClosed);
}

TEST_F(GpuGroup, TheSameGpuTwiceIsNamed) {
  expect_failure({.world = 2, .ranks = {{.rank = 0, .device = 1}, {.rank = 1, .device = 1}}},
                 Code::kInvalidArgument,
                 HasSubstr("rank 0 and rank 1 are on the same GPU, GPU-fa000000-"));
}

// As tests with more ranks than GPUs ask for; the fake machine has four.
TEST_F(GpuGroup, RanksMayShareGpusWhereTheSettingSaysSo) {
  ASSERT_EQ(::setenv("CROSSDOCK_SYMM_SHARE_GPUS", "true", 1), 0);
  {
    const auto around = create({.world = 6});
    ASSERT_TRUE(around.ok()) << around.error().describe();
    for (u32 r = 0; r < 6; ++r)
      EXPECT_EQ((*around)->rank(r).device().context()->ordinal(), static_cast<int>(r % 4));
    const auto together =
        create({.world = 2, .ranks = {{.rank = 0, .device = 1}, {.rank = 1, .device = 1}}});
    ASSERT_TRUE(together.ok()) << together.error().describe();
    EXPECT_NE((*together)->rank(0).at<u8>(0), (*together)->rank(1).at<u8>(0));
    EXPECT_NE((*together)->rank(0).device().stream()->handle(),
              (*together)->rank(1).device().stream()->handle());
  }
  ::unsetenv("CROSSDOCK_SYMM_SHARE_GPUS");
  EXPECT_TRUE(fake_->live() == before_) << "something was left behind";
}

TEST_F(GpuGroup, AGpuThatDoesNotExistIsNamed) {
  expect_failure({.world = 5}, Code::kInvalidArgument, HasSubstr("GPU 4 does not exist"));
  expect_failure({.world = 1, .ranks = {{.rank = 0}}}, Code::kInvalidArgument,
                 HasSubstr("GPU -1 does not exist"));
}

TEST_F(GpuGroup, PeersThatCannotReachEachOtherAreNamed) {
  fake_->set_peer_access(2, 0, false);
  expect_failure({.world = 4}, Code::kUnreachable,
                 AllOf(HasSubstr("rank 2 on GPU 2 (0000:1c:00.0) and rank 0 on GPU 0"),
                       HasSubstr("no peer access"), HasSubstr("nvidia-smi topo")));
  EXPECT_TRUE(create({.world = 2}).ok()) << "the others can";
  fake_->set_peer_access(2, 0, true);
  fake_->set_peer_atomics(1, 3, false);
  expect_failure({.world = 4}, Code::kUnreachable, HasSubstr("no atomics between them"));
}

TEST_F(GpuGroup, OutOfMemoryOnOneRankNamesIt) {
  fake_->set_device_bytes(2, 3 * kMiB);
  expect_failure({.world = 4}, Code::kNoMemory,
                 AllOf(HasSubstr("allocate the window of rank 2"),
                       HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"), HasSubstr("3 of 3 MiB are free")));
}

TEST_F(GpuGroup, AbilitiesThatAreMissingAreNamed) {
  fake_->set_attribute(cuda::DeviceAttribute::kVirtualMemoryManagement, 0);
  expect_failure({.world = 2}, Code::kUnsupported, HasSubstr("virtual memory management"));
}

TEST_F(GpuGroup, ImpossibleSizesAreRefused) {
  expect_failure({.world = 2}, Code::kInvalidArgument, HasSubstr("a window has at most"),
                 kMaxWindowBytes + 128);
}

// Every driver call of creating a group fails once, at each place where it is called.
TEST_F(GpuGroup, AFailureAnywhereLeavesNothing) {
  int failures = 0;
  for (const char* function :
       {"cuDeviceGetUuid", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",
        "cuStreamCreateWithPriority", "cuMemGetAllocationGranularity", "cuMemCreate",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemAlloc", "cuMemHostAlloc",
        "cuMemHostGetDevicePointer", "cuMemsetD8Async", "cuMemcpyAsync", "cuStreamQuery",
        "cuDeviceGetP2PAttribute"})
    for (int after = 0;; ++after) {
      fake_->fail({.function = function, .status = cuda::Status::kOutOfMemory, .after = after});
      const auto made = create({.world = 3, .addressing = Addressing::kTable});
      fake_->reset();
      if (made.ok()) {
        EXPECT_GT(after, 0) << function << " was never called";
        break;
      }
      ASSERT_TRUE(fake_->live() == before_) << function << " number " << after;
      ASSERT_FALSE(made.error().message.empty());
      ++failures;
    }
  EXPECT_GT(failures, 60);
}

TEST_F(GpuGroup, ThousandCyclesLeaveNothing) {
  const auto cycle = [&] {
    const auto group = create({.world = 2}, 64 << 10).value();
    ASSERT_TRUE(group->reset(soon()).ok());
  };
  for (int i = 0; i < 50; ++i)
    cycle();
  const auto before = crossdock::testing::process_use();
  for (int i = 0; i < 1000; ++i)
    cycle();
  const auto after = crossdock::testing::process_use();
  EXPECT_TRUE(fake_->live() == before_);
  crossdock::testing::expect_no_growth(before, after);
}

}  // namespace
}  // namespace crossdock::symm
