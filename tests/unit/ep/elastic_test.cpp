// Elastic groups through the API, in the twin, with members of one process in the place of
// processes: one leaves, another takes its seat, and what dispatch and combine bring is right
// before and after; a newcomer that does not fit is refused, and the others go on.
// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <gmock/gmock.h>
#include <optional>
#include <thread>
#include <vector>

#include "support/ep_group_rig.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct PathOf {
  const char* name;
  u32 tokens;
  ep::Path path;
};

class EpElastic : public ::testing::TestWithParam<PathOf> {
 protected:
  EpElastic() {
    case_ = {.world = 3, .max_tokens = GetParam().tokens, .combine_weights = false, .fixed = true};
    members_.resize(case_.world);
  }
  void TearDown() override { members_.clear(); }
  [[nodiscard]] ep::GroupOptions options(u32 rank, const EpCase& c) const {
    auto options = ep_options(c, symm::Backend::kCpu);
    options.ranks.ranks = {{.rank = rank}};
    options.ranks.place = symm::MeetingPlace{
        .store = "inproc://ep-elastic",
        .name = std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()),
        .fewest = 2,
        .settle = settle_};
    options.ep.masks = options.ep.mask_late = masks_;
    return options;
  }
  // What creates the member of a rank, and what reforms the group of one.
  using Step = std::function<Result<>()>;
  Step join(u32 rank, std::optional<EpCase> other = std::nullopt) {
    return [this, rank, c = other.value_or(case_)]() -> Result<> {
      CROSSDOCK_TRY(rig, EpGroupRig::create(c, options(rank, c)));
      members_[rank].emplace(std::move(rig));
      return {};
    };
  }
  Step again(u32 rank) {
    return [this, rank] { return members_[rank]->group().reform(ep_soon()); };
  }
  // Each on a thread, as processes would.
  static std::vector<Result<>> together(const std::vector<Step>& steps) {
    std::vector<Result<>> results(steps.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < steps.size(); ++i)
      threads.emplace_back([&, i] { results[i] = steps[i](); });
    for (auto& thread : threads)
      thread.join();
    return results;
  }
  static void expect_all(const std::vector<Step>& steps) {
    for (const auto& done : together(steps))
      ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  void begin() {
    ASSERT_NO_FATAL_FAILURE(expect_all({join(0), join(1), join(2)}));
    ASSERT_NO_FATAL_FAILURE(rounds(kNoPeer));
  }
  void leave(u32 rank) { members_[rank].reset(); }
  void each(const std::function<void(EpGroupRig&, u32)>& call) {
    for (u32 rank = 0; rank < case_.world && !HasFatalFailure(); ++rank)
      if (members_[rank]) call(*members_[rank], rank);
  }
  // Rounds of those that are there; `gone`: the rank whose share the others do without.
  void rounds(u32 gone) {
    for (u32 turn = 0; turn < 3; ++turn)
      ASSERT_NO_FATAL_FAILURE(round(++seed_, gone)) << "seed " << seed_;
  }
  void round(u32 seed, u32 gone) {
    const EpInputs all(case_, seed);
    const EpInputs seen = gone == kNoPeer ? all : all.without(gone);
    std::vector<ep::Handle> handles;
    each([&](EpGroupRig& rig, u32 rank) {
      rig.group().core().launcher().set_schedule(weak_schedule(seed));
      rig.load(all);
      handles.push_back(
          rig.group().dispatch(rank, rig.tokens(rank), {.path = GetParam().path}).value());
    });
    each([](EpGroupRig& rig, u32) { rig.synchronize(); });
    for (const auto& handle : handles) {
      ASSERT_NO_FATAL_FAILURE(members_[handle.rank()]->check(handle, EpReference(case_, seen)));
      members_[handle.rank()]->write_expert_rows(handle, seen, seed);
      ASSERT_NO_FATAL_FAILURE(members_[handle.rank()]->combine(handle));
    }
    each([](EpGroupRig& rig, u32) { rig.synchronize(); });
    each([&](EpGroupRig& rig, u32 rank) {
      rig.check_combined(rank, EpReference(case_, seen), seed);
    });
  }
  [[nodiscard]] std::vector<u32> vacant(u32 rank) {
    const auto ranks = members_[rank]->group().vacant_ranks();
    return {ranks.begin(), ranks.end()};
  }
  // Rank 2 comes while the others work; they see it and let it in.
  std::vector<Result<>> let_in(const Step& newcomer) {
    Result<> joined;
    std::thread thread([&] { joined = newcomer(); });
    const ep::Group& group = members_[0]->group();
    const Deadline end = ep_soon();
    while (group.waiting_ranks(ep_soon()).value() != std::vector<u32>{2} && !end.passed())
      std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(end.passed()) << "nobody came for the seat";
    auto done = together({again(0), again(1)});
    thread.join();
    done.push_back(joined);
    return done;
  }

  EpCase case_;
  bool masks_ = true;
  // Long where all seats are taken, which ends it; where one stays vacant somebody waits for as
  // long.
  std::chrono::milliseconds settle_ = 2000ms;
  std::vector<std::optional<EpGroupRig>> members_;
  u32 seed_ = 0;
};

TEST_P(EpElastic, ARankLeavesAndAnotherTakesItsSeat) {
  ASSERT_NO_FATAL_FAILURE(begin());
  for (int turn = 0; turn < 2; ++turn) {
    std::optional<ep::Handle> before =
        members_[0]->group().dispatch(0, members_[0]->tokens(0)).value();
    leave(2);
    members_[0]->synchronize();  // rank 1 has made no such call: both of them are masked for it
    ASSERT_NO_FATAL_FAILURE(expect_all({again(0), again(1)}));
    for (const u32 rank : {0u, 1u}) {
      EXPECT_THAT(vacant(rank), ElementsAre(2));
      EXPECT_EQ(members_[rank]->group().masked(rank, ep_soon()).value(), 4u);
      EXPECT_THAT(members_[rank]->group().waiting_ranks(ep_soon()).value(), IsEmpty());
    }
    const auto refused = members_[0]->group().combine(*before, {.rows = members_[0]->combined(0)});
    before.reset();  // it keeps its slot
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr("from before the group's reform()"));
    ASSERT_NO_FATAL_FAILURE(rounds(2));
    for (const auto& done : let_in(join(2)))
      ASSERT_TRUE(done.ok()) << done.error().describe();
    for (const u32 rank : {0u, 1u, 2u}) {
      EXPECT_THAT(vacant(rank), IsEmpty());
      EXPECT_EQ(members_[rank]->group().masked(rank, ep_soon()).value(), 0u);
    }
    ASSERT_NO_FATAL_FAILURE(rounds(kNoPeer));
  }
}
// Before anybody has noticed, let alone reformed the group: kernels go on without it.
TEST_P(EpElastic, TheFirstStepWithoutARankIsRight) {
  ASSERT_NO_FATAL_FAILURE(begin());
  leave(2);
  ASSERT_NO_FATAL_FAILURE(rounds(2));
  EXPECT_EQ(members_[0]->group().masked(0, ep_soon()).value(), 4u);
  EXPECT_EQ(members_[1]->group().masked(1, ep_soon()).value(), 4u);
}
TEST_P(EpElastic, ANewcomerWithOtherSizesIsRefusedByNameAndTheOthersGoOn) {
  ASSERT_NO_FATAL_FAILURE(begin());
  leave(2);
  ASSERT_NO_FATAL_FAILURE(expect_all({again(0), again(1)}));
  EpCase other = case_;
  other.max_tokens = 64;
  const auto bytes = [](const EpCase& c, const ep::GroupOptions& o) {
    return std::to_string(ep::sizes(o.ep, c.world).value().window_bytes) + " bytes";
  };
  const std::string theirs = bytes(case_, options(0, case_));
  const std::string its = bytes(other, options(2, other));
  ASSERT_NE(theirs, its);
  for (const auto& done : let_in(join(2, other))) {
    ASSERT_EQ(done.code(), Code::kIncompatible);
    EXPECT_THAT(done.error().message, AllOf(HasSubstr("rank 2 asks for a window of " + its),
                                            HasSubstr("rank 0 for " + theirs)));
  }
  EXPECT_EQ(members_[0]->group().check().code(), Code::kClosed);
  ASSERT_NO_FATAL_FAILURE(expect_all({again(0), again(1)}));
  EXPECT_THAT(vacant(0), ElementsAre(2));
  ASSERT_NO_FATAL_FAILURE(rounds(2));
  for (const auto& done : let_in(join(2)))
    ASSERT_TRUE(done.ok()) << done.error().describe();
  ASSERT_NO_FATAL_FAILURE(rounds(kNoPeer));
}
// It has its window then, and all have mapped it.
TEST_P(EpElastic, ANewcomerThatCannotPrepareIsNamedToAllAndTheOthersGoOn) {
  ASSERT_NO_FATAL_FAILURE(begin());
  leave(2);
  ASSERT_NO_FATAL_FAILURE(expect_all({again(0), again(1)}));
  const auto done = let_in([this]() -> Result<> {
    const ep::GroupOptions o = options(2, case_);
    CROSSDOCK_TRY(window, ep::make_window(o.ep, case_.world));
    CROSSDOCK_TRY(group, symm::Group::create(o.ranks, window.layout));
    const auto made = ep::Core::create(
        std::move(group), make_error(Code::kUnsupported, "there is no compiler"), o.ep, ep_soon());
    return made.ok() ? Result<>() : made.error();
  });
  for (u32 rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(done[rank].code(), Code::kUnsupported) << rank;
    EXPECT_EQ(done[rank].error().message,
              rank == 2 ? "there is no compiler" : "rank 2 failed: there is no compiler");
  }
  for (const u32 rank : {0u, 1u})
    EXPECT_EQ(members_[rank]->group().check().code(), Code::kClosed);
  ASSERT_NO_FATAL_FAILURE(expect_all({again(0), again(1)}));
  EXPECT_THAT(vacant(0), ElementsAre(2));
  ASSERT_NO_FATAL_FAILURE(rounds(2));
  for (const auto& joined : let_in(join(2)))
    ASSERT_TRUE(joined.ok()) << joined.error().describe();
  ASSERT_NO_FATAL_FAILURE(rounds(kNoPeer));
}
TEST_P(EpElastic, WithoutMasksAVacantRankIsWaitedForAndNamed) {
  masks_ = false;
  ASSERT_NO_FATAL_FAILURE(expect_all({join(0), join(1), join(2)}));
  leave(2);
  ASSERT_NO_FATAL_FAILURE(expect_all({again(0), again(1)}));
  const EpInputs without = EpInputs(case_, 1).without(2);
  std::vector<ep::Handle> handles;
  each([&](EpGroupRig& rig, u32 rank) {
    rig.load(without);
    handles.push_back(
        rig.group().dispatch(rank, rig.tokens(rank), {.path = GetParam().path}).value());
  });
  each([](EpGroupRig& rig, u32) {
    const auto waited = rig.group().synchronize(ep_soon());
    ASSERT_EQ(waited.code(), Code::kPeerLost);
    EXPECT_THAT(waited.error().message, HasSubstr("for rank 2"));
  });
}
INSTANTIATE_TEST_SUITE_P(Path, EpElastic,
                         ::testing::Values(PathOf{"Few4", 4, ep::Path::kSmall},
                                           PathOf{"Few12", 12, ep::Path::kSmall},
                                           PathOf{"Large12", 12, ep::Path::kLarge}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace crossdock::testing
