// The host side of the first kernels in the twin: the whole suite on worlds of several sizes and
// under several schedules; wrong arguments; a rank that never comes; the list of variants.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <gmock/gmock.h>

#include "jit/kernel_list.hpp"
#include "symm/copy.hpp"
#include "symm/kernels/check.hpp"
#include "symm/kernels/list.hpp"
#include "symm/kernels/suite.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

Deadline soon() {
  return Deadline::in(120s);
}

// A group in the twin with a suite over its window.
struct Fixture {
  device::SymmetricLayout layout;
  SuiteAreas areas;
  std::unique_ptr<Group> group;
  std::unique_ptr<Launcher> launcher;
  std::unique_ptr<Suite> suite;

  explicit Fixture(u32 world, const SuiteShape& shape = {},
                   Addressing addressing = Addressing::kStride) {
    areas = add_suite(layout, world, shape);
    group = Group::create({.world = world,
                           .backend = Backend::kCpu,
                           .addressing = addressing,
                           .cpu_local_bytes = 4 << 20},
                          layout)
                .value();
    launcher = std::make_unique<Launcher>(Launcher::create(*group, nullptr).value());
    suite = std::make_unique<Suite>(Suite::create(*launcher, areas, shape, soon()).value());
  }
};

twin::Schedule schedule(u64 seed) {
  twin::Schedule s;
  s.seed = seed;
  s.weak = true;
  s.stale = true;
  s.fire_deadlines = true;
  return s;
}

TEST(SymmKernels, TheSuitePassesInEveryWorld) {
  for (const u32 world : {1u, 2u, 3u, 5u}) {
    SCOPED_TRACE(world);
    Fixture f(world, {}, world == 3 ? Addressing::kTable : Addressing::kStride);
    for (u64 seed = 1; seed <= 3; ++seed) {
      f.launcher->set_schedule(schedule(seed));
      for (const Suite::Step& step : Suite::steps()) {
        const auto done = ((*f.suite).*step.run)(soon());
        ASSERT_TRUE(done.ok()) << step.name << ", seed " << seed << ": " << done.error().describe();
      }
    }
  }
}

TEST(SymmKernels, TheSuiteSeesAWrongWord) {
  Fixture f(2);
  // A stray write while the rows are pushed: into what rank 0 would have sent to itself.
  u32* word = f.group->rank(0).at<u32>(f.areas.rows.destination) + 5 * 12 + 7;
  ASSERT_TRUE(f.group->twin()
                  ->launch_body({.rank = 0, .stream = 1, .block = 1, .name = "stray"},
                                [word] { *word = 42; })
                  .ok());
  const auto pushed = f.suite->push_rows(soon());
  ASSERT_FALSE(pushed.ok());
  EXPECT_EQ(pushed.error().code, Code::kInternal);
  EXPECT_THAT(pushed.error().message, HasSubstr("word 7 of row 5 from rank 0 is 0x2a at rank 0"));
  EXPECT_TRUE(f.suite->push_rows(soon()).ok());
}

TEST(SymmKernels, ARankThatNeverComesIsAnErrorAndAResetHelps) {
  Fixture f(3, {.wait = 5ms});
  ASSERT_TRUE(f.suite->run_all(soon()).ok());
  for (const u32 r : {0u, 2u})
    ASSERT_TRUE(f.suite->plain_barrier().launch(f.group->rank(r), 1).ok());
  const auto failed = f.launcher->synchronize(soon());
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code, Code::kPeerLost);
  EXPECT_EQ(failed.error().scope, Scope::kPeer);
  EXPECT_THAT(failed.error().message, HasSubstr("barrier"));
  EXPECT_THAT(failed.error().message, HasSubstr("for rank 1"));
  EXPECT_FALSE(f.suite->run_all(soon()).ok()) << "until a reset";
  ASSERT_TRUE(f.group->reset(soon()).ok());
  f.suite->forget();
  const auto again = f.suite->run_all(soon());
  EXPECT_TRUE(again.ok()) << again.error().describe();
}

// One kernel of rank 0 waits for a flag that another kernel of rank 0 sets.
Result<> wait_and_set(Fixture& f, int setting_stream) {
  const Rank& rank = f.group->rank(0);
  const auto kernel =
      f.launcher->prepare(flag_ping_pong_kernel(true), {.threads = 32}, soon()).value();
  device::FlagPingPongParams p{};
  p.common = rank.common(device::KernelId::kFlagPingPong, 5ms);
  p.view = rank.view();
  p.flag = f.areas.flag;
  const auto elapsed = f.group->rank(0).allocate(sizeof(u64)).value();
  p.elapsed_ns = elapsed.as<u64>();
  p.rounds = 1;
  p.first = 1;  // waits
  CROSSDOCK_CHECK_OK(f.launcher->launch(rank, kernel, {.stream = 0}, p));
  p.first = 0;  // sets its own
  CROSSDOCK_CHECK_OK(f.launcher->launch(rank, kernel, {.stream = setting_stream}, p));
  return f.launcher->synchronize(soon());
}

TEST(SymmKernels, StreamsOfARankRunSideBySideAndOneInOrder) {
  Fixture f(2);
  for (u64 seed = 1; seed <= 8; ++seed) {
    f.launcher->set_schedule(schedule(seed));
    const auto apart = wait_and_set(f, 1);
    EXPECT_TRUE(apart.ok()) << apart.error().describe();
    ASSERT_TRUE(f.group->reset(soon()).ok());
    EXPECT_EQ(wait_and_set(f, 0).code(), Code::kPeerLost) << "the second never starts";
    ASSERT_TRUE(f.group->reset(soon()).ok());
  }
}

TEST(SymmKernels, ABrokenRuleOfTheTwinIsAnErrorWithItsReport) {
  Fixture f(1);
  // A flag far outside of the window.
  auto kernel = FlagPingPong::create(*f.launcher, u64{1} << 40, {}, soon()).value();
  ASSERT_TRUE(kernel.launch(f.group->rank(0), {.first = 0, .second = 0}).ok());
  const auto failed = f.launcher->synchronize(soon());
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code, Code::kInternal);
  EXPECT_THAT(failed.error().message, HasSubstr("flag_ping_pong"));
  EXPECT_FALSE(f.launcher->last_report().ok());
}

TEST(SymmKernels, WgmmaAndConversionsMatchTheirDefinitions) {
  Fixture f(1);
  for (const auto& config : wgmma_check_variants()) {
    const auto wrong = check_wgmma(*f.launcher, f.group->rank(0), config, soon());
    ASSERT_TRUE(wrong.ok()) << wrong.error().describe();
    EXPECT_EQ(*wrong, 0u) << "n " << config.n << " fp8 " << config.fp8;
  }
  const auto mismatches =
      check_conversions(*f.launcher, f.group->rank(0), {.stride = 7777777, .count = 500}, soon());
  EXPECT_EQ(mismatches.value(), ConvertMismatches{});
}

// ---- arguments ----

void expect_refused(const Result<>& result, const char* part) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code, Code::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr(part));
}
template <class T>
void expect_refused(const Result<T>& result, const char* part) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code, Code::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr(part));
}

TEST(SymmKernels, WrongArgumentsAreNamed) {
  Fixture f(2);
  Launcher& l = *f.launcher;
  const Rank& rank = f.group->rank(0);
  expect_refused(Barrier::create(l, {}, {.blocks = 2}, soon()), "1 without grid_sync");
  expect_refused(MoveRows::create(l, f.areas.rows, {.row_bytes = 100}, soon()), "pad the rows");
  expect_refused(MoveRows::create(l, f.areas.rows, {.config = {.warps = 3, .stages = 9}}, soon()),
                 "{.warps = 8, .stages = 2}");
  auto ring = f.areas.ring;
  ring.slots = 12;
  expect_refused(RingAllToAll::create(l, ring, {}, soon()), "power of two");
  auto gather = AllGatherCounts::create(l, f.areas.gather, {}, soon()).value();
  expect_refused(gather.launch(rank, {.num_counts = 41}), "num_counts = 41");
  expect_refused(gather.launch(rank, {.num_counts = 1}), "memory of the rank");
  auto grid = GridSync::create(l, {}, soon()).value();
  expect_refused(grid.launch(rank, {.blocks = 2}), "max_blocks = 1");
  expect_refused(grid.launch(rank, {.counter = 4}), "counter = 4");
  auto flags = FlagPingPong::create(l, f.areas.flag, {}, soon()).value();
  expect_refused(flags.launch(rank, {.second = 2}), "below 2");
  auto push = MoveRows::create(l, f.areas.rows, {.row_bytes = 48}, soon()).value();
  expect_refused(push.launch(rank, {.blocks = 2}), "blocks = 2");
  expect_refused(push.launch(rank, {.slots = 1 << 20}), "slots");
  expect_refused(push.launch(rank, {.peer = 7}), "peer = 7");
}

// ---- the list ----

template <class Params>
void expect_known(const KernelRef<Params>& kernel) {
  static const auto known = jit::known_kernels().value();
  EXPECT_NE(kernel.twin, nullptr);
  EXPECT_TRUE(std::any_of(known.begin(), known.end(),
                          [&](const jit::KernelSpec& spec) {
                            return spec.name == kernel.spec.name &&
                                   spec.expression() == kernel.spec.expression();
                          }))
      << kernel.spec.expression() << " is not in device/kernels.json";
}

TEST(SymmKernels, EveryVariantIsInTheKernelList) {
  for (const bool a : {false, true}) {
    expect_known(grid_sync_kernel(a));
    expect_known(flag_ping_pong_kernel(a));
    for (const bool b : {false, true})
      expect_known(barrier_kernel(a, b));
  }
  expect_known(all_gather_counts_kernel());
  expect_known(convert_check_kernel());
  for (const auto& config : ring_variants())
    expect_known(ring_kernel(config).value());
  for (const auto& config : move_rows_variants()) {
    expect_known(push_rows_kernel(config).value());
    expect_known(pull_rows_kernel(config).value());
  }
  for (const auto& config : wgmma_check_variants())
    expect_known(wgmma_check_kernel(config).value());
}

}  // namespace
}  // namespace crossdock::symm
