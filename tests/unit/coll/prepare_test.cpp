// Processes that prepare a group of collectives, with the fake driver: one that cannot is named to
// the others, which would wait for it in their first call.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <future>
#include <gmock/gmock.h>

#include <crossdock/symm/exchange.hpp>

#include "support/coll_cases.hpp"
#include "support/fake_cuda/fixture.hpp"
#include "unit/jit/jit_fixture.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

class CollPrepare : public FakeCudaTest {
 protected:
  using Compiler = Result<std::unique_ptr<jit::Jit>>;
  Compiler compiler() {
    return std::make_unique<jit::Jit>(jit::JitOptions{},
                                      std::make_unique<jit::FakeCompiler>(folder_.path / "tally"));
  }
  // Process 0 has rank 0, process 1 has ranks 1 and 2, with `bytes` of memory on the last GPU.
  Result<> create(u32 process, Compiler jit, u64 bytes) {
    const coll::Options options = coll_options();
    const char* name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    symm::GroupOptions ranks{.world = 3};
    ranks.ranks = {{.rank = 0, .device = 0}};
    if (process == 1) ranks.ranks = {{.rank = 1, .device = 1}, {.rank = 2, .device = 2}};
    CROSSDOCK_TRY(exchange,
                  symm::open_store_exchange("inproc://coll-prepare", name, {process, 2}, soon()));
    ranks.exchange = std::move(exchange);
    CROSSDOCK_TRY(window, coll::make_window(options, 3));
    CROSSDOCK_TRY(group, symm::Group::create(ranks, window.layout, driver_));
    if (process == 1 && bytes != 0) fake_->set_device_bytes(2, bytes);
    const auto made = coll::Core::create(std::move(group), std::move(jit), options, soon());
    return made.ok() ? Result<>() : made.error();
  }
  // What process 0 and process 1 are told.
  std::array<Result<>, 2> create_both(Compiler jit, u64 bytes = 0) {
    auto other = std::async(std::launch::async, [&] { return create(1, std::move(jit), bytes); });
    Result<> mine = create(0, compiler(), bytes);
    return {std::move(mine), other.get()};
  }
  jit::TemporaryFolder folder_;
};

// Two processes on the CPU whose options take the same memory and mean other things by it.
void expect_refused(const coll::Options& mine, const coll::Options& others, const char* differing,
                    const char* other) {
  const char* name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  const auto create = [&](u32 process, const coll::Options& options) -> Result<> {
    coll::GroupOptions made{.ranks = {.world = 2, .backend = symm::Backend::kCpu}, .coll = options};
    made.ranks.ranks = {{.rank = process}};
    CROSSDOCK_TRY(exchange,
                  symm::open_store_exchange("inproc://coll-agree", name, {process, 2}, soon()));
    made.ranks.exchange = std::move(exchange);
    const auto group = coll::Group::create(made);
    return group.ok() ? Result<>() : group.error();
  };
  ASSERT_EQ(coll::sizes(mine, 2)->window_bytes, coll::sizes(others, 2)->window_bytes);
  auto second = std::async(std::launch::async, [&] { return create(1, others); });
  for (const Result<>& told : {create(0, mine), second.get()}) {
    ASSERT_EQ(told.code(), Code::kIncompatible) << (told.ok() ? "got a group" : "");
    EXPECT_THAT(told.error().message, HasSubstr(differing));
    EXPECT_THAT(told.error().message, HasSubstr(other));
  }
}
TEST(CollAgreement, RowsOfAnotherWidthAreFoundOut) {
  expect_refused({.shard_rows = 4, .row_bytes = 32}, {.shard_rows = 8, .row_bytes = 16},
                 "'coll.table row' of 32 bytes", "'coll.table row' of 16 bytes");
}
TEST(CollAgreement, TensorsForOtherRanksAreFoundOut) {
  expect_refused({.tensor_bytes = 256, .pipeline = coll::Pipeline::kAll},
                 {.tensor_bytes = 256, .pipeline = coll::Pipeline::kNeighbours},
                 "'coll.slots for any rank'", "'coll.slots for neighbours'");
}

TEST_F(CollPrepare, ProcessesThatCanAllGetAGroup) {
  for (const Result<>& done : create_both(compiler()))
    EXPECT_TRUE(done.ok()) << done.error().describe();
}
TEST_F(CollPrepare, OneWithoutACompilerIsNamedToTheOthers) {
  const auto [told, failed] = create_both(make_error(Code::kUnsupported, "there is no compiler"));
  ASSERT_EQ(failed.code(), Code::kUnsupported);
  ASSERT_EQ(told.code(), Code::kUnsupported);
  EXPECT_EQ(told.error().message, "rank 1 failed: there is no compiler");
}
TEST_F(CollPrepare, OneWithoutMemoryIsNamedToTheOthers) {
  const auto [told, failed] = create_both(compiler(), 1);
  ASSERT_EQ(failed.code(), Code::kNoMemory);
  ASSERT_EQ(told.code(), Code::kNoMemory);
  EXPECT_EQ(told.error().message, "rank 2 failed: " + failed.error().message);
}

// Nothing of it does without a rank, and no call lets one in.
TEST(CollPlace, SeatsThatMayStayVacantAreRefused) {
  coll::GroupOptions options{
      .ranks = {.world = 4, .ranks = {{.rank = 0}}, .backend = symm::Backend::kCpu},
      .coll = coll_options()};
  options.ranks.place = symm::MeetingPlace{
      .store = "inproc://coll-place", .name = "vacant", .fewest = 1, .settle = {}};
  const auto made = coll::Group::create(options);
  ASSERT_EQ(made.code(), Code::kInvalidArgument);
  EXPECT_THAT(made.error().message, ::testing::AllOf(::testing::HasSubstr("fewest = 1 of 4 ranks"),
                                                     ::testing::HasSubstr("need all ranks")));
  options.ranks.world = 1;
  const auto all = coll::Group::create(options);
  EXPECT_TRUE(all.ok()) << all.error().describe();
}

}  // namespace
}  // namespace crossdock::testing
