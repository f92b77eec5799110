// Warp collectives, barriers, mbarriers and matrix moves: results under all policies, and the rules
// whose breach is a violation.
// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <functional>
#include <string>

#include "unit/twin/kit.hpp"

namespace crossdock::twin {
namespace {

using namespace kit;

constexpr u32 kAllLanes = 0xffffffffu;

// Runs `body` in one block under several schedules; the report of the first that fails, or the
// last.
Report run_block(u32 threads, const std::function<void()>& body, std::size_t shared = 1024) {
  Report report;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    auto world = make_world(1);
    start(*world, {.block = threads, .shared_bytes = shared}, body);
    report = run(*world, schedule_of(seed));
    if (!report.ok()) return report;
  }
  return report;
}
void check(bool truth, Site site = Site::here()) {
  if (!truth) hk::trap("wrong result", site);
}
#define EXPECT_CLEAN(report)                                                             \
  do {                                                                                   \
    const Report clean_report = (report);                                                \
    EXPECT_TRUE(clean_report.ok()) << clean_report.kind << ": " << clean_report.message; \
  } while (false)

TEST(TwinWarp, CollectivesComputeWhatTheyShould) {
  EXPECT_CLEAN(run_block(64, [] {
    const u32 lane = lane_index();
    const Site s = Site::here();
    using hk::Shuffle;
    check(hk::shuffle(kAllLanes, lane * 3, {Shuffle::kIndex, 5}, s) == 15);
    check(hk::shuffle(kAllLanes, lane, {Shuffle::kUp, 2}, s) == (lane < 2 ? lane : lane - 2));
    check(hk::shuffle(kAllLanes, lane, {Shuffle::kDown, 2}, s) == (lane > 29 ? lane : lane + 2));
    check(hk::shuffle(kAllLanes, lane, {Shuffle::kXor, 1}, s) == (lane ^ 1));
    check(hk::shuffle(kAllLanes, lane, {Shuffle::kIndex, 1, 8}, s) == (lane & ~7u) + 1);
    check(hk::ballot(kAllLanes, lane % 3 == 0, s) == 0x49249249u);
    check(hk::any(kAllLanes, lane == 7, s) && !hk::any(kAllLanes, false, s));
    check(hk::all(kAllLanes, true, s) && !hk::all(kAllLanes, lane != 7, s));
    check(hk::match_any(kAllLanes, lane % 2, s) == (lane % 2 ? 0xaaaaaaaau : 0x55555555u));
    check(hk::match_all(kAllLanes, 9, s) == kAllLanes && hk::match_all(kAllLanes, lane, s) == 0);
    check(hk::reduce(kAllLanes, hk::Rmw::kAdd, lane, s) == 496);
    check(hk::reduce(kAllLanes, hk::Rmw::kMax, lane ^ 21, s) == 31);
    check(static_cast<i32>(hk::reduce(kAllLanes, hk::Rmw::kMinSigned, lane - 3, s)) == -3);
    const bool leader = hk::elect(kAllLanes, s);
    check(popcount(hk::ballot(kAllLanes, leader, s)) == 1);
    const u32 half = lane < 16 ? 0xffffu : 0xffff0000u;  // two halves at the same time
    check(hk::reduce(half, hk::Rmw::kAdd, 1, s) == 16);
  }));
}

TEST(TwinWarp, ALaneOutsideItsMaskIsAViolation) {
  const Report report = run_block(32, [] { hk::sync_warp(0xfffffffeu, Site::here()); });
  EXPECT_EQ(report.kind, "warp") << report.message;
}

TEST(TwinWarp, DifferentCollectivesDoNotMeet) {
  const Report report = run_block(32, [] {
    if (lane_index() == 3)
      hk::ballot(kAllLanes, true, Site::here());
    else
      hk::sync_warp(kAllLanes, Site::here());
  });
  EXPECT_EQ(report.kind, "warp") << report.message;
}

TEST(TwinWarp, AMissingLaneIsADeadlockThatNamesTheOthers) {
  const Report report = run_block(32, [] {
    if (lane_index() != 9) hk::sync_warp(kAllLanes, Site::here());
  });
  EXPECT_EQ(report.outcome, Outcome::kDeadlock);
  EXPECT_NE(report.message.find("__syncwarp"), std::string::npos);
  EXPECT_NE(report.message.find("[31 threads: 0-8,10-31]"), std::string::npos) << report.message;
}

TEST(TwinWarp, MatrixMovesFollowTheIsa) {
  EXPECT_CLEAN(run_block(
      32,
      [] {
        const u32 lane = lane_index();
        auto* tile = reinterpret_cast<u16*>(dynamic_shared());  // 32 rows of 8
        for (u32 i = 0; i < 8; ++i)
          tile[lane * 8 + i] = static_cast<u16>(lane * 8 + i);
        hk::sync_warp(kAllLanes, Site::here());
        u32 r[4];
        hk::load_matrix(r, tile + lane * 8, {4, false}, Site::here());
        for (u32 m = 0; m < 4; ++m) {
          const u32 first = m * 64 + lane / 4 * 8 + lane % 4 * 2;
          check(r[m] == (first | (first + 1) << 16));
        }
        hk::load_matrix(r, tile + lane * 8, {2, true}, Site::here());
        for (u32 m = 0; m < 2; ++m) {
          const u32 low = m * 64 + lane % 4 * 2 * 8 + lane / 4;
          check(r[m] == (low | (low + 8) << 16));
        }
        hk::sync_warp(kAllLanes, Site::here());
        hk::store_matrix(r, tile + 256 + lane * 8, {2, true}, Site::here());
        hk::sync_warp(kAllLanes, Site::here());
        if (lane < 16)
          for (u32 i = 0; i < 8; ++i)
            check(tile[256 + lane * 8 + i] == lane * 8 + i);
      },
      2048));
}

TEST(TwinBlock, BarriersOrderSharedAndGlobalMemory) {
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    auto world = make_world(1);
    u32* data = make(*world, 0, 128);
    start(*world, {.block = 128, .shared_bytes = 1024}, [data] {
      auto* shared = reinterpret_cast<u32*>(dynamic_shared());
      const u32 t = thread_index();
      for (u32 round = 0; round < 3; ++round) {
        shared[t] = t + round;
        st(data + t, t + round);
        syncthreads();
        const u32 other = (t * 7 + 1) % 128;
        check(shared[other] == other + round && ld(data + other) == other + round);
        // Two halves meet on barriers of their own; nobody may be early for the next round.
        hk::barrier_sync(1 + t / 64, 64, Site::here());
        syncthreads();
      }
      check(hk::barrier_any(3, 128, t == 77, Site::here()));
      check(!hk::barrier_any(3, 128, false, Site::here()));
    });
    const Report report = run(*world, schedule_of(seed));
    ASSERT_TRUE(report.ok()) << "seed " << seed << ": " << report.message;
  }
}

TEST(TwinBlock, ArriveDoesNotWait) {
  EXPECT_CLEAN(run_block(64, [] {
    auto* word = reinterpret_cast<u32*>(dynamic_shared());
    if (thread_index() < 32) {
      st(word + thread_index(), 5);
      hk::barrier_arrive(2, 64, Site::here());
    } else {
      hk::barrier_sync(2, 64, Site::here());
      check(ld(word + thread_index() - 32) == 5);
    }
  }));
}

TEST(TwinBlock, WrongBarrierUseIsAViolation) {
  EXPECT_EQ(run_block(64, [] { hk::barrier_sync(16, 64, Site::here()); }).kind, "barrier");
  EXPECT_EQ(run_block(64, [] { hk::barrier_sync(1, 33, Site::here()); }).kind, "barrier");
  EXPECT_EQ(
      run_block(64, [] { hk::barrier_sync(1, lane_index() < 16 ? 64 : 32, Site::here()); }).kind,
      "barrier");
}

TEST(TwinBlock, MbarriersCountArrivalsAndBytes) {
  EXPECT_CLEAN(run_block(96, [] {
    void* barrier = dynamic_shared();
    const Site s = Site::here();
    if (thread_index() == 0) hk::mbarrier_init(barrier, 64, s);
    syncthreads();
    for (u32 phase = 0; phase < 3; ++phase) {
      if (thread_index() < 64) hk::mbarrier_arrive(barrier, 1, s);
      while (!hk::mbarrier_try_wait(barrier, phase & 1, s))
        spin();
      check(hk::mbarrier_try_wait(barrier, phase & 1, s) || thread_index() >= 64);
      syncthreads();
    }
  }));
  EXPECT_EQ(run_block(1, [] { hk::mbarrier_arrive(dynamic_shared(), 1, Site::here()); }).kind,
            "mbarrier");
  EXPECT_EQ(run_block(1,
                      [] {
                        hk::mbarrier_init(dynamic_shared(), 1, Site::here());
                        hk::mbarrier_arrive(dynamic_shared(), 2, Site::here());
                      })
                .kind,
            "mbarrier");
  const Report stuck = run_block(1, [] {
    hk::mbarrier_init(dynamic_shared() + 8, 2, Site::here());
    hk::mbarrier_arrive_expect_tx(dynamic_shared() + 8, 64, Site::here());
    while (!hk::mbarrier_try_wait(dynamic_shared() + 8, 0, Site::here()))
      spin();
  });
  EXPECT_EQ(stuck.outcome, Outcome::kDeadlock);
  EXPECT_NE(stuck.message.find(
                "mbarrier.try_wait [shared+0x8] parity 0 (phase 0, 1 of 2 arrivals to come, 64 "
                "bytes to come)"),
            std::string::npos)
      << stuck.message;
}

TEST(TwinBlock, RegistersHaveASum) {
  const auto ask = [](u32 producer, u32 consumer) {
    return run_block(384,
                     [=] {
                       if (thread_index() < 128)
                         hk::set_max_registers(false, producer, Site::here());
                       else
                         hk::set_max_registers(true, consumer, Site::here());
                     })
        .kind;
  };
  EXPECT_EQ(ask(88, 208), "");
  EXPECT_EQ(ask(96, 208), "setmaxnreg");
  EXPECT_EQ(ask(90, 208), "setmaxnreg");
}

}  // namespace
}  // namespace crossdock::twin
