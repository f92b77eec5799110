// What goes wrong between ranks, on the CPU: one that never comes, sizes that differ, tensors
// nobody takes, a list with a wrong row, one rank's failure told to the others. Every wait ends,
// names who is to blame, and a reset makes the group good again.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <gmock/gmock.h>

#include "support/coll_cases.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CollFaults : public ::testing::Test {
 protected:
  static coll::GroupOptions options(u32 world) {
    coll::Options o = coll_options();
    o.wait = 200ms;
    return {.ranks = {.world = world, .backend = symm::Backend::kCpu}, .coll = o};
  }
  // The group has failed with this, refuses calls, and works after a reset.
  static void expect_failure(CollRig& rig, Code code, const ::testing::Matcher<std::string>& text) {
    const auto begin = std::chrono::steady_clock::now();
    const auto failed = rig.group().synchronize(soon());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
    ASSERT_EQ(failed.code(), code) << (failed.ok() ? "it worked" : failed.error().describe());
    EXPECT_THAT(failed.error().message, text);
    EXPECT_EQ(rig.group().check().code(), code);
    u32 refused = 0;
    for (u32 r = 0; r < rig.world(); ++r)
      refused += rig.group().barrier(r).code() == code ? 1 : 0;
    EXPECT_GT(refused, 0u) << "calls are refused where it has failed";
    const auto reset = rig.group().reset(soon());
    ASSERT_TRUE(reset.ok()) << reset.error().describe();
    EXPECT_OK(rig.group().check());
    ASSERT_NO_FATAL_FAILURE(check_gathers(rig, 2, 160));
    ASSERT_NO_FATAL_FAILURE(check_pipeline(rig, 1, 5));
    ASSERT_NO_FATAL_FAILURE(check_rows<std::int32_t>(rig, 5));
  }
};

TEST_F(CollFaults, ARankThatNeverComesToAGatherIsNamed) {
  CollRig rig(options(3));
  std::vector<coll::Session> sessions;
  for (const u32 r : {0u, 2u}) {
    sessions.push_back(rig.group().begin(r).value());
    EXPECT_OK(sessions.back().all_gather(rig.memory<u8>(r, 64), rig.memory<u8>(r, 192), 64));
  }
  expect_failure(rig, Code::kPeerLost,
                 AllOf(HasSubstr("rank 0 waited 200.000 ms for rank 1 to give its input"),
                       HasSubstr("of 64 bytes"), HasSubstr("reset()")));
  EXPECT_EQ(sessions[0].all_gather(rig.memory<u8>(0, 64), rig.memory<u8>(0, 192), 64).code(),
            Code::kClosed);
}

TEST_F(CollFaults, SeveralThatDoNotComeAreNamed) {
  CollRig rig(options(4));
  EXPECT_OK(rig.group().barrier(0));
  EXPECT_OK(rig.group().barrier(2));
  expect_failure(rig, Code::kPeerLost,
                 HasSubstr("rank 0 waited 200.000 ms for ranks 1, 3 to come"));
}

TEST_F(CollFaults, GathersOfOtherSizesAreFoundOut) {
  CollRig rig(options(2));
  for (const u32 r : {0u, 1u}) {
    auto session = rig.group().begin(r).value();
    const u64 bytes = r == 0 ? 64 : 128;
    EXPECT_OK(session.all_gather(rig.memory<u8>(r, 128), rig.memory<u8>(r, 256), bytes));
  }
  expect_failure(rig, Code::kIncompatible,
                 AllOf(HasSubstr("all_gather of 128 bytes at 0 on rank 1"),
                       HasSubstr("all_gather of 64 bytes at 0 on rank 0")));
}

TEST_F(CollFaults, AnotherCallThanThePeersIsFoundOut) {
  CollRig rig(options(2));
  auto first = rig.group().begin(0).value();
  auto second = rig.group().begin(1).value();
  EXPECT_OK(first.all_gather(rig.memory<u8>(0, 64), rig.memory<u8>(0, 128), 64));
  EXPECT_OK(second.reduce_scatter(rig.memory<u8>(1, 128), rig.memory<u8>(1, 64), 16,
                                  coll::DataType::kF32));
  expect_failure(rig, Code::kIncompatible, HasSubstr("reduce_scatter of 64 bytes"));
}

TEST_F(CollFaults, TensorsThatNobodyTakesStopTheSender) {
  CollRig rig(options(2));
  for (int i = 0; i < 3; ++i)  // one more than may be in flight
    EXPECT_OK(rig.group().send(0, 1, rig.memory<u8>(0, 64), 64));
  expect_failure(rig, Code::kPeerLost,
                 HasSubstr("rank 0 waited 200.000 ms for rank 1 to receive the tensor"));
}

TEST_F(CollFaults, ATensorOfAnotherSizeIsFoundOut) {
  CollRig rig(options(2));
  EXPECT_OK(rig.group().send(0, 1, rig.memory<u8>(0, 64), 64));
  EXPECT_OK(rig.group().receive(1, 0, rig.memory<u8>(1, 64), 32));
  expect_failure(rig, Code::kIncompatible,
                 HasSubstr("rank 0 sends a tensor of 64 bytes, rank 1 receives one of 32"));
}

TEST_F(CollFaults, ATensorThatNeverComesNamesItsSender) {
  CollRig rig(options(3));
  EXPECT_OK(rig.group().receive(1, 2, rig.memory<u8>(1, 64), 32));
  expect_failure(rig, Code::kPeerLost,
                 HasSubstr("rank 1 waited 200.000 ms for rank 2 to send a tensor of 32 bytes"));
}

TEST_F(CollFaults, ARowThatTheTableDoesNotHaveIsNamed) {
  CollRig rig(options(2));
  const std::vector<std::int32_t> numbers{3, 74, 5};
  EXPECT_OK(rig.group().fetch_rows(0, rig.memory(0, numbers), 3, rig.memory<u8>(0, 3 * 208)));
  expect_failure(rig, Code::kInvalidArgument,
                 AllOf(HasSubstr("fetch_rows"), HasSubstr("place 1 of the list names row 74")));
}

// Rank 1 comes too late: rank 0 has given up, goes on and overwrites the slot that rank 1 has not
// read. Rank 1 must not take that for its tensor.
TEST_F(CollFaults, WhoComesTooLateIsToldAndTakesNoWrongData) {
  CollRig rig(options(2));
  for (u32 i = 0; i < 3; ++i)
    EXPECT_OK(rig.group().send(0, 1, rig.memory(0, bytes_of(0, i, 64)), 64));
  ASSERT_EQ(rig.group().synchronize(soon()).code(), Code::kPeerLost);
  // Slot 0 has the third tensor by now.
  EXPECT_OK(rig.group().core().group().check());
  u8* const tensor = rig.memory<u8>(1, 64);
  EXPECT_OK(rig.group().receive(1, 0, tensor, 64));
  (void)rig.group().synchronize(soon());
  // Its lane has ended too; of two failures check() gives that of the first rank, a call of rank 1
  // its own.
  const auto second = rig.group().barrier(1);
  ASSERT_EQ(second.code(), Code::kPeerLost) << (second.ok() ? "it worked" : "");
  EXPECT_THAT(second.error().message, HasSubstr("rank 1 was told by rank 0 that it has failed"));
  EXPECT_OK(rig.group().reset(soon()));
  ASSERT_NO_FATAL_FAILURE(check_pipeline(rig, 1, 5));
}

TEST_F(CollFaults, AGroupMayGoWhileItsLanesWait) {
  coll::GroupOptions o = options(2);
  o.coll.wait = std::chrono::hours(1);
  CollRig rig(o);
  EXPECT_OK(rig.group().barrier(0));
  EXPECT_EQ(rig.group().synchronize(Deadline::in(50ms)).code(), Code::kDeadline);
}

}  // namespace
}  // namespace crossdock::testing
