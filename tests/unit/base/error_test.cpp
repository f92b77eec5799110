// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <gtest/gtest.h>
#include <string>

#include <crossdock/core/result.hpp>

namespace crossdock {
namespace {

Result<int> half(int n) {
  if (n % 2 != 0) return invalid_argument("n = " + std::to_string(n) + " must be even");
  return n / 2;
}

Result<int> quarter(int n) {
  CROSSDOCK_TRY(h, half(n));
  CROSSDOCK_TRY(q, half(h));
  return q;
}

Result<> only_check(int n) {
  CROSSDOCK_CHECK_OK(half(n).ok() ? Result<>() : Result<>(half(n).error()));
  return {};
}

TEST(Result, PropagatesTheFirstError) {
  EXPECT_EQ(quarter(12).value(), 3);
  EXPECT_EQ(quarter(6).code(), Code::kInvalidArgument);
  EXPECT_EQ(quarter(6).error().message, "n = 3 must be even");
  EXPECT_TRUE(only_check(2).ok());
  EXPECT_EQ(only_check(3).code(), Code::kInvalidArgument);
}

TEST(Result, ErrorRemembersWhereItWasMade) {
  const Error error = invalid_argument("x");
  EXPECT_NE(std::string(error.where.file_name()).find("error_test.cpp"), std::string::npos);
}

TEST(Result, ErrnoKeepsTheNativeCodeAndClassifies) {
  const Error error = errno_error(ECONNRESET, "read from peer a");
  EXPECT_EQ(error.code, Code::kPeerLost);
  EXPECT_EQ(error.retry, Retry::kAfterReconnect);
  EXPECT_EQ(error.native, (Native{Native::Domain::kErrno, ECONNRESET}));
  EXPECT_NE(error.describe().find("read from peer a: Connection reset"), std::string::npos);
}

TEST(ResultDeathTest, ValueOfAnErrorAborts) {
  EXPECT_DEATH((void)half(3).value(), "n = 3 must be even");
}

}  // namespace
}  // namespace crossdock
