// What lies around dispatch and combine on real GPUs: routings used again, outputs that fall back
// to copies, outputs of the caller, copies by expert, graphs and captures, long runs that check and
// poison every round without the host, setup that is refused.
// SPDX-License-Identifier: Apache-2.0
#include <deque>
#include <gmock/gmock.h>
#include <random>

#include "cuda/graph.hpp"
#include "gpu/ep/ep_gpu.hpp"
#include "support/ep_expanded.hpp"

namespace crossdock::testing {
namespace {

using ::testing::HasSubstr;

EpInputs inputs_like(const EpCase& c, const EpInputs& like, u32 seed) {
  EpInputs inputs(c, seed);
  for (u32 rank = 0; rank < c.world; ++rank) {
    inputs.of(rank).ids = like.of(rank).ids;
    inputs.of(rank).weights = like.of(rank).weights;
  }
  return inputs;
}

// ---- a routing again ---------------------------------------------------------------------------

TEST_F(EpGpu, OtherRowsWithTheSameRouting) {
  for (const bool by_column : {false, true}) {
    EpCase c = large(300);
    c.scale_bytes = 224;
    c.scales_by_column = by_column;
    EpGroupRig r = rig(c);
    const EpInputs first(c, 3);
    r.load(first);
    auto handles = r.dispatch();
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (u32 again = 1; again <= 3; ++again) {
      const EpInputs inputs = inputs_like(c, first, 10 + again);
      const EpReference reference(c, inputs);
      r.load(inputs);
      handles = r.dispatch_like(handles);
      ASSERT_NO_FATAL_FAILURE(r.synchronize());
      for (const auto& handle : handles) {
        ASSERT_NO_FATAL_FAILURE(r.check(handle, reference)) << "again " << again;
        r.write_expert_rows(handle, inputs, again);
      }
      for (const auto& handle : handles)
        ASSERT_NO_FATAL_FAILURE(r.combine(handle));
      ASSERT_NO_FATAL_FAILURE(r.synchronize());
      for (const auto& handle : handles)
        ASSERT_NO_FATAL_FAILURE(r.check_combined(handle.rank(), reference, again));
    }
  }
}
TEST_F(EpGpu, ManyReusesInARowAndBetweenDispatchesThatCount) {
  EpCase c = large(64);
  EpGroupRig r = rig(c);
  const EpInputs inputs(c, 9);
  r.load(inputs);
  auto handles = r.dispatch();
  for (u32 i = 0; i < 500; ++i)
    handles = i % 7 == 0 ? r.dispatch() : r.dispatch_like(handles);
  ASSERT_NO_FATAL_FAILURE(r.synchronize());
  for (const auto& handle : handles)
    ASSERT_NO_FATAL_FAILURE(r.check(handle, EpReference(c, inputs)));
}

// ---- copies ------------------------------------------------------------------------------------

TEST_F(EpGpu, TwentyHandlesHeldWithRandomDrops) {
  EpCase c = large(60);
  c.row_bytes = 2048;
  c.combine_bytes = 2048;
  c.scale_bytes = 16;
  EpGroupRig r = rig(c);
  struct Held {
    ep::Handle handle;
    std::shared_ptr<EpInputs> inputs;
  };
  std::deque<Held> held;
  std::mt19937 random(5);
  u32 copies = 0;
  for (u32 round = 1; round <= 40; ++round) {
    const auto inputs = std::make_shared<EpInputs>(c, round);
    r.load(*inputs);
    for (ep::Handle& handle : r.dispatch()) {
      copies += handle.copied();
      held.push_back({std::move(handle), inputs});
    }
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (const Held& h : held)
      ASSERT_NO_FATAL_FAILURE(r.check(h.handle, EpReference(c, *h.inputs))) << "round " << round;
    while (held.size() > 20 * u64{world_} || (held.size() > 10 && random() % 3 == 0))
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
  }
  EXPECT_GT(copies, 20u);
}
TEST_F(EpGpu, CombinesOfCopiesFollowEachOther) {
  EpCase c = large(200);
  EpGroupRig r = rig(c, [](ep::Options& o) { o.slots = 1; });
  const EpInputs inputs(c, 4);
  const EpReference reference(c, inputs);
  r.load(inputs);
  std::vector<std::vector<ep::Handle>> held;
  for (u32 i = 0; i < 6; ++i)
    held.push_back(r.dispatch());
  ASSERT_NO_FATAL_FAILURE(r.synchronize());
  for (u32 i = 0; i < held.size(); ++i)
    for (const auto& handle : held[i]) {
      ASSERT_NO_FATAL_FAILURE(r.check(handle, reference));
      r.write_expert_rows(handle, inputs, i);
    }
  constexpr u32 kTurns = 40;
  const u64 result_bytes = u64{c.max_tokens} * c.combine_bytes;
  std::vector<symm::LocalMemory> results;
  for (u32 rank = 0; rank < world_; ++rank)
    results.push_back(r.rank(rank).allocate(kTurns * result_bytes).value());
  for (u32 turn = 0; turn < kTurns; ++turn)
    for (const auto& handle : held[turn * 5 % held.size()])
      ASSERT_NO_FATAL_FAILURE(
          r.combine(handle, results[handle.rank()].as<u8>() + turn * result_bytes));
  ASSERT_NO_FATAL_FAILURE(r.synchronize());
  for (u32 turn = 0; turn < kTurns; ++turn)
    for (u32 rank = 0; rank < world_; ++rank)
      ASSERT_NO_FATAL_FAILURE(
          r.check_rows(rank, reference, turn * 5 % 6, results[rank].as<u8>() + turn * result_bytes))
          << "turn " << turn;
}
TEST_F(EpGpu, CopiesUseTheirMemoryAgain) {
  EpCase c = identity_case(world_, 64);
  EpGroupRig r = rig(c);
  const EpInputs inputs = finite_inputs(c, 1);
  r.load(inputs);
  const auto turns = [&](u32 count) {
    for (u32 turn = 0; turn < count; ++turn) {
      std::vector<std::vector<ep::Handle>> held;
      for (u32 i = 0; i < 8; ++i)
        held.push_back(r.dispatch());
    }
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
  };
  ASSERT_NO_FATAL_FAILURE(turns(1));
  EXPECT_TRUE(crossdock::testing::stays_level([&] { return used_of(r); }, [&] { turns(200); }));
}

// ---- outputs of the caller ---------------------------------------------------------------------

TEST_F(EpGpu, OutputsOfTheCallerAreWrittenDirectly) {
  EpCase c = large(200);
  c.scale_bytes = 224;
  EpGroupRig r = rig(c, [](ep::Options& o) { o.user_bytes = u64{512} << 20; });
  for (u32 seed = 1; seed <= 3; ++seed) {
    const EpInputs inputs(c, seed);
    const EpReference reference(c, inputs);
    r.load(inputs);
    std::vector<ep::Handle> handles;
    for (const u32 rank : r.group().local_ranks()) {
      std::byte* memory = r.group().user_memory(rank)->data();
      handles.push_back(
          r.group()
              .dispatch(rank, r.tokens(rank),
                        {.output = memory + u64{1} * (1 << 20) * rank,
                         .output_room = r.group().output_bytes(r.tokens(rank)).value(),
                         .input = memory + (u64{256} << 20),
                         .input_room = r.group().memory().input_bytes})
              .value());
    }
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (const auto& handle : handles) {
      ASSERT_NO_FATAL_FAILURE(r.check(handle, reference));
      r.write_expert_rows(handle, inputs, seed);
    }
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(r.combine(handle));
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (const auto& handle : handles)
      ASSERT_NO_FATAL_FAILURE(r.check_combined(handle.rank(), reference, seed));
  }
}

// ---- copies by expert --------------------------------------------------------------------------

TEST_F(EpGpu, ExpandedAndMaskedCopies) {
  for (const u32 kind : {0u, 1u, 2u, 3u}) {
    const bool masked = kind % 2 == 1, by_column = kind / 2 == 1;
    EpCase c = large(96);
    c.world = world_;
    c.experts = 32;
    c.scale_bytes = 224;
    c.scales_by_column = kind == 3;
    EpGroupRig r = rig(c, [](ep::Options& o) { o.expert_alignment = 16; });
    r.load(EpInputs(c, kind + 1));
    const auto handles = r.dispatch();
    std::vector<EpExpandedMemory> memory;
    std::vector<ep::Grouped> grouped;
    for (const auto& handle : handles)
      grouped.push_back(r.group().group_rows(handle).value());
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (u32 i = 0; i < handles.size(); ++i) {
      const u32 experts = c.expert_map().count(handles[i].rank());
      const u32 per_expert = masked ? world_ * c.max_tokens * 2 : 0;
      memory.emplace_back(
          r.rank(handles[i].rank()), handles[i], grouped[i],
          EpExpandedShape{.places = masked ? u64{per_expert} * experts : grouped[i].places,
                          .rows_per_expert = per_expert,
                          .experts = experts,
                          .top_k = c.top_k,
                          .world = world_,
                          .alignment = 16,
                          .scales_by_column = by_column});
      const auto done = r.group().expand_rows(handles[i], memory.back().to());
      ASSERT_TRUE(done.ok()) << done.error().describe();
    }
    ASSERT_NO_FATAL_FAILURE(r.synchronize());
    for (const auto& m : memory)
      ASSERT_NO_FATAL_FAILURE(m.check(ep_soon())) << "kind " << kind;
  }
}

// ---- graphs ------------------------------------------------------------------------------------

TEST_F(EpGpu, AThousandReplaysWithNewRouting) {
  EpCase c = identity_case(world_, 16);
  c.row_bytes = c.combine_bytes = 256;
  EpGroupRig r = rig(c);
  ASSERT_NO_FATAL_FAILURE(capture_replay_and_check(r, c, 1000));
}
// In a graph: a dispatch, one that reuses its routing and falls back to a reserved copy, and the
// combine of both.
TEST_F(EpGpu, GraphsWithReuseAndCopies) {
  EpCase c = identity_case(world_, 100);
  EpGroupRig r = rig(c, [](ep::Options& o) { o.slots = 1; });
  r.load(finite_inputs(c, 1));
  std::vector<cuda::Graph> graphs;
  std::vector<ep::Handle> held;
  for (const u32 rank : r.group().local_ranks()) {
    const auto* stream = r.rank(rank).device().stream();
    {
      auto capture = cuda::Capture::begin(*stream).value();
      const auto first = r.group().dispatch(rank, r.tokens(rank)).value();
      const auto refused = r.group().dispatch(rank, r.tokens(rank));
      ASSERT_EQ(refused.code(), Code::kBusy);
      EXPECT_THAT(refused.error().message, HasSubstr("reserve_copies()"));
    }
    ASSERT_TRUE(r.group().reserve_copies(rank, 1).ok());
    auto capture = cuda::Capture::begin(*stream).value();
    auto first = r.group().dispatch(rank, r.tokens(rank)).value();
    auto second = r.group().dispatch(rank, r.tokens_like(rank), {.routing = &first}).value();
    EXPECT_TRUE(second.copied());
    for (const ep::Handle* handle : {&first, &second}) {
      const u64 bytes = u64{handle->received().capacity} * handle->received().row_bytes;
      ASSERT_TRUE(cuda::copy_async(cuda::device_ptr(handle->expert_input().rows),
                                   cuda::device_ptr(handle->received().rows), bytes, *stream)
                      .ok());
      ASSERT_NO_FATAL_FAILURE(r.combine(*handle));
    }
    held.push_back(std::move(first));
    held.push_back(std::move(second));
    graphs.push_back(capture.finish().value());
  }
  ASSERT_NO_FATAL_FAILURE(replay_and_check(r, c, graphs, 30));
}
TEST_F(EpGpu, NoGroupIsMadeWhileAStreamIsCaptured) {
  EpCase c = identity_case(world_, 8);
  const cuda::Context context = this->context();
  const cuda::Stream stream = cuda::Stream::create(context, {.non_blocking = false}).value();
  auto capture = cuda::Capture::begin(stream).value();
  const auto refused = EpGroupRig::create(c, symm::Backend::kGpu);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.code(), Code::kInvalidArgument) << refused.error().describe();
  EXPECT_THAT(refused.error().message, HasSubstr("captured"));
  ASSERT_TRUE(capture.finish().ok()) << "the capture has taken no harm";
}

// ---- long runs ---------------------------------------------------------------------------------

// On the path of many tokens, of few, and of few in packets.
struct SoakCase {
  const char* name;
  u32 tokens;
  bool few;
};
class EpGpuSoak : public EpGpu, public ::testing::WithParamInterface<SoakCase> {};

// Rounds in a row without the host: each round's result is kept, its slot is poisoned in stream,
// and the ranks are slowed down now and then. Afterwards every result is compared.
TEST_P(EpGpuSoak, RoundsWithPoisonAndDelaysAreAllRight) {
  constexpr u32 kRounds = 300;
  const SoakCase& of = GetParam();
  EpCase c = identity_case(world_, of.tokens);
  c.fixed = of.few;
  EpGroupRig r = rig(c, [](ep::Options& o) {
    o.slots = 3;
    o.small_slots = 4;
  });
  const EpInputs inputs = finite_inputs(c, 2);
  r.load(inputs);
  const u64 result_bytes = u64{c.max_tokens} * c.row_bytes;
  const u64 delay_bytes = u64{256} << 20;
  std::vector<symm::LocalMemory> results, scratch;
  for (const u32 rank : r.group().local_ranks()) {
    results.push_back(r.rank(rank).allocate(kRounds * result_bytes).value());
    scratch.push_back(r.rank(rank).allocate(delay_bytes).value());
  }
  std::mt19937 random(11);
  std::vector<std::deque<ep::Handle>> held(world_);
  for (u32 round = 0; round < kRounds; ++round)
    for (const u32 rank : r.group().local_ranks()) {
      const auto* stream = r.rank(rank).device().stream();
      if (random() % 4 == 0) {
        ASSERT_TRUE(cuda::fill_bytes_async(cuda::device_ptr(scratch[rank].address()), 1,
                                           1 + random() % delay_bytes, *stream)
                        .ok());
      }
      auto handle = r.group().dispatch(rank, r.tokens(rank)).value();
      const u64 bytes = u64{handle.received().capacity} * handle.received().row_bytes;
      const auto rows = cuda::device_ptr(handle.received().rows);
      ASSERT_TRUE(
          cuda::copy_async(cuda::device_ptr(handle.expert_input().rows), rows, bytes, *stream)
              .ok());
      ASSERT_TRUE(cuda::fill_bytes_async(rows, 0xee, bytes, *stream).ok());
      const auto done =
          r.group().combine(handle, {.rows = results[rank].as<u8>() + round * result_bytes});
      ASSERT_TRUE(done.ok()) << done.error().describe();
      // Some are held for a while: of many tokens, so that slots come in another order and some
      // rounds fall back; of few the next slot has to be free.
      held[rank].push_back(std::move(handle));
      while (held[rank].size() > random() % (of.few ? 4 : 6))
        held[rank].pop_front();
    }
  ASSERT_NO_FATAL_FAILURE(r.synchronize());
  for (const u32 rank : r.group().local_ranks())
    for (u32 round = 0; round < kRounds; ++round) {
      ASSERT_TRUE(cuda::copy_async(cuda::device_ptr(r.combined(rank)),
                                   cuda::device_ptr(results[rank].as<u8>() + round * result_bytes),
                                   result_bytes, *r.rank(rank).device().stream())
                      .ok());
      ASSERT_NO_FATAL_FAILURE(r.synchronize());
      ASSERT_NO_FATAL_FAILURE(check_identity(r, c, inputs, rank)) << "round " << round;
    }
}
INSTANTIATE_TEST_SUITE_P(Path, EpGpuSoak,
                         ::testing::Values(SoakCase{"many", 60, false}, SoakCase{"few", 60, true},
                                           SoakCase{"packets", 6, true}),
                         [](const auto& test) { return test.param.name; });

// ---- pointers ----------------------------------------------------------------------------------

TEST_F(EpGpu, PointersOfElsewhereAreRefusedAndTheContextIsWhole) {
  EpCase c = large(16);
  EpGroupRig r = rig(c);
  r.load(EpInputs(c, 1));
  std::vector<u8> host(c.row_bytes * 16 + 16);
  ep::Tokens tokens = r.tokens(0);
  tokens.rows = reinterpret_cast<const void*>((reinterpret_cast<u64>(host.data()) + 15) / 16 * 16);
  const auto refused = r.group().dispatch(0, tokens);
  ASSERT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("not memory that the driver knows"));
  if (ranks_of_a_gpu() == 1 && num_ranks() > 1) {  // else no memory here is of another GPU
    tokens.rows = r.tokens(1).rows;
    const auto other = r.group().dispatch(0, tokens);
    ASSERT_EQ(other.code(), Code::kInvalidArgument);
    EXPECT_THAT(other.error().message, HasSubstr("memory of GPU 1"));
  }
  ASSERT_NO_FATAL_FAILURE(r.round(1));
}

}  // namespace
}  // namespace crossdock::testing
