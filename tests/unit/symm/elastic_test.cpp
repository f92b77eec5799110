// Elastic groups with processes played by threads, in host memory and on fake GPUs: what stays
// where it was, what is mapped anew, what is refused, and that nothing is left behind.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <thread>

#include "support/fake_cuda/fixture.hpp"
#include "symm/group.hpp"
#include "symm/launch.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Deadline soon() {
  return Deadline::in(60s);
}

class Elastic : public crossdock::testing::FakeCudaTest {
 protected:
  GroupOptions options(u32 rank, u32 world, Backend backend, u32 fewest = 0) const {
    return {.world = world,
            .ranks = {{.rank = rank, .device = static_cast<int>(rank)}},
            .backend = backend,
            .place = MeetingPlace{
                .store = "inproc://elastic",
                .name = ::testing::UnitTest::GetInstance()->current_test_info()->name() +
                        std::to_string(static_cast<int>(backend)),
                .fewest = fewest,
                .settle = 300ms}};
  }
  static device::SymmetricLayout layout() {
    device::SymmetricLayout layout;
    (void)layout.add("data", 4096);
    return layout;
  }
  // One call in a thread for each member; all of them succeed.
  static void together(std::vector<std::function<Result<>()>> calls) {
    std::vector<std::thread> threads;
    for (auto& call : calls)
      threads.emplace_back([&call] {
        const auto done = call();
        EXPECT_TRUE(done.ok()) << done.error().describe();
      });
    for (auto& thread : threads)
      thread.join();
  }
  std::function<Result<>()> join(std::unique_ptr<Group>& group, const GroupOptions& o) const {
    return [&group, o, driver = driver_]() -> Result<> {
      CROSSDOCK_TRY(made, Group::create(o, layout(), driver));
      group = std::move(made);
      return {};
    };
  }
  static std::function<Result<>()> again(Group& group) {
    return [&group] { return group.reform(soon()); };
  }
};

TEST_F(Elastic, SurvivorsKeepTheirAddressesAndSeeTheNewWindow) {
  for (const Backend backend : {Backend::kCpu, Backend::kGpu}) {
    std::unique_ptr<Group> a;
    std::unique_ptr<Group> b;
    together({join(a, options(0, 2, backend)), join(b, options(1, 2, backend))});
    EXPECT_EQ(a->generation(), 1u);
    u64* const own = a->rank(0).at<u64>(64);
    u64* const of_peer = a->rank(0).at<u64>(64, 1);
    *of_peer = 5;
    EXPECT_EQ(*b->rank(1).at<u64>(64), 5u);
    b.reset();
    together({again(*a), join(b, options(1, 2, backend))});
    EXPECT_EQ(a->generation(), 2u);
    EXPECT_EQ(a->rank(0).at<u64>(64), own);
    EXPECT_EQ(a->rank(0).at<u64>(64, 1), of_peer);
    EXPECT_EQ(*of_peer, 0u);
    *of_peer = 6;
    EXPECT_EQ(*b->rank(1).at<u64>(64), 6u) << "the window of the new process";
    *b->rank(1).at<u64>(64, 0) = 7;
    EXPECT_EQ(*own, 7u);
    together({[&] { return a->reset(soon()); }, [&] { return b->reset(soon()); }});
    EXPECT_EQ(*own, 0u);
  }
}

TEST_F(Elastic, AVacantSeatTakesWhatIsWrittenAndLittleMemory) {
  for (const Backend backend : {Backend::kCpu, Backend::kGpu}) {
    std::unique_ptr<Group> a;
    std::unique_ptr<Group> b;
    std::unique_ptr<Group> c;
    together({join(a, options(0, 3, backend, 1)), join(b, options(1, 3, backend, 1)),
              join(c, options(2, 3, backend, 1))});
    const int allocations = fake_->live().allocations;
    c.reset();
    together({again(*a), again(*b)});
    EXPECT_THAT(std::vector<u32>(a->vacant_ranks().begin(), a->vacant_ranks().end()),
                ElementsAre(2));
    *a->rank(0).at<u64>(4088, 2) = 9;
    *a->rank(0).at<u64>(0, 2) = 9;
    EXPECT_EQ(*a->rank(0).at<u64>(0), 0u);
    EXPECT_EQ(*b->rank(1).at<u64>(0), 0u);
    if (backend == Backend::kGpu) {
      // Windows of 0 and 1 here and imported there, and a granule for each of both.
      EXPECT_LT(fake_->live().allocations, allocations);
    }
    b.reset();
    together({again(*a)});
    EXPECT_THAT(std::vector<u32>(a->vacant_ranks().begin(), a->vacant_ranks().end()),
                ElementsAre(1, 2));
    together({again(*a), join(c, options(2, 3, backend, 1))});
    *c->rank(2).at<u64>(8, 0) = 3;
    EXPECT_EQ(*a->rank(0).at<u64>(8), 3u);
  }
}

// Rank 2 is alive but late: the others go on without it, and then with another in its seat.
TEST_F(Elastic, WhatOneThatWasLeftOutWritesReachesNobody) {
  std::unique_ptr<Group> a;
  std::unique_ptr<Group> b;
  std::unique_ptr<Group> late;
  const auto of = [&](u32 rank) { return options(rank, 3, Backend::kGpu, 2); };
  together({join(a, of(0)), join(b, of(1)), join(late, of(2))});
  u64* const own = a->rank(0).at<u64>(64);
  u64* const of_peer = a->rank(0).at<u64>(64, 1);
  const auto write_late = [&] {
    for (const u32 peer : {0u, 1u, 2u})
      *late->rank(2).at<u64>(64, peer) = 9;
    EXPECT_EQ(*own, 0u);
    EXPECT_EQ(*of_peer, 0u);
    EXPECT_EQ(*b->rank(1).at<u64>(64), 0u);
  };
  together({again(*a), again(*b)});
  write_late();
  EXPECT_EQ(a->rank(0).at<u64>(64), own) << "where they were";
  EXPECT_EQ(a->rank(0).at<u64>(64, 1), of_peer);
  *of_peer = 5;
  EXPECT_EQ(*b->rank(1).at<u64>(64), 5u);
  std::unique_ptr<Group> d;
  together({again(*a), again(*b), join(d, of(2))});
  write_late();
  EXPECT_EQ(*d->rank(2).at<u64>(64), 0u);
  *d->rank(2).at<u64>(64, 0) = 7;
  EXPECT_EQ(*own, 7u);
  *of_peer = 8;
  EXPECT_EQ(*d->rank(2).at<u64>(64, 1), 8u);
  late.reset();
  EXPECT_EQ(*own, 7u);
}

TEST_F(Elastic, OneThatWasLeftOutComesBack) {
  for (const Backend backend : {Backend::kCpu, Backend::kGpu}) {
    std::unique_ptr<Group> a;
    std::unique_ptr<Group> b;
    std::unique_ptr<Group> late;
    const auto of = [&](u32 rank) { return options(rank, 3, backend, 2); };
    together({join(a, of(0)), join(b, of(1)), join(late, of(2))});
    u64* const own = late->rank(2).at<u64>(64);
    for (int turn = 0; turn < 2; ++turn) {
      together({again(*a), again(*b)});
      together({again(*a), again(*b), again(*late)});
      EXPECT_TRUE(late->check().ok());
      *late->rank(2).at<u64>(64, 0) = 3;
      EXPECT_EQ(*a->rank(0).at<u64>(64), 3u);
      *b->rank(1).at<u64>(64, 2) = 4;
      EXPECT_EQ(*own, 4u);
    }
  }
}

// They meet without it three times meanwhile, and what is over goes from the store.
TEST_F(Elastic, OneThatMissedManyGenerationsFindsTheNewestMeeting) {
  std::unique_ptr<Group> a;
  std::unique_ptr<Group> b;
  std::unique_ptr<Group> late;
  const auto of = [&](u32 rank) { return options(rank, 3, Backend::kGpu, 2); };
  together({join(a, of(0)), join(b, of(1)), join(late, of(2))});
  for (int turn = 0; turn < 3; ++turn)
    together({again(*a), again(*b)});
  Result<> back;
  std::thread thread([&] { back = late->reform(Deadline::in(10s)); });
  const Deadline end = Deadline::in(8s);
  while (a->waiting_ranks(soon()).value().empty() && !end.passed())
    std::this_thread::yield();
  together({again(*a), again(*b)});
  thread.join();
  ASSERT_TRUE(back.ok()) << back.error().describe();
  EXPECT_EQ(late->generation(), a->generation());
  EXPECT_TRUE(a->vacant_ranks().empty());
}

struct StrayParams {
  u64* word;
};
void stray(const StrayParams& p) {
  *p.word = 9;
}

// All members have one memory there: what a member that has no seat launches does not run.
TEST_F(Elastic, InTheTwinOneThatWasLeftOutLaunchesNothing) {
  std::unique_ptr<Group> a;
  std::unique_ptr<Group> b;
  std::unique_ptr<Group> late;
  const auto of = [&](u32 rank) { return options(rank, 3, Backend::kCpu, 2); };
  together({join(a, of(0)), join(b, of(1)), join(late, of(2))});
  const KernelRef<StrayParams> kernel{.name = "stray", .twin = stray};
  auto launcher = Launcher::create(*late, nullptr).value();
  const auto prepared = launcher.prepare(kernel, {.threads = 1}, soon()).value();
  const auto launch = [&] {
    return launcher.launch(late->rank(2), prepared, {}, {late->rank(2).at<u64>(64, 0)});
  };
  const auto refused = [](const Result<>& done) {
    ASSERT_EQ(done.code(), Code::kClosed);
    EXPECT_THAT(done.error().message, HasSubstr("without rank 2"));
  };
  ASSERT_TRUE(launch().ok());
  together({again(*a), again(*b)});
  refused(launch());
  refused(launcher.synchronize(soon()));
  refused(late->check());
  ASSERT_TRUE(Launcher::create(*a, nullptr).value().synchronize(soon()).ok());
  EXPECT_EQ(*a->rank(0).at<u64>(64), 0u);
  together({again(*a), again(*b), again(*late)});
  ASSERT_TRUE(launch().ok());
  ASSERT_TRUE(launcher.synchronize(soon()).ok());
  EXPECT_EQ(*a->rank(0).at<u64>(64), 9u);
  // Another has the seat, and what the heap of rank 2 had is gone: there is no way back.
  together({again(*a), again(*b)});
  std::unique_ptr<Group> d;
  together({again(*a), again(*b), join(d, of(2))});
  refused(launch());
  const auto back = late->reform(Deadline::in(5s));
  ASSERT_EQ(back.code(), Code::kClosed);
  EXPECT_THAT(back.error().message, HasSubstr("another has taken the seat of rank 2"));
  EXPECT_EQ(d->check().code(), Code::kOk);
}

// A reform that leaves somebody out fails at any call of the driver, and the next one heals it.
TEST_F(Elastic, AFailureWhereSomebodyIsLeftOutIsHealed) {
  for (const char* function : {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap",
                               "cuMemImportFromShareableHandle", "cuMemSetAccess"})
    for (const int after : {0, 1, 2}) {
      SCOPED_TRACE(function + std::to_string(after));
      std::unique_ptr<Group> a;
      std::unique_ptr<Group> b;
      std::unique_ptr<Group> late;
      const auto of = [&](u32 rank) {
        auto o = options(rank, 3, Backend::kGpu, 2);
        o.place->settle = 300ms;
        o.place->name += function + std::to_string(after);
        return o;
      };
      together({join(a, of(0)), join(b, of(1)), join(late, of(2))});
      ASSERT_TRUE(a && b && late);
      u64* const own = a->rank(0).at<u64>(64);
      fake_->fail({.function = function, .status = cuda::Status::kOutOfMemory, .after = after});
      const int before = fake_->calls(function);
      Result<> other;
      std::thread thread([&] { other = b->reform(soon()); });
      const Result<> mine = a->reform(soon());
      thread.join();
      EXPECT_EQ(mine.code(), other.code());
      EXPECT_EQ(mine.ok(), fake_->calls(function) <= before + after);
      fake_->reset();
      together({again(*a), again(*b)});
      for (const u32 peer : {0u, 1u})
        *late->rank(2).at<u64>(64, peer) = 9;
      EXPECT_EQ(*own, 0u);
      EXPECT_EQ(*b->rank(1).at<u64>(64), 0u);
      *b->rank(1).at<u64>(64, 0) = 7;
      *a->rank(0).at<u64>(64, 1) = 8;
      EXPECT_EQ(*own, 7u);
      EXPECT_EQ(*b->rank(1).at<u64>(64), 8u);
    }
}

TEST_F(Elastic, AGroupWhoseResetFailedIsHealed) {
  std::unique_ptr<Group> a;
  std::unique_ptr<Group> b;
  together({join(a, options(0, 2, Backend::kCpu)), join(b, options(1, 2, Backend::kCpu))});
  b.reset();
  EXPECT_EQ(a->reset(Deadline::in(100ms)).code(), Code::kDeadline);
  ASSERT_EQ(a->check().code(), Code::kClosed);
  EXPECT_THAT(a->check().error().message, HasSubstr("reform()"));
  together({again(*a), join(b, options(1, 2, Backend::kCpu))});
  EXPECT_TRUE(a->check().ok());
}

TEST_F(Elastic, WhatCannotBeIsRefused) {
  const auto refused = [&](const GroupOptions& o, const char* text) {
    const auto made = Group::create(o, layout(), driver_);
    ASSERT_EQ(made.code(), Code::kInvalidArgument);
    EXPECT_THAT(made.error().message, HasSubstr(text));
  };
  GroupOptions o = options(0, 2, Backend::kCpu, 3);
  refused(o, "fewest = 3 ranks of a world of 2");
  o = options(0, 2, Backend::kCpu);
  o.ranks.clear();
  refused(o, "needs this process's ranks");
  o = options(0, 2, Backend::kCpu);
  o.place->name.clear();
  refused(o, "must have 1 to 256 bytes");
  o = options(0, 2, Backend::kCpu);
  o.exchange = make_exchange({0, 2}, [](std::string_view, Deadline) {
                 return Result<std::vector<std::string>>(std::vector<std::string>());
               }).value();
  refused(o, "an exchange and a place");
  const auto fixed = Group::create({.world = 2, .backend = Backend::kCpu}, layout()).value();
  EXPECT_EQ(fixed->reform(soon()).code(), Code::kInvalidArgument);
  EXPECT_TRUE(fixed->vacant_ranks().empty());
}

}  // namespace
}  // namespace crossdock::symm
