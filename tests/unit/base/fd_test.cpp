// SPDX-License-Identifier: Apache-2.0
#include "base/fd.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <utility>

namespace crossdock::base {
namespace {

int open_null() {
  return ::open("/dev/null", O_RDONLY | O_CLOEXEC);
}
bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) != -1;
}

TEST(UniqueFd, ClosesAtTheEndOfItsScope) {
  int raw = -1;
  {
    UniqueFd fd(open_null());
    raw = fd.get();
    EXPECT_TRUE(fd);
    EXPECT_TRUE(is_open(raw));
  }
  EXPECT_FALSE(is_open(raw));
}

TEST(UniqueFd, MovesOwnershipOnce) {
  UniqueFd a(open_null());
  const int raw = a.get();
  UniqueFd b(std::move(a));
  EXPECT_FALSE(a.valid());  // NOLINT(bugprone-use-after-move): the moved-from state is the contract
  EXPECT_EQ(b.get(), raw);
  UniqueFd c(open_null());
  const int replaced = c.get();
  c = std::move(b);
  EXPECT_FALSE(is_open(replaced));
  EXPECT_EQ(c.get(), raw);
  UniqueFd& self = c;
  c = std::move(self);
  EXPECT_TRUE(is_open(raw));
}

TEST(UniqueFd, ReleaseGivesTheDescriptorAway) {
  UniqueFd fd(open_null());
  const int raw = fd.release();
  EXPECT_FALSE(fd.valid());
  EXPECT_TRUE(is_open(raw));
  fd.reset(raw);
  fd.reset();
  EXPECT_FALSE(is_open(raw));
}

}  // namespace
}  // namespace crossdock::base
