// Copies of a rank on a fake GPU: larger than the stage, between memories of GPUs, and behind work
// that is not done by the deadline.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <vector>

#include "support/fake_cuda/fixture.hpp"
#include "symm/group.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;

class RankCopies : public crossdock::testing::FakeCudaTest {
 protected:
  static Deadline soon() { return Deadline::in(60s); }
  static device::SymmetricLayout layout() {
    device::SymmetricLayout layout;
    (void)layout.add("data", 4096);
    return layout;
  }
  static std::vector<u8> numbered(std::size_t bytes) {
    std::vector<u8> out(bytes);
    for (std::size_t i = 0; i < bytes; ++i)
      out[i] = static_cast<u8>(i * 131 + i / 4096);
    return out;
  }
};

TEST_F(RankCopies, AnySizeThereAndBackAndBetweenMemoriesOfAGpu) {
  const auto group = Group::create({.world = 1}, layout(), driver_).value();
  Rank& rank = group->rank(0);
  for (const std::size_t bytes : {1u, 4096u, (1u << 20) - 1, 1u << 20, (3u << 20) + 5}) {
    const std::vector<u8> sent = numbered(bytes);
    const LocalMemory first = rank.allocate(bytes).value(), second = rank.allocate(bytes).value();
    ASSERT_TRUE(rank.write(first.address(), sent.data(), bytes, soon()).ok());
    ASSERT_TRUE(rank.write(second.address(), first.address(), bytes, soon()).ok());
    std::vector<u8> got(bytes);
    ASSERT_TRUE(rank.read(got.data(), second.address(), bytes, soon()).ok());
    EXPECT_EQ(got, sent) << bytes << " bytes";
  }
}

TEST_F(RankCopies, AReadEndsAtItsDeadlineAndTheNextOneIsRight) {
  const auto group = Group::create({.world = 1}, layout(), driver_).value();
  Rank& rank = group->rank(0);
  const std::vector<u8> old = numbered(64), fresh(64, 0xaa);
  const LocalMemory memory = rank.allocate(64).value();
  ASSERT_TRUE(rank.write(memory.address(), old.data(), 64, soon()).ok());
  fake_->hold_work(true);
  std::vector<u8> got(64);
  EXPECT_EQ(rank.read(got.data(), memory.address(), 64, Deadline::in(30ms)).code(),
            Code::kDeadline);
  EXPECT_EQ(rank.write(memory.address(), fresh.data(), 64, Deadline::in(30ms)).code(),
            Code::kDeadline);
  fake_->hold_work(false);
  ASSERT_TRUE(rank.write(memory.address(), fresh.data(), 64, soon()).ok());
  ASSERT_TRUE(rank.read(got.data(), memory.address(), 64, soon()).ok());
  EXPECT_EQ(got, fresh);
}

}  // namespace
}  // namespace crossdock::symm
