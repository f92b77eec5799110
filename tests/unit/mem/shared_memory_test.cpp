// SPDX-License-Identifier: Apache-2.0
#include "mem/shared_memory.hpp"

#include <cerrno>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace crossdock::mem {
namespace {

TEST(SharedMemory, IsZeroedWritableAndSharedByItsDescriptor) {
  auto memory = SharedMemory::create(3 * 4096 + 5);
  ASSERT_TRUE(memory.ok()) << memory.error().describe();
  EXPECT_EQ(memory->size(), 3u * 4096 + 5);
  for (const std::byte b : memory->bytes())
    ASSERT_EQ(b, std::byte{0});
  memory->data()[4097] = std::byte{42};
  void* const other = ::mmap(nullptr, 8192, PROT_READ, MAP_SHARED, memory->fd(), 0);
  ASSERT_NE(other, MAP_FAILED);
  EXPECT_EQ(static_cast<const std::byte*>(other)[4097], std::byte{42});
  ::munmap(other, 8192);
}

TEST(SharedMemory, CannotBeResizedByAnyHolder) {
  auto memory = SharedMemory::create(1 << 20);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(::ftruncate(memory->fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(memory->fd(), 2 << 20), -1);
  EXPECT_EQ(::fcntl(memory->fd(), F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_NE(::fcntl(memory->fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(SharedMemory, OfThisProcessAloneNeedsNoDescriptor) {
  auto memory = SharedMemory::create(3 * 4096 + 5, {.shared = false, .populate = true});
  ASSERT_TRUE(memory.ok()) << memory.error().describe();
  EXPECT_EQ(memory->fd(), -1);
  EXPECT_EQ(memory->size(), 3u * 4096 + 5);
  for (const std::byte b : memory->bytes())
    ASSERT_EQ(b, std::byte{0});
  memory->data()[4097] = std::byte{42};
}

TEST(SharedMemory, RefusesNonsenseWithASentence) {
  const auto zero = SharedMemory::create(0);
  EXPECT_EQ(zero.code(), Code::kInvalidArgument);
  const auto huge = SharedMemory::create(std::size_t{1} << 63);
  EXPECT_EQ(huge.code(), Code::kInvalidArgument);
  EXPECT_NE(huge.error().message.find("address space"), std::string::npos);
}

TEST(SharedMemory, MovesOwnershipAndClosesOnce) {
  auto first = SharedMemory::create(4096, {.populate = true});
  ASSERT_TRUE(first.ok());
  const int fd = first->fd();
  SharedMemory second = std::move(*first);
  EXPECT_EQ(first->data(), nullptr);  // NOLINT(bugprone-use-after-move)
  second.data()[0] = std::byte{1};
  second = SharedMemory();
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
}

}  // namespace
}  // namespace crossdock::mem
