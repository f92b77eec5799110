// Planted bugs in ep_dispatch_expanded: the same kernel with one piece of the synchronisation
// between rows and their copies left out. Each has to be found within a few seeds, and without a
// bug all seeds
// have to pass. See ep_mutation_test.cpp. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/ep/copy_wait.cuh>
#include <crossdock/ptx/bulk.cuh>
#include <crossdock/ptx/convert.cuh>

#include "planted_bugs.hpp"
#include "twin/sanitizer.hpp"

namespace crossdock::testing {

enum class CopyBug {
  kNone,
  kNoRowFlag,        // rows copied before they have come
  kNoFlagFence,      // flags raised before the rows can be seen
  kNoBulkWait,       // flags raised before the rows are written
  kNoToldWait,       // lists made before ids have come, or scales copied before they have
  kNoListedWait,     // places read before all blocks have listed them
  kToldNotReleased,  // ids and scales told before they can be seen
  kNoStageWait,      // a stage stored before it has landed, a note overwritten before it is read
  kNoBulkWaitRead,   // a stage loaded while it is still being stored
  kNoSyncWarp,       // what one lane has acquired or written, used by others
};
inline CopyBug g_bug = CopyBug::kNone;

}  // namespace crossdock::testing

namespace crossdock::device {

using testing::CopyBug;
inline bool left_out(CopyBug bug) {
  return testing::g_bug == bug;
}
inline bool maybe_look_at_flag(const u32* flag, u32 epoch) {
  return left_out(CopyBug::kNoRowFlag) || look_at_flag(flag, epoch);
}
template <class Gone>
bool maybe_ep_wait_told(const LaunchCommon& c, const u32* word, const Expected& expected,
                        const Gone& gone) {
  return left_out(CopyBug::kNoToldWait) || ep_wait_told(c, word, expected, gone);
}
inline bool maybe_ep_wait_copy_word(const LaunchCommon& c, const u64* word, u32 epoch, u32& value) {
  return left_out(CopyBug::kNoListedWait) || ep_wait_copy_word(c, word, epoch, value);
}
inline bool maybe_wait_stage(const LaunchCommon& c, ptx::MBarrier* barrier, u32 parity) {
  return left_out(CopyBug::kNoStageWait) || wait_stage(c, barrier, parity);
}
namespace ptx {
template <u32 kPending>
void maybe_bulk_wait() {
  if (!left_out(CopyBug::kNoBulkWait)) bulk_wait<kPending>();
}
template <u32 kPending>
void maybe_bulk_wait_read() {
  if (!left_out(CopyBug::kNoBulkWaitRead)) bulk_wait_read<kPending>();
}
inline void maybe_sync_warp(u32 mask) {
  if (!left_out(CopyBug::kNoSyncWarp)) sync_warp(mask);
}
template <class... Site>
void maybe_st_release_sys(u32* p, u32 v, Site... site) {
  if (left_out(CopyBug::kToldNotReleased)) return st_relaxed_sys(p, v, site...);
  st_release_sys(p, v, site...);
}
inline void maybe_fence_acq_rel_sys() {
  if (!left_out(CopyBug::kNoFlagFence)) fence_acq_rel_sys();
}
}  // namespace ptx
}  // namespace crossdock::device

#define look_at_flag maybe_look_at_flag
#define ep_wait_told maybe_ep_wait_told
#define ep_wait_copy_word maybe_ep_wait_copy_word
#define wait_stage maybe_wait_stage
#define bulk_wait maybe_bulk_wait
#define bulk_wait_read maybe_bulk_wait_read
#define sync_warp maybe_sync_warp
#define st_release_sys maybe_st_release_sys
#define fence_acq_rel_sys maybe_fence_acq_rel_sys
#include "ep_expanded_rig.hpp"
#undef look_at_flag
#undef ep_wait_told
#undef ep_wait_copy_word
#undef wait_stage
#undef bulk_wait
#undef bulk_wait_read
#undef sync_warp
#undef st_release_sys
#undef fence_acq_rel_sys

namespace crossdock::testing {
namespace {

// More rows than a warp has notes; rows of two parts; scales of single words.
void expand(u64 seed) {
  const EpCase c{.world = 3, .max_tokens = 60, .row_bytes = 160, .scale_bytes = 28};
  EpExpandedRig rig(c, {});
  const EpInputs inputs(c, static_cast<u32>(seed));
  rig.load(inputs, 0);
  rig.launch_all<kFlagged>(0);
  ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
  for (u32 rank = 0; rank < c.world; ++rank) {
    ASSERT_NO_FATAL_FAILURE(EpReference(c, inputs).check(rank, rig.rig().delivered(rank, 0)));
    ASSERT_NO_FATAL_FAILURE(rig.check(rank, 0));
  }
}
std::string failure_of(CopyBug bug, u64 seed) {
  g_bug = bug;
  const std::string failure = first_failure([&] { expand(seed); });
  g_bug = CopyBug::kNone;
  return failure;
}

struct Planted {
  const char* name;
  CopyBug bug;
};
class EpExpandedMutation : public ::testing::TestWithParam<Planted> {};

TEST_P(EpExpandedMutation, IsFoundWithinThirtyTwoSeeds) {
  if (twin::kTsan) GTEST_SKIP() << "TSan takes the place of the weak-memory model";
  const Planted planted = GetParam();
  expect_found(planted.name, [&](u64 seed) { return failure_of(planted.bug, seed); });
}
INSTANTIATE_TEST_SUITE_P(Bugs, EpExpandedMutation,
                         ::testing::Values(Planted{"no_row_flag", CopyBug::kNoRowFlag},
                                           Planted{"no_flag_fence", CopyBug::kNoFlagFence},
                                           Planted{"no_bulk_wait", CopyBug::kNoBulkWait},
                                           Planted{"no_told_wait", CopyBug::kNoToldWait},
                                           Planted{"no_listed_wait", CopyBug::kNoListedWait},
                                           Planted{"told_not_released", CopyBug::kToldNotReleased},
                                           Planted{"no_stage_wait", CopyBug::kNoStageWait},
                                           Planted{"no_bulk_wait_read", CopyBug::kNoBulkWaitRead},
                                           Planted{"no_sync_warp", CopyBug::kNoSyncWarp}),
                         [](const auto& given) { return std::string(given.param.name); });

TEST(EpExpandedMutationControl, WithoutABugAllSeedsPass) {
  for (u64 seed = 1; seed <= 16; ++seed)
    ASSERT_EQ(failure_of(CopyBug::kNone, seed), "") << "seed " << seed;
}

}  // namespace
}  // namespace crossdock::testing
