// The record of a kernel that gave up, as an error.
// SPDX-License-Identifier: Apache-2.0
#include "symm/fault.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace crossdock::symm {
namespace {

using device::FaultRecord;
using ::testing::HasSubstr;

FaultRecord record_of(device::Phase phase) {
  FaultRecord record{};
  record.state = FaultRecord::kEmpty + 1;
  record.phase = phase;
  record.peer = 1;
  return record;
}

TEST(Fault, AMistakeOfTheCallerIsMendedByNoReconnection) {
  auto record = record_of(device::Phase::kRouting);
  record.seen = 99;
  const Error error = read_fault(record).error();
  EXPECT_EQ(error.code, Code::kInvalidArgument);
  EXPECT_EQ(error.scope, Scope::kCall);
  EXPECT_EQ(error.retry, Retry::kNo);
  EXPECT_THAT(error.message, HasSubstr("chooses expert 99"));
}

TEST(Fault, APeerThatIsLateMayComeBack) {
  const Error error = read_fault(record_of(device::Phase::kSlotFree)).error();
  EXPECT_EQ(error.code, Code::kPeerLost);
  EXPECT_EQ(error.scope, Scope::kPeer);
  EXPECT_EQ(error.retry, Retry::kAfterReconnect);
}

}  // namespace
}  // namespace crossdock::symm
