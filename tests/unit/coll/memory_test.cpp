// Whose memory calls take, with the fake driver: a copy between a GPU and memory of the host that
// is not pinned would keep the caller in the driver until its stream has come there.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/memory.hpp"

#include <gmock/gmock.h>

#include "unit/coll/core_fixture.hpp"

namespace crossdock::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CollMemory : public CollCoreTest {
 protected:
  static void refused(const char* call, const Result<>& result) {
    ASSERT_EQ(result.code(), Code::kInvalidArgument) << call;
    EXPECT_THAT(result.error().message,
                AllOf(HasSubstr(std::string("coll ") + call),
                      HasSubstr("not memory that the driver knows"), HasSubstr("pinned memory")));
  }
};

TEST_F(CollMemory, PageableMemoryIsRefusedByEveryCallThatCopiesIt) {
  alignas(128) static u8 heap[1024];
  const auto known = cuda::DeviceMemory::allocate(context(0), 1024).value();
  const int before = fake_->calls("cuMemcpyAsync");
  refused("send", core_->send(0, 1, heap, 64, nullptr));
  refused("receive", core_->receive(0, 1, heap, 64, nullptr));
  refused("write_rows", core_->write_rows(0, {.rows = heap, .count = 1}, nullptr));
  auto session = core_->begin(0, nullptr).value();
  refused("all_gather", session.all_gather(heap, known.as<u8>(), 64));
  refused("all_gather", session.all_gather(known.as<u8>(), heap, 64));
  refused("reduce_scatter", session.reduce_scatter(heap, known.as<u8>(), 16, coll::DataType::kF32));
  EXPECT_OK(session.end());
  EXPECT_EQ(fake_->calls("cuMemcpyAsync"), before);
  EXPECT_OK(core_->synchronize(soon()));
}

TEST_F(CollMemory, PinnedMemoryAndThatOfOtherGpusWillDo) {
  const auto pinned = cuda::PinnedMemory::allocate(context(0), 128).value();
  const auto other = cuda::DeviceMemory::allocate(context(1), 128).value();
  EXPECT_OK(core_->send(0, 1, pinned.host(), 64, nullptr));
  EXPECT_OK(core_->send(0, 1, other.as<u8>(), 64, nullptr));
  EXPECT_OK(core_->receive(1, 0, other.as<u8>() + 64, 64, nullptr));
  EXPECT_OK(core_->receive(1, 0, pinned.as<u8>() + 64, 64, nullptr));
  EXPECT_OK(core_->synchronize(soon()));
}

}  // namespace
}  // namespace crossdock::testing
