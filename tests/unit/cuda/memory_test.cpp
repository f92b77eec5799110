// Device and pinned memory, registration, copies in stream order, pointer queries, on the fake.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/memory.hpp"

#include <gmock/gmock.h>
#include <vector>

#include "support/fake_cuda/fixture.hpp"

namespace crossdock::cuda {
namespace {

using ::testing::HasSubstr;
using Memory = crossdock::testing::FakeCudaTest;

TEST_F(Memory, OutOfMemorySaysWhatWasAskedAndWhatIsFree) {
  fake_->set_device_bytes(1, 8 << 20);
  const Context ctx = context(1);
  const auto held = DeviceMemory::allocate(ctx, 6 << 20);
  const auto result = DeviceMemory::allocate(ctx, 4 << 20);
  ASSERT_TRUE(held.ok());
  EXPECT_EQ(result.code(), Code::kNoMemory);
  EXPECT_EQ(result.error().retry, Retry::kLater);
  EXPECT_THAT(result.error().message,
              HasSubstr("allocate 4194304 bytes on GPU 1 (2 of 8 MiB free)"));
  EXPECT_THAT(result.error().message, HasSubstr("CUDA_ERROR_OUT_OF_MEMORY: out of memory"));
}

TEST_F(Memory, NothingIsNotAllocated) {
  const Context ctx = context();
  EXPECT_EQ(DeviceMemory::allocate(ctx, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(PinnedMemory::allocate(ctx, 0).code(), Code::kInvalidArgument);
}

TEST_F(Memory, MovedMemoryIsFreedOnce) {
  const Context ctx = context();
  auto a = DeviceMemory::allocate(ctx, 4096).value();
  auto b = DeviceMemory::allocate(ctx, 4096).value();
  const DevicePtr kept = a.address();
  b = std::move(a);
  EXPECT_EQ(b.address(), kept);
  EXPECT_EQ(fake_->live().blocks, before_.blocks + 1);
}

TEST_F(Memory, CopiesFillsAndValuesInStreamOrder) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const auto device = DeviceMemory::allocate(ctx, 4096).value();
  const auto pinned = PinnedMemory::allocate(ctx, 4096).value();
  EXPECT_EQ(pinned.as<std::uint32_t>()[1023], 0u);
  ASSERT_TRUE(fill_words_async(device.address(), 0xabcd1234, 1024, stream).ok());
  ASSERT_TRUE(copy_async(pinned.device(), device.address(), 4096, stream).ok());
  EXPECT_EQ(pinned.as<std::uint32_t>()[1023], 0xabcd1234u);
  ASSERT_TRUE(write_value_async(stream, pinned.device(), 77).ok());
  ASSERT_TRUE(wait_value_async(stream, pinned.device(), 77).ok());
  EXPECT_EQ(*pinned.as<std::uint64_t>(), 77u);
}

TEST_F(Memory, WordsAreWrittenAndWaitedForInOrder) {
  const Context ctx = context();
  const Stream stream = Stream::create(ctx).value();
  const auto pinned = PinnedMemory::allocate(ctx, 4096).value();
  auto* const words = pinned.as<std::uint64_t>();
  // More than one call of the driver takes.
  std::vector<WordOp> ops;
  for (std::uint64_t i = 0; i < 300; ++i) {
    ops.push_back({WordOp::Kind::kWrite, words + i, i + 1});
    ops.push_back({WordOp::Kind::kWait, words + i, i + 1});
  }
  ASSERT_TRUE(words_async(stream, ops).ok());
  EXPECT_EQ(fake_->calls("cuStreamBatchMemOp"), 3);
  EXPECT_EQ(words[299], 300u);
  // Until the word is there, nothing that comes later happens, whichever stream writes it.
  const Stream other = Stream::create(ctx).value();
  ASSERT_TRUE(words_async(stream, std::vector<WordOp>{{WordOp::Kind::kWait, words, 2},
                                                      {WordOp::Kind::kWrite, words + 1, 77}})
                  .ok());
  EXPECT_FALSE(*stream.idle());
  EXPECT_EQ(words[1], 2u);
  ASSERT_TRUE(write_value_async(other, device_ptr(words), 2).ok());
  EXPECT_TRUE(*stream.idle());
  EXPECT_EQ(words[1], 77u);
}

TEST_F(Memory, RegisteringTwiceIsRefusedAndEndsWithTheObject) {
  const Context ctx = context();
  std::vector<std::byte> host(8192);
  {
    const auto first = HostRegistration::add(ctx, host.data(), host.size());
    ASSERT_TRUE(first.ok());
    EXPECT_EQ(first->device(), device_ptr(host.data()));
    EXPECT_EQ(HostRegistration::add(ctx, host.data(), host.size()).code(), Code::kInvalidArgument);
  }
  EXPECT_TRUE(HostRegistration::add(ctx, host.data(), host.size()).ok());
}

TEST_F(Memory, MappingFailureFreesThePinnedBlock) {
  fake_->fail({.function = "cuMemHostGetDevicePointer", .status = Status::kNotSupported});
  EXPECT_EQ(PinnedMemory::allocate(context(), 64).code(), Code::kUnsupported);
}

TEST_F(Memory, PointersAreTold) {
  const Context ctx = context(2);
  const auto device = DeviceMemory::allocate(ctx, 4096).value();
  const auto info = query_pointer(*driver_, device.address() + 100).value();
  EXPECT_EQ(info.type, MemoryType::kDevice);
  EXPECT_EQ(info.ordinal, 2);
  EXPECT_EQ(info.base, device.address());
  EXPECT_EQ(info.bytes, 4096u);
  int local = 0;
  const auto host = query_pointer(*driver_, device_ptr(&local)).value();
  EXPECT_EQ(host.type, MemoryType::kHost);
  EXPECT_EQ(host.ordinal, -1);
}

}  // namespace
}  // namespace crossdock::cuda
