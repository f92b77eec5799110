// Groups of several processes, played by threads: host memory and fake GPUs. What they disagree
// on, what fails on one of them, who does not come; all of them get an error, and nothing is left.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <gmock/gmock.h>

#include "support/fake_cuda/fixture.hpp"
#include "support/symm_members.hpp"
#include "symm/gpu.hpp"
#include "symm/group.hpp"
#include "symm/store_exchange.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using crossdock::testing::Meeting;
using crossdock::testing::process_use;
using crossdock::testing::run_members;
using ::testing::AllOf;
using ::testing::HasSubstr;

using MadeGroup = Result<std::unique_ptr<Group>>;

Deadline soon() {
  return Deadline::in(60s);
}

device::SymmetricLayout layout_of(u64 bytes, const char* name = "data") {
  device::SymmetricLayout layout;
  (void)layout.add("control", 256);
  (void)layout.add(name, bytes);
  return layout;
}

class Members : public crossdock::testing::FakeCudaTest {
 protected:
  // One rank for each of `members` processes, GPU r for rank r.
  static GroupOptions options(u32 member, u32 members, std::shared_ptr<Exchange> exchange,
                              Backend backend) {
    return {.world = members,
            .ranks = {{.rank = member, .device = static_cast<int>(member)}},
            .backend = backend,
            .exchange = std::move(exchange),
            .timeout = 60s};
  }
  using Change = std::function<void(u32 member, GroupOptions&, device::SymmetricLayout&)>;
  // What every member's create() returned.
  std::vector<MadeGroup> create_all(u32 members, Backend backend, const Change& change) {
    std::vector<std::optional<MadeGroup>> made(members);
    run_members(members, [&](u32 m, std::shared_ptr<Exchange> exchange) {
      GroupOptions o = options(m, members, std::move(exchange), backend);
      device::SymmetricLayout layout = layout_of(4096);
      if (change) change(m, o, layout);
      made[m].emplace(Group::create(o, layout, driver_));
    });
    std::vector<MadeGroup> result;
    for (auto& group : made)
      result.push_back(std::move(*group));
    return result;
  }
  // Every member fails with `code`; `texts[m]` is in the message of member m, or of all.
  void expect_failures(std::vector<MadeGroup> made, Code code,
                       const std::vector<std::string>& texts) {
    for (std::size_t m = 0; m < made.size(); ++m) {
      ASSERT_EQ(made[m].code(), code)
          << "member " << m << ": " << (made[m].ok() ? "it worked" : made[m].error().describe());
      EXPECT_THAT(made[m].error().message, HasSubstr(texts[texts.size() == 1 ? 0 : m]));
    }
    EXPECT_TRUE(fake_->live() == before_) << "something was left behind";
  }
};

// Every rank writes into every window; every rank finds in its own what each wrote.
void talk(Group& group, Meeting& meeting) {
  const auto meet = [&] { (void)meeting.all_gather(group.member(), "", soon()).value(); };
  meet();
  for (const u32 r : group.local_ranks())
    for (u32 peer = 0; peer < group.world(); ++peer)
      *group.rank(r).at<u64>(256 + 8 * r, peer) = 1000 * r + peer;
  meet();
  for (const u32 r : group.local_ranks())
    for (u32 peer = 0; peer < group.world(); ++peer)
      EXPECT_EQ(*group.rank(r).at<u64>(256 + 8 * peer), 1000 * peer + r);
  meet();
}

TEST_F(Members, OneRankEachSeesAllWindows) {
  for (const Backend backend : {Backend::kCpu, Backend::kGpu})
    for (const u32 members : {2u, 3u, 4u})
      for (const Addressing addressing : {Addressing::kStride, Addressing::kTable}) {
        SCOPED_TRACE(members);
        Meeting meeting(members);
        run_members(members, [&](u32 m, std::shared_ptr<Exchange> exchange) {
          GroupOptions o = options(m, members, std::move(exchange), backend);
          o.addressing = addressing;
          const auto group = Group::create(o, layout_of(4096), driver_);
          ASSERT_TRUE(group.ok()) << group.error().describe();
          EXPECT_EQ((*group)->twin(), nullptr);
          EXPECT_FALSE((*group)->all_local());
          EXPECT_EQ((*group)->rank(m).view().offsets == nullptr, addressing == Addressing::kStride);
          talk(**group, meeting);
          ASSERT_TRUE((*group)->reset(soon()).ok());
          EXPECT_EQ(*(*group)->rank(m).at<u64>(256), 0u);
          talk(**group, meeting);
        });
      }
}

TEST_F(Members, AProcessMayHaveSeveralRanks) {
  for (const Backend backend : {Backend::kCpu, Backend::kGpu}) {
    Meeting meeting(2);
    run_members(2, [&](u32 m, std::shared_ptr<Exchange> exchange) {
      GroupOptions o = options(m, 2, std::move(exchange), backend);
      o.world = 4;
      o.ranks =
          m == 0 ? std::vector<LocalRank>{{3, 0}} : std::vector<LocalRank>{{2, 1}, {0, 2}, {1, 3}};
      const auto group = Group::create(o, layout_of(1 << 20), driver_);
      ASSERT_TRUE(group.ok()) << group.error().describe();
      talk(**group, meeting);
    });
  }
}

// What a layer above has done for each rank of its own.
TEST_F(Members, AFailureOfALayerNamesTheRankThatFailed) {
  run_members(2, [&](u32 m, std::shared_ptr<Exchange> exchange) {
    GroupOptions o = options(m, 2, std::move(exchange), Backend::kCpu);
    o.world = 4;
    o.ranks = m == 0 ? std::vector<LocalRank>{{.rank = 2}}
                     : std::vector<LocalRank>{{.rank = 0}, {.rank = 1}, {.rank = 3}};
    const auto group = Group::create(o, layout_of(4096));
    ASSERT_TRUE(group.ok()) << group.error().describe();
    ASSERT_TRUE((*group)->conclude({}, m == 0 ? 2 : 0, "count their beans", soon()).ok());
    const Result<> mine =
        m == 0 ? Result<>() : make_error(Code::kUnsupported, "rank 3 has no beans");
    const auto told = (*group)->conclude(mine, m == 0 ? 2 : 3, "count their beans", soon());
    ASSERT_EQ(told.code(), Code::kUnsupported);
    EXPECT_EQ(told.error().message,
              m == 0 ? "rank 3 failed: rank 3 has no beans" : "rank 3 has no beans");
    EXPECT_EQ((*group)->check().code(), Code::kClosed);
  });
}

TEST_F(Members, AnyExchangeWillDo) {
  const auto store = rendezvous::open_store("inproc://symm-members", soon()).value();
  Meeting meeting(3);
  std::vector<std::thread> threads;
  for (u32 m = 0; m < 3; ++m)
    threads.emplace_back([&, m] {
      const auto exchange = make_store_exchange(store, "group", {m, 3}).value();
      const auto group =
          Group::create(options(m, 3, exchange, Backend::kCpu), layout_of(4096), driver_);
      ASSERT_TRUE(group.ok()) << group.error().describe();
      talk(**group, meeting);
      ASSERT_TRUE((*group)->reset(soon()).ok());
    });
  for (auto& thread : threads)
    thread.join();
  // An exchange of one process is no trouble, and runs kernels.
  const auto alone =
      Group::create({.world = 2,
                     .ranks = {{.rank = 0}, {.rank = 1}},
                     .backend = Backend::kCpu,
                     .exchange = make_store_exchange(store, "alone", {0, 1}).value()},
                    layout_of(4096));
  ASSERT_TRUE(alone.ok()) << alone.error().describe();
  EXPECT_NE((*alone)->twin(), nullptr);
}

TEST_F(Members, DisagreementsAreToldToAll) {
  for (const Backend backend : {Backend::kCpu, Backend::kGpu}) {
    expect_failures(create_all(3, backend,
                               [](u32 m, GroupOptions&, auto& layout) {
                                 if (m == 1) layout = layout_of(8192);
                               }),
                    Code::kIncompatible,
                    {"rank 1 asks for a window of 8448 bytes, rank 0 for 4352 bytes"});
    expect_failures(create_all(3, backend,
                               [](u32 m, GroupOptions&, auto& layout) {
                                 if (m == 2) layout = layout_of(4096, "other");
                               }),
                    Code::kIncompatible,
                    {"'other' of 4096 bytes at 256 and 'data' of 4096 bytes at 256"});
    expect_failures(create_all(3, backend,
                               [](u32 m, GroupOptions& o, auto&) {
                                 if (m == 2) o.world = 4;
                               }),
                    Code::kIncompatible, {"rank 2 says the world has 4 ranks, rank 0 says 3"});
    expect_failures(create_all(3, backend,
                               [](u32 m, GroupOptions& o, auto&) {
                                 if (m == 2) o.ranks = {{.rank = 1, .device = 2}};
                               }),
                    Code::kInvalidArgument,
                    {"rank 1 is given twice: to process 1 and process 2 of 3"});
  }
  expect_failures(create_all(2, Backend::kGpu,
                             [](u32 m, GroupOptions& o, auto&) {
                               if (m == 1) o.backend = Backend::kCpu;
                             }),
                  Code::kIncompatible, {"rank 1 runs on the CPU, rank 0 on the GPU"});
}

TEST_F(Members, TheSameGpuInTwoProcessesIsToldToBoth) {
  expect_failures(
      create_all(2, Backend::kGpu, [](u32, GroupOptions& o, auto&) { o.ranks[0].device = 3; }),
      Code::kInvalidArgument, {"rank 0 and rank 1 are on the same GPU, GPU-fa"});
}

TEST_F(Members, WhatFailsOnOneIsToldToAll) {
  // Before anything is agreed on: the member's own error, and its text to the others.
  expect_failures(create_all(2, Backend::kGpu,
                             [](u32 m, GroupOptions& o, auto&) {
                               if (m == 1) o.ranks[0].device = 17;
                             }),
                  Code::kInvalidArgument,
                  {"rank 1 failed: GPU 17 does not exist", "GPU 17 does not exist"});
  expect_failures(create_all(2, Backend::kCpu,
                             [](u32 m, GroupOptions& o, auto&) {
                               if (m == 0) o.ranks = {};
                             }),
                  Code::kInvalidArgument,
                  {"must name this process's ranks", "rank 0 failed: with an exchange"});
  // Out of memory when windows are allocated.
  fake_->set_device_bytes(1, 1 << 20);
  expect_failures(create_all(3, Backend::kGpu, {}), Code::kNoMemory,
                  {"rank 1 failed: allocate the window of rank 1", "allocate the window of rank 1",
                   "rank 1 failed: allocate the window of rank 1"});
  fake_->reset();
  // Peers that cannot reach each other.
  fake_->set_peer_access(0, 2, false);
  expect_failures(create_all(3, Backend::kGpu, {}), Code::kUnreachable,
                  {"rank 0 on GPU 0", "rank 0 failed: rank 0 on GPU 0", "rank 0 failed: rank 0"});
  fake_->reset();
}

// One driver call fails in one of the threads, whichever comes to it: all members fail.
TEST_F(Members, AFailureAnywhereFailsAllAndLeavesNothing) {
  for (const char* function :
       {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemMap",
        "cuMemAddressReserve", "cuMemSetAccess", "cuMemHostAlloc", "cuMemsetD8Async"})
    for (const int after : {0, 1}) {
      SCOPED_TRACE(function);
      fake_->fail({.function = function, .status = cuda::Status::kOutOfMemory, .after = after});
      const auto made = create_all(2, Backend::kGpu, {});
      fake_->reset();
      for (const auto& group : made)
        ASSERT_EQ(group.code(), Code::kNoMemory) << function << " number " << after;
      EXPECT_TRUE(fake_->live() == before_) << function << " number " << after;
    }
}

TEST_F(Members, WhoDoesNotComeIsNamedAtTheDeadline) {
  const auto store = rendezvous::open_store("inproc://symm-late", soon()).value();
  GroupOptions o = options(0, 2, make_store_exchange(store, "g", {1, 2}).value(), Backend::kGpu);
  o.timeout = 100ms;
  const auto made = Group::create(o, layout_of(4096), driver_);
  ASSERT_EQ(made.code(), Code::kDeadline);
  EXPECT_EQ(made.error().scope, Scope::kPeer);
  EXPECT_THAT(made.error().message,
              AllOf(HasSubstr("the 2 processes of a symmetric group could not tell each other that "
                              "they can begin (store inproc://symm-late, name g)"),
                    HasSubstr("of 2 processes these did not come in time: 0")));
  EXPECT_TRUE(fake_->live() == before_);
}

// Member 1 stays away from the exchange after `calls` of its calls.
std::shared_ptr<Exchange> leaving_after(std::shared_ptr<Exchange> inner, u32 calls) {
  auto left = std::make_shared<u32>(calls);
  const Membership membership = inner->membership();
  return make_exchange(membership,
                       [inner, left](std::string_view bytes,
                                     Deadline deadline) -> Result<std::vector<std::string>> {
                         if (*left == 0) return make_error(Code::kCancelled, "this process leaves");
                         --*left;
                         return inner->all_gather(bytes, deadline);
                       })
      .value();
}

TEST_F(Members, AProcessThatLeavesOnTheWayIsNamedInEveryStep) {
  for (const u32 calls : {0u, 1u, 2u}) {
    const auto store = rendezvous::open_store("inproc://symm-leave", soon()).value();
    std::array<std::optional<MadeGroup>, 2> made;
    std::vector<std::thread> threads;
    for (u32 m = 0; m < 2; ++m)
      threads.emplace_back([&, m] {
        // Member m has rank 1 - m.
        auto exchange = make_store_exchange(store, "g", {m, 2}).value();
        if (m == 1) exchange = leaving_after(exchange, calls);
        GroupOptions o = options(1 - m, 2, exchange, Backend::kGpu);
        if (m == 0) o.timeout = 2s;
        made[m].emplace(Group::create(o, layout_of(4096), driver_));
      });
    for (auto& thread : threads)
      thread.join();
    EXPECT_EQ(made[1]->code(), Code::kCancelled);
    ASSERT_EQ(made[0]->code(), Code::kDeadline) << calls;
    EXPECT_THAT(made[0]->error().message, HasSubstr("these did not come in time: 1"));
    EXPECT_THAT(made[0]->error().message,
                HasSubstr(calls > 0 ? "process 1 has rank 0" : "they can begin"));
    EXPECT_TRUE(fake_->live() == before_);
  }
}

TEST_F(Members, AResetWithoutAPeerEndsAtTheDeadline) {
  Meeting meeting(2);
  run_members(2, [&](u32 m, std::shared_ptr<Exchange> exchange) {
    auto group = Group::create(options(m, 2, std::move(exchange), Backend::kCpu), layout_of(4096));
    ASSERT_TRUE(group.ok()) << group.error().describe();
    if (m == 1) group->reset();
    (void)meeting.all_gather(m, "", soon()).value();
    if (m == 1) return;
    // The peer is gone; its window is still there, and so is the group until a reset.
    *(*group)->rank(0).at<u64>(512, 1) = 7;
    EXPECT_EQ(*(*group)->rank(0).at<u64>(512, 1), 7u);
    EXPECT_TRUE((*group)->check().ok());
    EXPECT_EQ((*group)->reset(Deadline::in(50ms)).code(), Code::kDeadline);
    EXPECT_EQ((*group)->check().code(), Code::kClosed);
  });
}

TEST_F(Members, GroupsThatAreMixedUpAreFoundOut) {
  // Member 1 answers the second call with what it said in another group.
  const auto outcome = message::encode(message::Outcome{.agreement = 1, .step = 0}).value();
  std::vector<std::optional<MadeGroup>> made(2);
  run_members(2, [&](u32 m, std::shared_ptr<Exchange> exchange) {
    auto calls = std::make_shared<int>(0);
    auto mixed = make_exchange({m, 2},
                               [exchange, calls, outcome, m](
                                   std::string_view bytes,
                                   Deadline deadline) -> Result<std::vector<std::string>> {
                                 if (m == 0 || (*calls)++ != 1)
                                   return exchange->all_gather(bytes, deadline);
                                 CROSSDOCK_TRY(parts, exchange->all_gather(outcome, deadline));
                                 parts[1] = std::string(bytes);
                                 return parts;
                               })
                     .value();
    GroupOptions o = options(m, 2, mixed, Backend::kCpu);
    o.timeout = m == 0 ? 60s : 3s;
    made[m].emplace(Group::create(o, layout_of(4096)));
  });
  ASSERT_EQ(made[0]->code(), Code::kIncompatible);
  EXPECT_THAT(made[0]->error().message, HasSubstr("two groups share one name or exchange"));
  EXPECT_FALSE(made[1]->ok());
}

TEST_F(Members, FabricHandlesCarryWindows) {
  fake_->set_attribute(cuda::DeviceAttribute::kHandleTypeFabric, 1);
  const HeapOptions shape{.world = 2, .window_bytes = 4096};
  std::array<std::unique_ptr<Heap>, 2> heaps;
  std::array<WindowHandle, 2> handles;
  for (u32 r = 0; r < 2; ++r) {
    heaps[r] = make_gpu_heap(
        {.heap = shape, .sharing = Sharing::kFabric, .local = {{r, context(static_cast<int>(r))}}});
    ASSERT_TRUE(heaps[r]->allocate(r).ok());
    handles[r] = heaps[r]->share(r).value();
    handles[r].bytes = heaps[r]->allocated_bytes();
    EXPECT_EQ(handles[r].fabric.size(), sizeof(cuda::FabricHandle));
    EXPECT_FALSE(handles[r].fd);
  }
  for (u32 r = 0; r < 2; ++r) {
    ASSERT_TRUE(heaps[r]->reserve(heaps[r]->allocated_bytes()).ok());
    ASSERT_TRUE(heaps[r]->map(r, nullptr).ok());
    ASSERT_TRUE(heaps[r]->map(1 - r, &handles[1 - r]).ok());
  }
  heaps[0]->window(1)[100] = 77;
  EXPECT_EQ(heaps[1]->window(1)[100], 77);
  handles[0].fabric.resize(3);
  EXPECT_EQ(heaps[1]->map(0, &handles[0]).code(), Code::kCorrupt);
}

TEST_F(Members, ThousandCyclesLeaveNothing) {
  Meeting meeting(2);
  std::array<crossdock::testing::ProcessUse, 2> use;
  run_members(2, [&](u32 m, std::shared_ptr<Exchange> exchange) {
    for (int i = 0; i < 1050; ++i) {
      if (i == 50 || i == 1049) {
        (void)meeting.all_gather(m, "", soon()).value();
        if (m == 0) use[i == 50 ? 0 : 1] = process_use();
        (void)meeting.all_gather(m, "", soon()).value();
      }
      const Backend backend = i % 2 == 0 ? Backend::kCpu : Backend::kGpu;
      const auto group = Group::create(options(m, 2, exchange, backend), layout_of(4096), driver_);
      ASSERT_TRUE(group.ok()) << group.error().describe();
    }
  });
  EXPECT_TRUE(fake_->live() == before_);
  crossdock::testing::expect_no_growth(use[0], use[1]);
}

}  // namespace
}  // namespace crossdock::symm
