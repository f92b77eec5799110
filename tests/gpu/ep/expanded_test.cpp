// Copies beside a dispatch on real GPUs: the same memory written again and again, in turns with
// plain dispatches, with routings used again, with masked ranks, and in graphs.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/graph.hpp"
#include "gpu/ep/ep_gpu.hpp"
#include "support/ep_expanded.hpp"

namespace crossdock::testing {
namespace {

constexpr u32 kAlignment = 16;

EpCase expanded_case(u32 world, u32 tokens, bool masks = false) {
  EpCase c = large(tokens);
  c.world = world;
  c.experts = 32;
  c.scale_bytes = 224;
  c.fixed = masks;
  return c;
}

class EpExpandedGpu : public EpGpu {
 protected:
  // A group that copies, and memory for copies of every rank.
  struct Copying {
    EpCase c;
    EpGroupRig rig;
    std::vector<EpExpandedMemory> memory;

    // By the ranks that come: `gone` has a bit for each of the others.
    std::vector<ep::Handle> dispatch(u32 gone = 0, const std::vector<ep::Handle>* like = nullptr) {
      std::vector<ep::Handle> handles;
      for (u32 rank = 0; rank < c.world; ++rank) {
        if ((gone >> rank & 1u) != 0) continue;
        memory[rank].fill(ep_soon());
        const ep::Expanded to = memory[rank].to();
        handles.push_back(
            rig.group()
                .dispatch(rank, like != nullptr ? rig.tokens_like(rank) : rig.tokens(rank),
                          {.routing = like != nullptr ? &(*like)[rank] : nullptr, .expanded = &to})
                .value());
      }
      return handles;
    }
    void check(const std::vector<ep::Handle>& handles, const EpInputs& seen) {
      ASSERT_NO_FATAL_FAILURE(rig.synchronize());
      for (const auto& handle : handles) {
        EpExpandedMemory& of = memory[handle.rank()];
        of.take(handle, rig.group().grouped(handle).value());
        ASSERT_NO_FATAL_FAILURE(rig.check(handle, EpReference(c, seen)));
        ASSERT_NO_FATAL_FAILURE(of.check(ep_soon())) << "rank " << handle.rank();
      }
    }
  };
  template <class Change>
  Copying copying(EpCase c, const Change& change) {
    EpGroupRig r = rig(c, [&](ep::Options& o) {
      o.expert_alignment = kAlignment;
      // Blocks of ranks that share a GPU share its SMs.
      o.expand_sms = std::min(24u, 132u / static_cast<u32>(ranks_of_a_gpu()) - c.blocks_of(0));
      o.masks = c.fixed;
      o.small_tokens = 0;
      change(o);
    });
    r.load(EpInputs(c, 1));
    std::vector<EpExpandedMemory> memory;
    for (const auto& handle : r.dispatch()) {
      const auto grouped = r.group().group_rows(handle).value();
      memory.emplace_back(r.rank(handle.rank()), handle, grouped,
                          expanded_shape(c, handle, grouped, kAlignment, false));
    }
    const auto done = r.group().synchronize(ep_soon());
    EXPECT_TRUE(done.ok()) << done.error().describe();
    return {std::move(c), std::move(r), std::move(memory)};
  }
};

TEST_F(EpExpandedGpu, InTurnsWithPlainDispatches) {
  Copying x = copying(expanded_case(world_, 777), [](ep::Options&) {});
  for (u32 round = 0; round < 12; ++round) {
    const EpInputs inputs(x.c, round + 2);
    x.rig.load(inputs);
    if (round % 4 == 3) {
      const auto plain = x.rig.dispatch();
      ASSERT_NO_FATAL_FAILURE(x.rig.synchronize());
      continue;
    }
    ASSERT_NO_FATAL_FAILURE(x.check(x.dispatch(), inputs)) << "round " << round;
  }
}
TEST_F(EpExpandedGpu, WithARoutingUsedAgain) {
  Copying x = copying(expanded_case(world_, 500), [](ep::Options& o) { o.slots = 3; });
  const EpInputs inputs(x.c, 2);
  x.rig.load(inputs);
  const auto first = x.dispatch();
  ASSERT_NO_FATAL_FAILURE(x.check(first, inputs));
  for (u32 round = 0; round < 4; ++round) {
    EpInputs others(x.c, round + 3);
    for (u32 rank = 0; rank < x.c.world; ++rank) {
      others.of(rank).ids = inputs.of(rank).ids;
      others.of(rank).weights = inputs.of(rank).weights;
    }
    x.rig.load(others);
    ASSERT_NO_FATAL_FAILURE(x.check(x.dispatch(0, &first), others)) << "round " << round;
  }
}
// The last rank is masked by the others, or does not come and is masked by their kernels.
TEST_F(EpExpandedGpu, WithMaskedRanks) {
  const u32 last = world_ - 1;
  for (const bool late : {false, true}) {
    Copying x =
        copying(expanded_case(world_, 300, true), [&](ep::Options& o) { o.mask_late = late; });
    for (u32 round = 0; round < 6; ++round) {
      const u32 gone = round < 2 || world_ == 1 ? 0 : 1u << last;
      for (u32 rank = 0; rank < last && !late; ++rank)
        ASSERT_TRUE(x.rig.group().mask(rank, last, gone != 0).ok());
      const EpInputs all(x.c, round + 2);
      x.rig.load(all);
      ASSERT_NO_FATAL_FAILURE(x.check(x.dispatch(gone), gone == 0 ? all : all.without(last)))
          << "round " << round;
    }
  }
}
// A dispatch and one that uses its routing again, each with copies, replayed with other tokens.
TEST_F(EpExpandedGpu, InGraphs) {
  for (const bool masks : {false, true}) {
    Copying x = copying(expanded_case(world_, 256, masks), [](ep::Options&) {});
    std::vector<cuda::Graph> graphs;
    std::vector<ep::Handle> first, again;
    for (u32 rank = 0; rank < world_; ++rank) {
      const ep::Expanded to = x.memory[rank].to();
      auto capture = cuda::Capture::begin(*x.rig.rank(rank).device().stream()).value();
      first.push_back(x.rig.group().dispatch(rank, x.rig.tokens(rank), {.expanded = &to}).value());
      again.push_back(
          x.rig.group()
              .dispatch(rank, x.rig.tokens_like(rank), {.routing = &first[rank], .expanded = &to})
              .value());
      graphs.push_back(capture.finish().value());
    }
    for (u32 replay = 0; replay < 20; ++replay) {
      const EpInputs inputs(x.c, replay + 50);
      x.rig.load(inputs);
      for (u32 rank = 0; rank < world_; ++rank) {
        x.memory[rank].fill(ep_soon());
        ASSERT_TRUE(graphs[rank].launch(*x.rig.rank(rank).device().stream()).ok());
      }
      ASSERT_NO_FATAL_FAILURE(x.rig.synchronize());
      for (u32 rank = 0; rank < world_; ++rank) {
        EpExpandedMemory& of = x.memory[rank];
        of.take(again[rank], x.rig.group().grouped(again[rank]).value());
        ASSERT_NO_FATAL_FAILURE(of.check(ep_soon())) << "replay " << replay << " rank " << rank;
      }
    }
  }
}

}  // namespace
}  // namespace crossdock::testing
