// Litmus tests of the twin's memory model: what PTX forbids must never show, in any schedule; what
// it allows and the twin claims to show must show within the seeds. One kernel thread per litmus
// thread, placed in one CTA, in CTAs of one rank, or in ranks.
// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <string>
#include <vector>

#include "twin/sanitizer.hpp"
#include "unit/twin/kit.hpp"

// Litmus programs race on purpose, and under TSan memory is strong: race_test.cpp is for that
// build.
#define SKIP_UNDER_TSAN() \
  if (kTsan) GTEST_SKIP() << "TSan takes the place of the weak-memory model"

namespace crossdock::twin {
namespace {

using namespace kit;
using hk::Access;

enum class Place { kCta, kRank, kWorld };  // where the threads are: one CTA, CTAs of a rank, ranks

constexpr u32 kRounds = 8;  // independent instances in a run
constexpr u32 kSeeds = 300;

constexpr Access relaxed(Scope s) {
  return {Order::kRelaxed, s};
}
constexpr Access release(Scope s) {
  return {Order::kRelease, s};
}
constexpr Access acquire(Scope s) {
  return {Order::kAcquire, s};
}

// Variables of one run: `v(i, round)` lies in a granule of its own, in the last rank's memory.
struct Vars {
  u32* base;
  u32* v(u32 i, u32 round) const { return base + (i * kRounds + round) * 8; }
};

using Body = std::function<void(const Vars&, u32 thread, u32 round)>;
using Judge = std::function<bool(const Vars&, u32 round)>;

struct Litmus {
  Place place;
  u32 threads;
  Body body;
  Judge bad;  // looks at what the threads stored as results
};

Schedule weak_schedule(u32 seed) {
  Schedule schedule;
  schedule.seed = seed;
  schedule.weak = schedule.stale = true;
  schedule.preempt_log2 = seed % 3 == 0 ? 1 : 3;
  return schedule;
}

// Number of runs in which `bad` held for some round.
u32 count(const Litmus& litmus) {
  const int ranks = litmus.place == Place::kWorld ? static_cast<int>(litmus.threads) : 1;
  auto world = make_world(ranks);
  u32 found = 0;
  for (u32 seed = 0; seed < kSeeds; ++seed) {
    world->reset();
    const Vars vars{make(*world, ranks - 1, 16 * kRounds * 8)};
    const u32 per_launch = litmus.place == Place::kWorld ? 1 : litmus.threads;
    const bool one_block = litmus.place == Place::kCta;
    for (int rank = 0; rank < ranks; ++rank)
      start(*world,
            {.rank = rank, .grid = one_block ? 1 : per_launch, .block = one_block ? per_launch : 1},
            [&, rank] {
              const u32 me = static_cast<u32>(rank) + thread_index() + block_index();
              for (u32 round = 0; round < kRounds; ++round)
                litmus.body(vars, me, round);
            });
    const Report report = run(*world, weak_schedule(seed));
    EXPECT_TRUE(report.ok()) << "seed " << seed << ": " << report.kind << " " << report.message;
    bool bad = false;
    for (u32 round = 0; round < kRounds; ++round)
      bad |= litmus.bad(vars, round);
    found += bad ? 1 : 0;
  }
  return found;
}

// Results are stored as value + 1, so that a result that was never written is not taken for 0.
void result(const Vars& vars, u32 index, u32 round, u32 value) {
  st(vars.v(8 + index, round), value + 1);
}
u32 got(const Vars& vars, u32 index, u32 round) {
  return *vars.v(8 + index, round) - 1;
}

// ---- message passing ------------------------------------------------------------------------

struct MessagePassing {
  const char* name;
  Place place;
  Access write;
  Access read;
  bool shows;
  Access data = kWeak;
};

class TwinMessagePassing : public testing::TestWithParam<MessagePassing> {};

TEST_P(TwinMessagePassing, StaleDataShowsExactlyWhenSynchronisationIsMissing) {
  SKIP_UNDER_TSAN();
  const MessagePassing p = GetParam();
  const u32 found = count({p.place, 2,
                           [p](const Vars& vars, u32 thread, u32 round) {
                             if (thread == 0) {
                               st(vars.v(0, round), 7);
                               st(vars.v(1, round), 1, p.write);
                             } else {
                               wait_until(vars.v(1, round), 1, p.read);
                               result(vars, 0, round, ld(vars.v(0, round), p.data));
                             }
                           },
                           [](const Vars& vars, u32 round) { return got(vars, 0, round) != 7; }});
  if (p.shows)
    EXPECT_GT(found, 0u);
  else
    EXPECT_EQ(found, 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, TwinMessagePassing,
    testing::Values(
        MessagePassing{"cta_ok", Place::kCta, release(Scope::kCta), acquire(Scope::kCta), false},
        MessagePassing{"gpu_ok", Place::kRank, release(Scope::kGpu), acquire(Scope::kGpu), false},
        MessagePassing{"sys_ok", Place::kWorld, release(Scope::kSys), acquire(Scope::kSys), false},
        MessagePassing{"sys_in_rank_ok", Place::kRank, release(Scope::kSys), acquire(Scope::kGpu),
                       false},
        MessagePassing{"no_release", Place::kWorld, relaxed(Scope::kSys), acquire(Scope::kSys),
                       true},
        MessagePassing{"no_release_in_cta", Place::kCta, relaxed(Scope::kCta), acquire(Scope::kCta),
                       true},
        MessagePassing{"no_acquire", Place::kWorld, release(Scope::kSys), relaxed(Scope::kSys),
                       true},
        MessagePassing{"no_acquire_in_rank", Place::kRank, release(Scope::kGpu),
                       relaxed(Scope::kGpu), true},
        MessagePassing{"gpu_release_across_ranks", Place::kWorld, release(Scope::kGpu),
                       acquire(Scope::kSys), true},
        MessagePassing{"gpu_acquire_across_ranks", Place::kWorld, release(Scope::kSys),
                       acquire(Scope::kGpu), true},
        MessagePassing{"cta_release_across_ctas", Place::kRank, release(Scope::kCta),
                       acquire(Scope::kGpu), true},
        MessagePassing{"non_coherent_load",
                       Place::kWorld,
                       release(Scope::kSys),
                       acquire(Scope::kSys),
                       true,
                       {Order::kNonCoherent, Scope::kSys}}),
    [](const auto& test) { return std::string(test.param.name); });

Litmus fenced_message_passing(Place place, Scope scope, bool writer_fence, bool reader_fence) {
  return {place, 2,
          [=](const Vars& vars, u32 thread, u32 round) {
            if (thread == 0) {
              st(vars.v(0, round), 7);
              if (writer_fence) hk::fence(Order::kAcqRel, scope, Site::here());
              st(vars.v(1, round), 1, relaxed(Scope::kSys));
            } else {
              wait_until(vars.v(1, round), 1, relaxed(Scope::kSys));
              if (reader_fence) hk::fence(Order::kAcqRel, scope, Site::here());
              result(vars, 0, round, ld(vars.v(0, round)));
            }
          },
          [](const Vars& vars, u32 round) { return got(vars, 0, round) != 7; }};
}

TEST(TwinLitmus, FencesMakeMessagePassingWork) {
  SKIP_UNDER_TSAN();
  EXPECT_EQ(count(fenced_message_passing(Place::kWorld, Scope::kSys, true, true)), 0u);
  EXPECT_EQ(count(fenced_message_passing(Place::kRank, Scope::kGpu, true, true)), 0u);
  EXPECT_EQ(count(fenced_message_passing(Place::kCta, Scope::kCta, true, true)), 0u);
  EXPECT_GT(count(fenced_message_passing(Place::kWorld, Scope::kGpu, true, true)), 0u);
  EXPECT_GT(count(fenced_message_passing(Place::kWorld, Scope::kSys, false, true)), 0u);
  EXPECT_GT(count(fenced_message_passing(Place::kWorld, Scope::kSys, true, false)), 0u);
}

// ---- store buffering, load buffering --------------------------------------------------------

enum class Between { kNothing, kAcqRel, kSc };

Litmus store_buffering(Place place, Scope scope, Between between) {
  return {place, 2,
          [=](const Vars& vars, u32 thread, u32 round) {
            st(vars.v(thread, round), 1, relaxed(scope));
            if (between != Between::kNothing)
              hk::fence(between == Between::kSc ? Order::kSc : Order::kAcqRel, scope, Site::here());
            result(vars, thread, round, ld(vars.v(1 - thread, round), relaxed(scope)));
          },
          [](const Vars& vars, u32 round) {
            return got(vars, 0, round) == 0 && got(vars, 1, round) == 0;
          }};
}

TEST(TwinLitmus, StoreBufferingShowsUnlessFencesAreSequentiallyConsistent) {
  SKIP_UNDER_TSAN();
  EXPECT_GT(count(store_buffering(Place::kWorld, Scope::kSys, Between::kNothing)), 0u);
  EXPECT_GT(count(store_buffering(Place::kRank, Scope::kGpu, Between::kNothing)), 0u);
  EXPECT_GT(count(store_buffering(Place::kWorld, Scope::kSys, Between::kAcqRel)), 0u);
  EXPECT_EQ(count(store_buffering(Place::kWorld, Scope::kSys, Between::kSc)), 0u);
  EXPECT_EQ(count(store_buffering(Place::kRank, Scope::kGpu, Between::kSc)), 0u);
  EXPECT_EQ(count(store_buffering(Place::kCta, Scope::kCta, Between::kSc)), 0u);
}

TEST(TwinLitmus, LoadBufferingNeverShows) {
  SKIP_UNDER_TSAN();
  // PTX allows it for relaxed accesses; the twin executes loads in order and does not model it.
  EXPECT_EQ(count({Place::kWorld, 2,
                   [](const Vars& vars, u32 thread, u32 round) {
                     result(vars, thread, round, ld(vars.v(thread, round), relaxed(Scope::kSys)));
                     st(vars.v(1 - thread, round), 1, relaxed(Scope::kSys));
                   },
                   [](const Vars& vars, u32 round) {
                     return got(vars, 0, round) == 1 && got(vars, 1, round) == 1;
                   }}),
            0u);
}

// ---- independent reads of independent writes ------------------------------------------------

Litmus independent_reads(Place place, Scope scope, bool fences) {
  return {place, 4,
          [=](const Vars& vars, u32 thread, u32 round) {
            if (thread < 2) {
              st(vars.v(thread, round), 1, relaxed(scope));
              return;
            }
            const u32 first = thread - 2;
            const u32 a = ld(vars.v(first, round), relaxed(scope));
            if (fences) hk::fence(Order::kSc, scope, Site::here());
            const u32 b = ld(vars.v(1 - first, round), relaxed(scope));
            result(vars, first, round, a * 2 + b);
          },
          // Both saw their first variable written and the other not: they disagree on the order.
          [](const Vars& vars, u32 round) {
            return got(vars, 0, round) == 2 && got(vars, 1, round) == 2;
          }};
}

TEST(TwinLitmus, ReadersMayDisagreeOnTheOrderOfWritesUnlessTheyFence) {
  SKIP_UNDER_TSAN();
  EXPECT_GT(count(independent_reads(Place::kWorld, Scope::kSys, false)), 0u);
  EXPECT_GT(count(independent_reads(Place::kRank, Scope::kGpu, false)), 0u);
  EXPECT_EQ(count(independent_reads(Place::kWorld, Scope::kSys, true)), 0u);
  EXPECT_EQ(count(independent_reads(Place::kRank, Scope::kGpu, true)), 0u);
}

// ---- sixteen bytes at once --------------------------------------------------------------------

// A strong vector store read by a strong vector load: `bad` of what the four words show, a bit
// each.
Litmus vector_access(const std::function<bool(u32 seen)>& bad) {
  return {Place::kWorld, 2,
          [](const Vars& vars, u32 thread, u32 round) {
            u32 words[4] = {1, 1, 1, 1};
            if (thread == 0)
              return hk::store_vector(vars.v(0, round), words, 16, relaxed(Scope::kSys),
                                      Site::here());
            hk::load_vector(vars.v(0, round), words, 16, relaxed(Scope::kSys), Site::here());
            result(vars, 0, round, words[0] | words[1] << 1 | words[2] << 2 | words[3] << 3);
          },
          [=](const Vars& vars, u32 round) { return bad(got(vars, 0, round)); }};
}

TEST(TwinLitmus, SixteenBytesMayBeSeenApartAndEightNever) {
  SKIP_UNDER_TSAN();
  EXPECT_GT(count(vector_access([](u32 seen) { return seen == 0b0011; })), 0u);
  EXPECT_GT(count(vector_access([](u32 seen) { return seen == 0b1100; })), 0u);
  EXPECT_GT(count(vector_access([](u32 seen) { return seen == 0b1111; })), 0u);
  EXPECT_EQ(count(vector_access([](u32 seen) {
              return (seen & 3) == 1 || (seen & 3) == 2 || seen >> 2 == 1 || seen >> 2 == 2;
            })),
            0u);
}

// ---- coherence and cumulativity -------------------------------------------------------------

TEST(TwinLitmus, ReadsOfOneWordNeverGoBack) {
  SKIP_UNDER_TSAN();
  EXPECT_EQ(count({Place::kWorld, 3,
                   [](const Vars& vars, u32 thread, u32 round) {
                     if (thread == 0) {
                       for (u32 i = 1; i <= 4; ++i)
                         st(vars.v(0, round), i, relaxed(Scope::kSys));
                       return;
                     }
                     u32 last = 0;
                     bool back = false;
                     for (u32 i = 0; i < 6; ++i) {
                       const u32 now = ld(vars.v(0, round), relaxed(Scope::kSys));
                       back |= now < last;
                       last = now;
                     }
                     result(vars, thread, round, back ? 1 : 0);
                   },
                   [](const Vars& vars, u32 round) {
                     return got(vars, 1, round) == 1 || got(vars, 2, round) == 1;
                   }}),
            0u);
}

TEST(TwinLitmus, SynchronisationIsTransitive) {
  SKIP_UNDER_TSAN();
  EXPECT_EQ(count({Place::kWorld, 3,
                   [](const Vars& vars, u32 thread, u32 round) {
                     if (thread == 0) {
                       st(vars.v(0, round), 7);
                       st(vars.v(1, round), 1, release(Scope::kSys));
                     } else if (thread == 1) {
                       wait_until(vars.v(1, round), 1, acquire(Scope::kSys));
                       st(vars.v(2, round), 1, release(Scope::kSys));
                     } else {
                       wait_until(vars.v(2, round), 1, acquire(Scope::kSys));
                       result(vars, 0, round, ld(vars.v(0, round)));
                     }
                   },
                   [](const Vars& vars, u32 round) { return got(vars, 0, round) != 7; }}),
            0u);
}

TEST(TwinLitmus, ReadModifyWritesContinueAReleaseSequence) {
  SKIP_UNDER_TSAN();
  EXPECT_EQ(count({Place::kWorld, 3,
                   [](const Vars& vars, u32 thread, u32 round) {
                     if (thread == 0) {
                       st(vars.v(0, round), 7);
                       add(vars.v(1, round), 1, release(Scope::kSys));
                     } else if (thread == 1) {
                       add(vars.v(1, round), 1, relaxed(Scope::kSys));
                     } else {
                       wait_until(vars.v(1, round), 2, acquire(Scope::kSys));
                       result(vars, 0, round, ld(vars.v(0, round)));
                     }
                   },
                   [](const Vars& vars, u32 round) { return got(vars, 0, round) != 7; }}),
            0u);
}

// The pattern of every exchange: all threads of all CTAs of a rank write to the peer, meet inside
// the rank, one thread releases at system scope; there, one acquires, all meet, all read.
u32 exchange_errors(bool with_barrier, Scope flag_scope) {
  u32 errors = 0;
  auto world = make_world(2);
  for (u32 seed = 0; seed < 60; ++seed) {
    world->reset();
    u32* data = make(*world, 1, 64 * 4);
    u32* flag = make(*world, 1, 1);
    u32* meet = make(*world, 0, 1);
    u32* wrong = make(*world, 1, 1);
    start(*world, {.rank = 0, .grid = 2, .block = 32}, [=] {
      st(data + (block_index() * 32 + thread_index()) * 4, 5);
      if (with_barrier) syncthreads();
      if (thread_index() == 0) {
        add(meet, 1, {Order::kAcqRel, Scope::kGpu});
        if (block_index() == 1) {
          wait_until(meet, 2, acquire(Scope::kGpu));
          st(flag, 1, release(flag_scope));
        }
      }
    });
    start(*world, {.rank = 1, .grid = 1, .block = 64}, [=] {
      if (thread_index() == 0) wait_until(flag, 1, acquire(Scope::kSys));
      syncthreads();
      if (ld(data + thread_index() * 4) != 5) add(wrong, 1, relaxed(Scope::kGpu));
    });
    const Report report = run(*world, weak_schedule(seed));
    EXPECT_TRUE(report.ok()) << report.message;
    errors += *wrong != 0 ? 1 : 0;
  }
  return errors;
}

TEST(TwinLitmus, ReleasesCoverWhatTheirThreadHasMet) {
  SKIP_UNDER_TSAN();
  EXPECT_EQ(exchange_errors(true, Scope::kSys), 0u);
  EXPECT_GT(exchange_errors(false, Scope::kSys), 0u);  // nobody has met the other threads
  EXPECT_GT(exchange_errors(true, Scope::kGpu), 0u);
}

// ---- asynchronous copies --------------------------------------------------------------------

u32 bulk_errors(bool wait_for_writes) {
  u32 errors = 0;
  auto world = make_world(2);
  for (u32 seed = 0; seed < 60; ++seed) {
    world->reset();
    u32* data = make(*world, 1, 64);
    u32* flag = make(*world, 1, 1);
    u32* wrong = make(*world, 1, 1);
    start(*world, {.rank = 0, .block = 1, .shared_bytes = 1024}, [=] {
      auto* row = reinterpret_cast<u32*>(dynamic_shared());
      for (u32 i = 0; i < 64; ++i)
        st(row + i, i + 1);
      hk::fence_proxy_async(Site::here());
      hk::bulk_store(data, row, 256, Site::here());
      hk::bulk_commit(Site::here());
      hk::bulk_wait(0, !wait_for_writes, Site::here());
      st(flag, 1, release(Scope::kSys));
    });
    start(*world, {.rank = 1, .block = 1}, [=] {
      wait_until(flag, 1, acquire(Scope::kSys));
      for (u32 i = 0; i < 64; ++i)
        if (ld(data + i) != i + 1) st(wrong, 1);
    });
    const Report report = run(*world, weak_schedule(seed));
    EXPECT_TRUE(report.ok()) << report.message;
    errors += *wrong;
  }
  return errors;
}

TEST(TwinLitmus, AReleaseCoversBulkStoresOnlyOnceTheirWritesAreWaitedFor) {
  SKIP_UNDER_TSAN();
  EXPECT_EQ(bulk_errors(true), 0u);
  EXPECT_GT(bulk_errors(false), 0u);
}

u32 proxy_errors(bool fence) {
  u32 errors = 0;
  auto world = make_world(1);
  for (u32 seed = 0; seed < 60; ++seed) {
    world->reset();
    u32* data = make(*world, 0, 64);
    u32* wrong = make(*world, 0, 1);
    start(*world, {.block = 1, .shared_bytes = 1024}, [=] {
      auto* row = reinterpret_cast<u32*>(dynamic_shared());
      void* barrier = dynamic_shared() + 512;
      hk::mbarrier_init(barrier, 1, Site::here());
      for (u32 i = 0; i < 64; ++i)
        st(data + i, i + 1);
      if (fence) hk::fence_proxy_async(Site::here());
      hk::mbarrier_arrive_expect_tx(barrier, 256, Site::here());
      hk::bulk_load(row, data, 256, barrier, Site::here());
      while (!hk::mbarrier_try_wait(barrier, 0, Site::here()))
        spin();
      for (u32 i = 0; i < 64; ++i)
        if (ld(row + i) != i + 1) st(wrong, 1);
    });
    const Report report = run(*world, weak_schedule(seed));
    EXPECT_TRUE(report.ok()) << report.message;
    errors += *wrong;
  }
  return errors;
}

TEST(TwinLitmus, BulkLoadsMissGenericStoresWithoutAProxyFence) {
  SKIP_UNDER_TSAN();
  EXPECT_EQ(proxy_errors(true), 0u);
  EXPECT_GT(proxy_errors(false), 0u);
}

}  // namespace
}  // namespace crossdock::twin
