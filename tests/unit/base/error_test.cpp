// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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

// "internal error" is a bug of the library: what a machine or a wrong path answers is none.
TEST(Result, ErrnoOfFullDisksWrongPathsAndNetworksThatAreDownIsNoInternalError) {
  const auto is = [](int value, Code code, Retry retry) {
    const Error error = errno_error(value, "x");
    EXPECT_EQ(error.code, code) << error.message;
    EXPECT_EQ(error.retry, retry) << error.message;
  };
  for (const int full : {EAGAIN, ENOSPC, EDQUOT})
    is(full, Code::kNoMemory, Retry::kLater);
  is(EFBIG, Code::kNoMemory, Retry::kNo);
  for (const int path : {ENOTDIR, EISDIR, ELOOP, ENAMETOOLONG})
    is(path, Code::kInvalidArgument, Retry::kNo);
  is(ESTALE, Code::kNotFound, Retry::kNo);
  is(EROFS, Code::kDenied, Retry::kNo);
  for (const int network : {ENETDOWN, EHOSTDOWN, ENONET, ENETUNREACH, EHOSTUNREACH})
    is(network, Code::kUnreachable, Retry::kLater);
}

Result<std::vector<std::shared_ptr<int>>> list_of(const std::shared_ptr<int>& element) {
  return std::vector{element};
}

// The element tells whether the list that holds it is still alive: the test's own reference is one.
TEST(Result, ValueOfATemporaryLivesThroughARangeForAndAsAReference) {
  const auto element = std::make_shared<int>(7);
  for (const auto& seen : list_of(element).value()) {
    ASSERT_EQ(element.use_count(), 2);
    EXPECT_EQ(*seen, 7);
  }
  EXPECT_EQ(element.use_count(), 1);
  const auto& list = *list_of(element);
  ASSERT_EQ(element.use_count(), 2);
  EXPECT_EQ(list.size(), 1U);
  const Error& error = half(3).error();
  EXPECT_EQ(error.message, "n = 3 must be even");
}

// A named Result gives references, so nothing is copied by looking at it.
static_assert(std::is_same_v<decltype(std::declval<Result<int>&>().value()), int&>);
static_assert(std::is_same_v<decltype(std::declval<const Result<int>&>().value()), const int&>);
static_assert(std::is_same_v<decltype(std::declval<Result<std::unique_ptr<int>>>().value()),
                             std::unique_ptr<int>>);
static_assert(std::is_same_v<decltype(std::declval<Result<>>().error()), Error>);

TEST(ResultDeathTest, ValueOfAnErrorAborts) {
  EXPECT_DEATH((void)half(3).value(), "n = 3 must be even");
}

}  // namespace
}  // namespace crossdock
