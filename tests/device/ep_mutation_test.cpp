// Planted bugs in dispatch and combine: the same kernels with one piece of their synchronisation
// left out. Each has to be found within a few seeds, and without a bug all seeds have to pass. The
// pieces are functions of the vocabulary; the kernels are compiled here with functions in their
// place that leave the piece out when told to.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/ptx/bulk.cuh>
#include <crossdock/ptx/convert.cuh>

#include "planted_bugs.hpp"
#include "twin/sanitizer.hpp"

namespace crossdock::testing {

enum class EpBug {
  kNone,
  kArrivalNotReleased,  // rows announced before they can be seen
  kNoBulkWait,          // rows announced before they are written
  kNoBulkWaitRead,      // a stage loaded while it is still being stored
  kNoSyncWarp,          // what one lane has acquired or written, used by others
  kRoutesNotReleased,   // routes published before they can be seen
  kNoSharedProxyFence,  // the cast's result stored before the async proxy sees it
  kNoStageWait,         // a stage used before it has landed
  kNoFlagFence,         // by push: flags raised before the rows can be seen
  kNoFlagWait,          // by push: rows added up before they have come
};
inline EpBug g_bug = EpBug::kNone;

}  // namespace crossdock::testing

namespace crossdock::device {

using testing::EpBug;
inline bool left_out(EpBug bug) {
  return testing::g_bug == bug;
}

template <class... Site>
void maybe_signal_counter(u32* counter, u32 n, Site... site) {
  if (left_out(EpBug::kArrivalNotReleased)) return ptx::red_add_relaxed_sys(counter, n, site...);
  signal_counter(counter, n, site...);
}
inline bool maybe_wait_flag(const LaunchCommon& c, const u32* flag, u32 epoch, u32 peer) {
  return left_out(EpBug::kNoFlagWait) || wait_flag(c, flag, epoch, peer);
}
inline bool maybe_wait_stage(const LaunchCommon& c, ptx::MBarrier* barrier, u32 parity) {
  return left_out(EpBug::kNoStageWait) || wait_stage(c, barrier, parity);
}

namespace ptx {
template <u32 kPending>
void maybe_bulk_wait() {
  if (!left_out(EpBug::kNoBulkWait)) bulk_wait<kPending>();
}
template <u32 kPending>
void maybe_bulk_wait_read() {
  if (!left_out(EpBug::kNoBulkWaitRead)) bulk_wait_read<kPending>();
}
inline void maybe_sync_warp(u32 mask) {
  if (!left_out(EpBug::kNoSyncWarp)) sync_warp(mask);
}
inline void maybe_st_release_gpu(u32* p, u32 v) {
  if (left_out(EpBug::kRoutesNotReleased)) return st_relaxed_gpu(p, v);
  st_release_gpu(p, v);
}
inline void maybe_fence_acq_rel_sys() {
  if (!left_out(EpBug::kNoFlagFence)) fence_acq_rel_sys();
}
inline void maybe_fence_proxy_async_shared() {
  if (!left_out(EpBug::kNoSharedProxyFence)) fence_proxy_async_shared();
}
}  // namespace ptx
}  // namespace crossdock::device

#define signal_counter maybe_signal_counter
#define wait_stage maybe_wait_stage
#define bulk_wait maybe_bulk_wait
#define bulk_wait_read maybe_bulk_wait_read
#define sync_warp maybe_sync_warp
#define st_release_gpu maybe_st_release_gpu
#define wait_flag maybe_wait_flag
#define fence_acq_rel_sys maybe_fence_acq_rel_sys
#define fence_proxy_async_shared maybe_fence_proxy_async_shared
#include <crossdock/kernel/ep_expand_rows.cuh>

#include "ep_rounds.hpp"
#undef signal_counter
#undef wait_stage
#undef bulk_wait
#undef bulk_wait_read
#undef sync_warp
#undef st_release_gpu
#undef fence_proxy_async_shared
#undef fence_acq_rel_sys
#undef wait_flag

namespace crossdock::testing {
namespace {

// A consumer in the stream of the rank: what it reads is what dispatch has delivered. One block.
struct EpReaderParams {
  const u8* block;
  u8* copy;
  u64 bytes;
};
void reader(const EpReaderParams& p) {
  for (u64 i = thread_index(); i < p.bytes / 4; i += block_size())
    ptx::st_weak(reinterpret_cast<u32*>(p.copy) + i,
                 ptx::ld_weak(reinterpret_cast<const u32*>(p.block) + i));
}

template <EpDispatchConfig kConfig>
void dispatch_and_read(const EpCase& c, u64 seed) {
  EpRig rig(c);
  const EpInputs inputs(c, static_cast<u32>(seed));
  rig.load(inputs, 0);
  std::vector<u8*> copies;
  const u64 bytes = c.output().bytes;
  for (u32 rank = 0; rank < c.world; ++rank) {
    rig.launch<kConfig>(rank, 0);
    copies.push_back(rig.ranks().local<u8>(rank, bytes));
    rig.ranks().launch(rank, {1, 64, 0, "reader"}, reader,
                       EpReaderParams{rig.output(rank, 0), copies[rank], bytes});
  }
  ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
  for (u32 rank = 0; rank < c.world; ++rank) {
    EpDelivered got = rig.delivered(rank, 0);
    got.block = copies[rank];
    ASSERT_NO_FATAL_FAILURE(EpReference(c, inputs).check(rank, got));
  }
}
void plain_dispatch(u64 seed) {
  // Scales of single words: many stores that a release has to wait for.
  dispatch_and_read<kPlain>({.world = 3, .max_tokens = 72, .row_bytes = 64, .scale_bytes = 60},
                            seed);
}
// Few tokens at many ranks: somebody's last block always tells late.
void many_ranks_dispatch(u64 seed) {
  dispatch_and_read<kPlain>(
      {.world = 8, .max_tokens = 6, .row_bytes = 16, .scale_bytes = 124, .blocks = {1}}, seed);
}
void cast_dispatch(u64 seed) {
  dispatch_and_read<kCast>({.world = 2, .max_tokens = 14, .row_bytes = 512, .cast = true}, seed);
}
void rounds(u64 seed) {
  Rounds r({.world = 3, .max_tokens = 12, .row_bytes = 16});
  r.run_and_check(static_cast<u32>(seed), 0);
}

void push_rounds(u64 seed) {
  Rounds r({.world = 3, .max_tokens = 20, .row_bytes = 16, .combine_bytes = 112});
  r.run_and_check<kPush>(static_cast<u32>(seed), 0);
}

// Rows that all chose two of three experts, expanded in parts of rows, then read. One rank.
void expand_and_read(u64 seed) {
  constexpr EpExpandRowsConfig kSmall{.warps = 2, .stages = 2, .stage_bytes = 128};
  constexpr u32 kRows = 20, kTopK = 2, kExperts = 3, kRowBytes = 512, kPlaces = kRows * kTopK;
  SymmetricLayout layout;
  layout.add("nothing", 128);
  Ranks ranks(1, layout);
  EpExpandRowsParams p{};
  auto* ends = ranks.local<u32>(0, 1);
  auto* counts = ranks.local<u32>(0, kExperts);
  auto* ids = ranks.local<i32>(0, kPlaces);
  auto* rows = ranks.local<u32>(0, kRows * kRowBytes / 4);
  p.grouping = {.offsets = ranks.local<u32>(0, kExperts + 1),
                .aligned = ranks.local<u32>(0, kExperts),
                .rows = ranks.local<i32>(0, kPlaces),
                .positions = ranks.local<u32>(0, kPlaces),
                .weights = nullptr,
                .alignment = 1};
  *ends = kRows;
  for (u32 i = 0; i < kRows * kRowBytes / 4; ++i)
    rows[i] = mix(i + 1);
  u32 place = 0;
  for (u32 choice = 0; choice < kPlaces; ++choice)
    ids[choice] = static_cast<i32>((choice / kTopK + choice % kTopK) % kExperts);
  for (u32 e = 0; e < kExperts; ++e) {
    p.grouping.offsets[e] = place;
    for (u32 choice = 0; choice < kPlaces; ++choice) {
      if (ids[choice] != static_cast<i32>(e)) continue;
      p.grouping.rows[place] = static_cast<i32>(choice / kTopK);
      p.grouping.positions[choice] = place++;
    }
    counts[e] = place - p.grouping.offsets[e];
  }
  p.grouping.offsets[kExperts] = place;
  auto* out = ranks.local<u8>(0, kPlaces * kRowBytes);
  auto* copy = ranks.local<u8>(0, kPlaces * kRowBytes);
  p.common = ranks.common(0, KernelId::kEpExpandRows);
  p.arrived = {ends, counts, ids, nullptr, 1, kExperts, kTopK, 0};
  p.from.rows = reinterpret_cast<const u8*>(rows);
  p.from.row_bytes = kRowBytes;
  p.to.rows = out;
  p.to.row_stride = kRowBytes;
  p.to.places = kPlaces;
  p.parts = kRowBytes / kSmall.stage_bytes;
  p.part_bytes = kSmall.stage_bytes;
  ranks.launch(0, {2, kSmall.threads(), kSmall.shared_bytes(), "ep_expand_rows"},
               kernel::ep_expand_rows<kSmall>, p);
  ranks.launch(0, {1, 64, 0, "reader"}, reader,
               EpReaderParams{out, copy, u64{kPlaces} * kRowBytes});
  ASSERT_NO_FATAL_FAILURE(ranks.run_clean(schedule(seed)));
  for (u32 i = 0; i < kPlaces; ++i)
    ASSERT_EQ(std::memcmp(copy + i * kRowBytes,
                          reinterpret_cast<const u8*>(rows) +
                              static_cast<u32>(p.grouping.rows[i]) * kRowBytes,
                          kRowBytes),
              0)
        << "place " << i;
}

using Scenario = void (*)(u64 seed);
// The first failure of a run, or nothing.
std::string failure_of(Scenario run, EpBug bug, u64 seed) {
  g_bug = bug;
  const std::string failure = first_failure([&] { run(seed); });
  g_bug = EpBug::kNone;
  return failure;
}

struct Planted {
  const char* name;
  EpBug bug;
  Scenario run;
};
class EpMutation : public ::testing::TestWithParam<Planted> {};

TEST_P(EpMutation, IsFoundWithinThirtyTwoSeeds) {
  if (twin::kTsan) GTEST_SKIP() << "TSan takes the place of the weak-memory model";
  const Planted planted = GetParam();
  expect_found(planted.name, [&](u64 seed) { return failure_of(planted.run, planted.bug, seed); });
}
INSTANTIATE_TEST_SUITE_P(
    Bugs, EpMutation,
    ::testing::Values(
        Planted{"no_stage_wait_in_expand", EpBug::kNoStageWait, expand_and_read},
        Planted{"no_bulk_wait_in_expand", EpBug::kNoBulkWait, expand_and_read},
        Planted{"no_bulk_wait_read_in_expand", EpBug::kNoBulkWaitRead, expand_and_read},
        Planted{"arrival_not_released", EpBug::kArrivalNotReleased, many_ranks_dispatch},
        Planted{"no_bulk_wait", EpBug::kNoBulkWait, plain_dispatch},
        Planted{"no_bulk_wait_read", EpBug::kNoBulkWaitRead, plain_dispatch},
        Planted{"no_sync_warp", EpBug::kNoSyncWarp, plain_dispatch},
        Planted{"routes_not_released", EpBug::kRoutesNotReleased, plain_dispatch},
        Planted{"no_stage_wait", EpBug::kNoStageWait, plain_dispatch},
        Planted{"no_shared_proxy_fence", EpBug::kNoSharedProxyFence, cast_dispatch},
        Planted{"no_stage_wait_in_combine", EpBug::kNoStageWait, rounds},
        Planted{"no_bulk_wait_in_push", EpBug::kNoBulkWait, push_rounds},
        Planted{"no_bulk_wait_read_in_push", EpBug::kNoBulkWaitRead, push_rounds},
        Planted{"no_stage_wait_in_push", EpBug::kNoStageWait, push_rounds},
        Planted{"no_flag_fence", EpBug::kNoFlagFence, push_rounds},
        Planted{"no_flag_wait", EpBug::kNoFlagWait, push_rounds}),
    [](const auto& given) { return std::string(given.param.name); });

TEST(EpMutationControl, WithoutABugAllSeedsPass) {
  for (const Scenario run :
       {expand_and_read, plain_dispatch, many_ranks_dispatch, cast_dispatch, rounds, push_rounds})
    for (u64 seed = 1; seed <= 16; ++seed)
      ASSERT_EQ(failure_of(run, EpBug::kNone, seed), "") << "seed " << seed;
}

}  // namespace
}  // namespace crossdock::testing
