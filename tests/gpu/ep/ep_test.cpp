// Dispatch and combine on real GPUs, as many as there are: every payload against the reference, odd
// sizes and routings, graphs replayed with new routing, calls in a row without the host, faults.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <gmock/gmock.h>
#include <thread>
#include <tuple>

#include "cuda/graph.hpp"
#include "gpu/ep/ep_gpu.hpp"

namespace crossdock::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

TEST_F(EpGpu, Fp8RowsWithScales) {
  EpCase c = large(512);
  c.scale_bytes = 224;
  rounds(c);
}
TEST_F(EpGpu, Fp8RowsWithScalesByColumnAndWideIds) {
  EpCase c = large(300);
  c.scale_bytes = 224;
  c.scales_by_column = c.wide_ids = true;
  rounds(c);
}
TEST_F(EpGpu, Bf16RowsAndTwoBiases) {
  EpCase c = large(400);
  c.row_bytes = 14336;
  c.biases = 2;
  rounds(c);
}
TEST_F(EpGpu, Fp8CastFused) {
  EpCase c = large(300);
  c.row_bytes = 14336;
  c.cast = true;
  rounds(c);
}
TEST_F(EpGpu, Fp8CastFusedWithScalesByColumn) {
  EpCase c = large(128);
  c.row_bytes = 14336;
  c.cast = c.scales_by_column = true;
  rounds(c);
}
TEST_F(EpGpu, OddTokensAndRows) {
  for (const u32 tokens : {1u, 2u, 7u, 129u}) {
    EpCase c{.experts = 9,
             .top_k = 3,
             .max_tokens = tokens,
             .row_bytes = 48,
             .scale_bytes = 12,
             .combine_bytes = 80,
             .biases = 1,
             .blocks = {5, 3}};
    rounds(c);
    if (HasFatalFailure()) return;
  }
}
TEST_F(EpGpu, NoTokensAndDifferentTokens) {
  rounds({.max_tokens = 64, .tokens = {0}});
  rounds({.max_tokens = 64, .tokens = {0, 64, 1, 33}});
}
TEST_F(EpGpu, EveryTopK) {
  for (const u32 top_k : {1u, 2u, 9u, 32u})
    rounds({.experts = 64, .top_k = top_k, .max_tokens = 50, .row_bytes = 256}, 2);
}
TEST_F(EpGpu, OneExpertAllMaskedSkewed) {
  for (const EpRoutingKind kind :
       {EpRoutingKind::kOneExpert, EpRoutingKind::kAllMasked, EpRoutingKind::kSkewed}) {
    EpCase c = large(100);
    c.routing = kind;
    rounds(c, 2);
  }
}
TEST_F(EpGpu, RowsOfThirtyTwoKibibytes) {
  EpCase c = large(60);
  c.row_bytes = c.combine_bytes = 32768;
  rounds(c, 2);
}
TEST_F(EpGpu, CombineByPush) {
  for (const u32 tokens : {1u, 37u, 600u}) {
    EpCase c = large(tokens);
    c.push = true;
    c.combine_weights = tokens == 37;
    rounds(c);
    if (HasFatalFailure()) return;
  }
  EpCase odd{.experts = 9,
             .top_k = 3,
             .max_tokens = 129,
             .row_bytes = 48,
             .combine_bytes = 80,
             .biases = 1,
             .blocks = {5, 3},
             .push = true};
  rounds(odd);
  EpCase wide = large(60);
  wide.row_bytes = wide.combine_bytes = 32768;
  wide.push = true;
  rounds(wide, 2);
}
TEST_F(EpGpu, EveryNumberOfBlocks) {
  // All blocks of all ranks must run at once: ranks that share a GPU share its SMs.
  const u32 most = 132u / static_cast<u32>(ranks_of_a_gpu());
  for (const u32 blocks : {1u, 4u, 24u, most}) {
    EpCase c = large(260);
    c.blocks = {blocks};
    rounds(c, 2);
  }
}

// ---- by expert ---------------------------------------------------------------------------------

// The lists against plain loops over what was delivered, then the sums of ones for every place.
TEST_F(EpGpu, RowsByExpertAndTheirSums) {
  EpCase c = large(300);
  c.world = world_;
  c.row_bytes = c.combine_bytes;
  auto options = ep_options(c, symm::Backend::kGpu);
  options.ep.expert_alignment = 128;
  EpGroupRig r(c, ep::Group::create(options).value());
  r.load(EpInputs(c, 4));
  const auto handles = r.dispatch();
  for (const auto& handle : handles) {
    symm::Rank& on = r.rank(handle.rank());
    const u32 experts = c.expert_map().count(handle.rank());
    const auto grouped = r.group().group_rows(handle).value();
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    const u32 rows = handle.rows(ep_soon()).value();
    const auto ids = symm::download(on, handle.received().ids, u64{rows} * c.top_k, ep_soon());
    const auto offsets = symm::download(on, grouped.offsets, experts + 1, ep_soon()).value();
    const auto places = symm::download(on, grouped.rows, offsets[experts], ep_soon()).value();
    u32 place = 0;
    for (u32 e = 0; e < experts; ++e) {
      ASSERT_EQ(offsets[e], place);
      for (u32 choice = 0; choice < rows * c.top_k; ++choice)
        if (ids.value()[choice] == static_cast<i32>(e)) {
          ASSERT_EQ(places[place++], static_cast<i32>(choice / c.top_k)) << "expert " << e;
        }
      for (; place % 128 != 0; ++place)
        ASSERT_EQ(places[place], -1);
    }
    ASSERT_EQ(offsets[experts], place);
    const std::vector<u16> ones(u64{place} * c.combine_bytes / 2, bf16_of(1.0f));
    auto by_place = on.allocate(ones.size() * 2 + 16).value();
    ASSERT_TRUE(symm::upload(on, by_place.as<u16>(), ones, ep_soon()).ok());
    ASSERT_TRUE(r.group().reduce_rows(handle, by_place.address(), 0, false).ok());
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    const auto sums = symm::download(on, static_cast<const u16*>(handle.expert_input().rows),
                                     u64{rows} * c.combine_bytes / 2, ep_soon());
    for (u32 row = 0; row < rows; ++row) {
      u32 chosen = 0;
      for (u32 k = 0; k < c.top_k; ++k)
        chosen += ids.value()[row * c.top_k + k] >= 0;
      for (u32 i = 0; i < c.combine_bytes / 2; ++i)
        ASSERT_EQ(sums.value()[u64{row} * (c.combine_bytes / 2) + i],
                  bf16_of(static_cast<float>(chosen)))
            << "row " << row;
    }
  }
}

// ---- in a row ----------------------------------------------------------------------------------

TEST_F(EpGpu, AThousandRoundsWithoutTheHostKeepTheirRows) {
  for (const auto& [tokens, push, overlap] : {std::tuple{1u, false, false},
                                              {100u, false, false},
                                              {1u, false, true},
                                              {100u, true, true},
                                              {100u, true, false}}) {
    SCOPED_TRACE(::testing::Message()
                 << tokens << " tokens, push " << push << " overlap " << overlap);
    EpCase c = identity_case(world_, tokens);
    c.push = push;
    c.overlap = overlap;
    EpGroupRig r = rig(c);
    const EpInputs inputs = finite_inputs(c, tokens);
    r.load(inputs);
    for (u32 i = 0; i < 1000; ++i)
      for (const u32 rank : r.group().local_ranks())
        ASSERT_NO_FATAL_FAILURE(identity_round(r, rank));
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    ASSERT_NO_FATAL_FAILURE(check_identity(r, c, inputs));
  }
}

void replay_with_new_routing(const EpCase& c) {
  EpGroupRig r = EpGroupRig::create(c, symm::Backend::kGpu).value();
  ASSERT_NO_FATAL_FAILURE(capture_replay_and_check(r, c, 50));
}

TEST_F(EpGpu, GraphsReplayWithNewRouting) {
  replay_with_new_routing(identity_case(world_, 120));
}
TEST_F(EpGpu, GraphsOfOverlappingLaunchesReplayWithNewRouting) {
  for (const bool push : {false, true}) {
    EpCase c = identity_case(world_, 60);
    c.push = push;
    c.overlap = true;
    replay_with_new_routing(c);
    if (HasFatalFailure()) return;
  }
}

TEST_F(EpGpu, TwoDispatchesThenTwoCombines) {
  EpCase c = large(100);
  EpGroupRig r = rig(c);
  const EpInputs inputs(c, 7);
  const EpReference reference(c, inputs);
  r.load(inputs);
  auto first = r.dispatch();
  auto second = r.dispatch();
  ASSERT_NO_FATAL_FAILURE(r.synchronize());
  for (auto* handles : {&first, &second}) {
    const u32 round = handles == &first ? 1 : 2;
    for (const auto& handle : *handles) {
      ASSERT_NO_FATAL_FAILURE(r.check(handle, reference));
      r.write_expert_rows(handle, inputs, round);
    }
  }
  for (auto* handles : {&first, &second}) {
    for (const auto& handle : *handles)
      ASSERT_NO_FATAL_FAILURE(r.combine(handle));
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (const auto& handle : *handles)
      ASSERT_NO_FATAL_FAILURE(
          r.check_combined(handle.rank(), reference, handles == &first ? 1 : 2));
  }
}

TEST_F(EpGpu, TwoGroupsInterleave) {
  EpCase c = large(100);
  EpGroupRig a = rig(c), b = rig(c);
  const EpInputs of_a(c, 3), of_b(c, 4);
  a.load(of_a);
  b.load(of_b);
  for (u32 i = 0; i < 20; ++i) {
    const auto one = a.dispatch();
    const auto two = b.dispatch();
    if (i < 19) continue;
    ASSERT_NO_FATAL_FAILURE(a.synchronize());
    ASSERT_NO_FATAL_FAILURE(b.synchronize());
    for (const auto& handle : one)
      ASSERT_NO_FATAL_FAILURE(a.check(handle, EpReference(c, of_a)));
    for (const auto& handle : two)
      ASSERT_NO_FATAL_FAILURE(b.check(handle, EpReference(c, of_b)));
  }
}

// Dispatch and combine, on both paths; the memory of every rank's GPU.
TEST_F(EpGpu, MemoryDoesNotGrowOverThousandsOfCalls) {
  for (const bool small : {false, true}) {
    SCOPED_TRACE(small ? "few tokens" : "many tokens");
    EpCase c = identity_case(world_, 8);
    c.fixed = small;
    EpGroupRig r = rig(c);
    r.load(finite_inputs(c, 1));
    const auto rounds = [&](u32 count) {
      for (u32 i = 0; i < count; ++i)
        for (const u32 rank : r.group().local_ranks())
          ASSERT_NO_FATAL_FAILURE(identity_round(r, rank));
      ASSERT_NO_FATAL_FAILURE(r.synchronize());
    };
    ASSERT_NO_FATAL_FAILURE(rounds(1000));
    EXPECT_TRUE(crossdock::testing::stays_level([&] { return used_of(r); }, [&] { rounds(9000); }));
  }
}

// ---- faults ------------------------------------------------------------------------------------

TEST_F(EpGpu, AnIdOutOfRangeIsNamedAndTheGroupWorksAfterReset) {
  EpCase c = large(64);
  EpGroupRig r = rig(c);
  EpInputs inputs(c, 1);
  inputs.of(world_ - 1).ids[3 * c.top_k] = 4711;
  r.load(inputs);
  (void)r.dispatch();
  EXPECT_FALSE(r.group().synchronize(ep_soon()).ok());
  const auto fault = r.rank(world_ - 1).check();
  ASSERT_EQ(fault.code(), Code::kInvalidArgument) << fault.error().describe();
  EXPECT_THAT(fault.error().message, HasSubstr("token 3 of rank"));
  EXPECT_THAT(fault.error().message, HasSubstr("expert 4711"));
  std::printf("%s\n", fault.error().message.c_str());
  ASSERT_TRUE(r.group().reset(ep_soon()).ok());
  ASSERT_NO_FATAL_FAILURE(r.round(2));
}
TEST_F(EpGpu, ARankThatDoesNotComeIsNamedByTheDeadline) {
  if (world_ < 2) GTEST_SKIP() << "needs two GPUs";
  EpCase c = large(64);
  EpGroupRig r = rig(c);
  r.load(EpInputs(c, 1));
  const auto start = std::chrono::steady_clock::now();
  for (u32 rank = 1; rank < world_; ++rank)
    (void)r.group().dispatch(rank, r.tokens(rank)).value();
  const auto done = r.group().synchronize(ep_soon());
  ASSERT_EQ(done.code(), Code::kPeerLost);
  EXPECT_THAT(done.error().message, HasSubstr("rank 0"));
  std::printf("%s\n", done.error().message.c_str());
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  ASSERT_TRUE(r.group().reset(ep_soon()).ok());
  ASSERT_NO_FATAL_FAILURE(r.round(2));
}
// Each rank calls 50 ms after the one before. Until the last one has come the first is not through.
TEST_F(EpGpu, ARankThatIsLateIsWaitedFor) {
  if (world_ < 2) GTEST_SKIP() << "needs two ranks, one to be late: two GPUs or GPU_TEST_RANKS=2";
  for (const bool small : {false, true}) {
    SCOPED_TRACE(small ? "few tokens" : "many tokens");
    EpCase c = large(64);
    c.fixed = small;
    EpGroupRig r = rig(c);
    const EpInputs inputs(c, 5);
    const EpReference reference(c, inputs);
    r.load(inputs);
    const auto one_after_the_other = [&](const auto& call) {
      for (u32 rank = 0; rank < world_; ++rank) {
        if (rank > 0) {
          std::this_thread::sleep_for(50ms);  // the lateness is what is tested
          EXPECT_FALSE(r.rank(0).device().stream()->idle().value()) << "before rank " << rank;
        }
        call(rank);
      }
    };
    std::vector<ep::Handle> handles;
    one_after_the_other(
        [&](u32 rank) { handles.push_back(r.group().dispatch(rank, r.tokens(rank)).value()); });
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (const auto& handle : handles) {
      ASSERT_NO_FATAL_FAILURE(r.check(handle, reference));
      r.write_expert_rows(handle, inputs, 1);
    }
    one_after_the_other([&](u32 rank) { r.combine(handles[rank]); });
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (u32 rank = 0; rank < world_; ++rank)
      ASSERT_NO_FATAL_FAILURE(r.check_combined(rank, reference, 1));
  }
}

}  // namespace
}  // namespace crossdock::testing
