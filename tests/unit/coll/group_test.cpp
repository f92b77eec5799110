// Collectives on the CPU: worlds of 1 to 8 ranks in one process, every byte compared; a run of all
// of them mixed; what is refused.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <crossdock/coll/group.hpp>

#include "support/coll_cases.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

coll::GroupOptions cpu_options(u32 world, const coll::Options& options = coll_options()) {
  return {.ranks = {.world = world, .backend = symm::Backend::kCpu}, .coll = options};
}

class Worlds : public ::testing::TestWithParam<u32> {};

TEST_P(Worlds, GathersComeWholeAndSessionsFollowEachOther) {
  CollRig rig(cpu_options(GetParam()));
  for (const u64 bytes : {u64{16}, u64{4096}, u64{48} << 10})
    ASSERT_NO_FATAL_FAILURE(check_gathers(rig, 5, bytes));
}

TEST_P(Worlds, ScattersAddUpInEitherType) {
  CollRig rig(cpu_options(GetParam()));
  ASSERT_NO_FATAL_FAILURE(check_scatters<float>(rig, 3, 100));
  ASSERT_NO_FATAL_FAILURE(check_scatters<std::uint16_t>(rig, 3, 1000));
}

TEST_P(Worlds, TensorsComeInOrderWhateverIsInFlight) {
  CollRig rig(cpu_options(GetParam()));
  for (u32 step = 1; step < GetParam(); ++step)
    ASSERT_NO_FATAL_FAILURE(check_pipeline(rig, step, 9));
}

TEST_P(Worlds, RowsAreFetchedFromTheirOwners) {
  CollRig rig(cpu_options(GetParam()));
  ASSERT_NO_FATAL_FAILURE(check_rows<std::int32_t>(rig, 75));
}

TEST_P(Worlds, AllOfThemMixed) {
  coll::Options options = coll_options();
  options.wide_indices = true;
  CollRig rig(cpu_options(GetParam(), options));
  for (u32 round = 0; round < 3; ++round) {
    ASSERT_NO_FATAL_FAILURE(check_gathers(rig, 2, 160));
    if (GetParam() > 1) {
      ASSERT_NO_FATAL_FAILURE(check_pipeline(rig, 1, 3));
    }
    ASSERT_NO_FATAL_FAILURE(check_scatters<float>(rig, 1, 12));
    ASSERT_NO_FATAL_FAILURE(check_rows<std::int64_t>(rig, 9));
  }
  EXPECT_OK(rig.group().reset(soon()));
  ASSERT_NO_FATAL_FAILURE(check_gathers(rig, 2, 160));
}

INSTANTIATE_TEST_SUITE_P(OneToEight, Worlds, ::testing::Range(1u, 9u));

TEST(Coll, NeighboursAreARing) {
  coll::Options options = coll_options();
  options.pipeline = coll::Pipeline::kNeighbours;
  CollRig rig(cpu_options(4, options));
  ASSERT_NO_FATAL_FAILURE(check_pipeline(rig, 1, 5));
  ASSERT_NO_FATAL_FAILURE(check_pipeline(rig, 3, 5));
  const u8* const tensor = rig.memory<u8>(0, 16);
  const auto far = rig.group().send(0, 2, tensor, 16);
  ASSERT_EQ(far.code(), Code::kInvalidArgument);
  EXPECT_THAT(far.error().message, HasSubstr("between neighbours"));
}

TEST(Coll, SizesAreStatedAndWrongOptionsRefused) {
  const coll::Sizes sizes = coll::sizes(coll_options(), 4).value();
  EXPECT_EQ(sizes.pipeline_bytes, 4u * 2 * 8192);
  EXPECT_EQ(sizes.table_bytes, 37u * 208);
  EXPECT_GE(sizes.window_bytes, sizes.control_bytes + sizes.session_bytes + sizes.pipeline_bytes);
  const auto refused = [](auto change, const char* text) {
    coll::Options options = coll_options();
    change(options);
    const auto made = coll::sizes(options, 4);
    ASSERT_EQ(made.code(), Code::kInvalidArgument);
    EXPECT_THAT(made.error().message, HasSubstr(text));
  };
  refused([](coll::Options& o) { o.gathers = 33; }, "gathers = 33 must be 1 to 32");
  refused([](coll::Options& o) { o.inflight = 0; }, "inflight = 0 must be 1 to 64");
  refused([](coll::Options& o) { o.row_bytes = 24; }, "row_bytes = 24 must be a multiple of 16");
  refused([](coll::Options& o) { o.fetch_sms = 0; }, "fetch_sms");
  refused([](coll::Options& o) { o.wait = {}; }, "wait must be longer than 0");
  refused([](coll::Options& o) { o.shard_rows = u64{1} << 60; }, "more than 1 TiB");
}

TEST(Coll, ArgumentsAreRefusedWithTheirRule) {
  CollRig rig(cpu_options(2));
  coll::Group& group = rig.group();
  u8* const memory = rig.memory<u8>(0, 4096);
  const auto refused = [](const auto& result, Code code, const char* text) {
    ASSERT_EQ(result.code(), code);
    EXPECT_THAT(result.error().message, HasSubstr(text));
  };
  refused(group.begin(2), Code::kInvalidArgument, "rank 2 is not one of the 2 ranks");
  refused(group.send(0, 0, memory, 16), Code::kInvalidArgument, "must be another");
  refused(group.send(0, 1, memory, 24), Code::kInvalidArgument, "multiple of 16");
  refused(group.send(0, 1, memory, 16 << 10), Code::kInvalidArgument, "tensor_bytes = 8192");
  refused(group.receive(0, 1, nullptr, 16), Code::kInvalidArgument, "null");
  refused(group.write_rows(0, 30, memory, 8), Code::kInvalidArgument, "rows 30 to 38 of the 37");
  refused(group.fetch_rows(0, memory, 4, memory + 8), Code::kInvalidArgument, "multiple of 16");
  refused(group.fetch_rows(0, nullptr, 4, memory), Code::kInvalidArgument, "null");
  refused(group.fetch_rows(0, memory + 2, 4, memory), Code::kInvalidArgument, "a multiple of 4");
  auto session = group.begin(0);
  ASSERT_TRUE(session.ok());
  refused(group.begin(0), Code::kBusy, "a session that has not ended");
  refused(session->input(65 << 10), Code::kInvalidArgument, "session_bytes = 65536");
  refused(session->all_gather(memory, memory, 8), Code::kInvalidArgument, "multiple of 16");
  refused(session->all_gather(rig.rank(0).at<u8>(rig.group().core().memory().control_bytes + 128),
                              memory, 16),
          Code::kInvalidArgument, "none that input() gave out");
  // Sizes whose products would wrap to small ones.
  const void* const given = session->input(128).value();
  refused(session->all_gather(given, memory, ~u64{0} - 127), Code::kInvalidArgument, "room for");
  refused(session->reduce_scatter(given, memory, (u64{1} << 63) + 8, coll::DataType::kBf16),
          Code::kInvalidArgument, "session_bytes = 65536 has room for");
  refused(session->reduce_scatter(memory, memory + 8, 8, coll::DataType::kBf16),
          Code::kInvalidArgument, "a multiple of 16");
  EXPECT_OK(session->end());
  EXPECT_OK(session->end());
  refused(session->all_gather(memory, memory, 16), Code::kClosed, "has ended");
}

TEST(Coll, ASessionHasSoManyCalls) {
  CollRig rig(cpu_options(1));
  auto session = rig.group().begin(0).value();
  u8* const memory = rig.memory<u8>(0, 64);
  for (int i = 0; i < 4; ++i)
    EXPECT_OK(session.all_gather(memory, memory + 16, 16));
  const auto fifth = session.all_gather(memory, memory + 16, 16);
  ASSERT_EQ(fifth.code(), Code::kInvalidArgument);
  EXPECT_THAT(fifth.error().message, HasSubstr("at most gathers = 4"));
}

TEST(Coll, WhatTheGroupWasNotMadeForIsRefused) {
  CollRig rig(cpu_options(2, {.wait = std::chrono::seconds(5)}));
  u8* const memory = rig.memory<u8>(0, 64);
  EXPECT_EQ(rig.group().begin(0).code(), Code::kInvalidArgument);
  EXPECT_EQ(rig.group().send(0, 1, memory, 16).code(), Code::kInvalidArgument);
  EXPECT_EQ(rig.group().fetch_rows(0, memory, 1, memory).code(), Code::kInvalidArgument);
  EXPECT_EQ(rig.group().shard(0).code(), Code::kInvalidArgument);
  for (const u32 r : {0u, 1u})
    EXPECT_OK(rig.group().barrier(r));
  ASSERT_NO_FATAL_FAILURE(rig.finish());
}

}  // namespace
}  // namespace crossdock::testing
