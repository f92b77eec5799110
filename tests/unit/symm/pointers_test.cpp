// Which pointers a rank's kernels may follow, with the fake driver: by whose memory it is, and what
// the rank's GPU reaches.
// SPDX-License-Identifier: Apache-2.0
#include "symm/pointers.hpp"

#include <gmock/gmock.h>

#include "cuda/memory.hpp"
#include "support/fake_cuda/fixture.hpp"
#include "symm/group.hpp"

namespace crossdock::symm {
namespace {

using ::testing::HasSubstr;

class Pointers : public crossdock::testing::FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    device::SymmetricLayout layout;
    (void)layout.add("data", 4096);
    group_ = Group::create({.world = 2}, layout, driver_).value();
  }
  void TearDown() override {
    group_.reset();
    FakeCudaTest::TearDown();
  }
  [[nodiscard]] Result<> check(u32 rank, const void* p) const {
    return check_pointer(group_->rank(rank), {"ep", "dispatch", p, "rows"});
  }
  void refused(u32 rank, const void* p, const char* text) const {
    const auto got = check(rank, p);
    ASSERT_EQ(got.code(), Code::kInvalidArgument) << text;
    EXPECT_THAT(got.error().message, HasSubstr(text));
  }

  std::unique_ptr<Group> group_;
};

TEST_F(Pointers, MemoryOfAGpuIsFollowedByItsOwnRank) {
  const auto memory = cuda::DeviceMemory::allocate(context(0), 4096).value();
  EXPECT_TRUE(check(0, memory.as<u8>() + 100).ok());
  refused(1, memory.as<u8>(), "are memory of GPU 0: rank 1 needs them on GPU 1");
  int local = 0;
  refused(0, &local, "ep dispatch: rows at");
  refused(0, &local, "are not memory that the driver knows: rank 0 needs them on GPU 0");
  EXPECT_TRUE(check(0, nullptr).ok());
}

TEST_F(Pointers, PinnedMemoryIsMappedForAllGpus) {
  const auto pinned = cuda::PinnedMemory::allocate(context(0), 4096).value();
  EXPECT_TRUE(check(0, pinned.host()).ok());
  EXPECT_TRUE(check(1, pinned.as<u8>() + 4095).ok());
  fake_->set_unmapped(1, pinned.host());
  refused(1, pinned.host(), "are memory of the host that this GPU does not reach there");
}

TEST_F(Pointers, ManagedMemoryIsMappedForAllGpus) {
  const auto managed = cuda::DeviceMemory::allocate(context(0), 4096).value();
  refused(1, managed.as<u8>(), "are memory of GPU 0");
  fake_->set_managed(managed.as<u8>());
  EXPECT_TRUE(check(0, managed.as<u8>()).ok());
  EXPECT_TRUE(check(1, managed.as<u8>()).ok());
}

}  // namespace
}  // namespace crossdock::symm
