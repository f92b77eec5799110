// Expert parallelism on as many GPUs as there are: the fixture, shapes, and rounds without experts.
// Test code.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cuda/memory.hpp"
#include "gpu/gpu_fixture.hpp"
#include "support/ep_group_rig.hpp"
#include "support/stays_level.hpp"

namespace crossdock::testing {

class EpGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    world_ = static_cast<u32>(num_ranks());
  }
  [[nodiscard]] EpGroupRig rig(EpCase& c) const {
    return rig(c, [](ep::Options&) {});
  }
  template <class Change>
  [[nodiscard]] EpGroupRig rig(EpCase& c, const Change& change) const {
    c.world = world_;
    auto options = ep_options(c, symm::Backend::kGpu);
    change(options.ep);
    auto made = EpGroupRig::create(c, options);
    if (!made.ok()) ADD_FAILURE() << made.error().describe();
    return std::move(made).value();
  }
  void rounds(EpCase c, u32 count = 3) const {
    EpGroupRig r = rig(c);
    for (u32 seed = 1; seed <= count; ++seed)
      ASSERT_NO_FATAL_FAILURE(r.round(seed)) << "seed " << seed;
  }
  u32 world_ = 1;
};

// Bytes in use on the GPU of each local rank.
inline std::vector<u64> used_of(EpGroupRig& rig) {
  std::vector<u64> used;
  for (const u32 rank : rig.group().local_ranks())
    used.push_back(used_bytes(*rig.rank(rank).device().context()));
  return used;
}

// The shape of a large model, with few enough tokens for a reference on the host.
inline EpCase large(u32 tokens) {
  return {.experts = 256,
          .top_k = 8,
          .max_tokens = tokens,
          .row_bytes = 7168,
          .combine_bytes = 14336,
          .blocks = {12}};
}

// Experts that change nothing: rows of bf16 go from where dispatch put them to where combine takes
// them, in stream order. A token then comes back as many times itself as it has destinations.
inline void identity_round(EpGroupRig& rig, u32 r) {
  auto handle = rig.group().dispatch(r, rig.tokens(r)).value();
  const auto* stream = rig.rank(r).device().stream();
  const u64 bytes = u64{handle.received().capacity} * handle.received().row_bytes;
  ASSERT_TRUE(cuda::copy_async(cuda::device_ptr(handle.expert_input().rows),
                               cuda::device_ptr(handle.received().rows), bytes, *stream)
                  .ok());
  ASSERT_NO_FATAL_FAILURE(rig.combine(handle));
}
inline void check_identity(EpGroupRig& rig, const EpCase& c, const EpInputs& inputs, u32 r) {
  const EpTokensIn& in = inputs.of(r);
  const auto got =
      symm::download(rig.rank(r), rig.combined(r), u64{in.tokens} * c.row_bytes, ep_soon()).value();
  const auto* rows = reinterpret_cast<const u16*>(got.data());
  const auto* sent = reinterpret_cast<const u16*>(in.rows.data());
  for (u32 token = 0; token < in.tokens; ++token) {
    u32 copies = 0;
    for (u32 d = 0; d < c.world; ++d)
      copies += inputs.goes_to(r, token, d);
    for (u32 i = 0; i < c.row_bytes / 2; ++i) {
      const u64 at = u64{token} * (c.row_bytes / 2) + i;
      const float value = copies == 0 ? 0.0f : static_cast<float>(copies) * from_bf16(sent[at]);
      ASSERT_EQ(rows[at], bf16_of(value)) << "rank " << r << " token " << token << " " << i;
    }
  }
}
inline void check_identity(EpGroupRig& rig, const EpCase& c, const EpInputs& inputs) {
  for (const u32 r : rig.group().local_ranks())
    ASSERT_NO_FATAL_FAILURE(check_identity(rig, c, inputs, r));
}
// Tokens of finite bf16.
inline EpInputs finite_inputs(const EpCase& c, u32 seed) {
  EpInputs inputs(c, seed);
  for (u32 r = 0; r < c.world; ++r) {
    auto* values = reinterpret_cast<u16*>(inputs.of(r).rows.data());
    for (u64 i = 0; i < inputs.of(r).rows.size() / 2; ++i)
      values[i] = bf16_of(
          (static_cast<float>(mix(static_cast<u32>(i) + seed * 977 + r) % 2001) - 1000.0f) / 64.0f);
  }
  return inputs;
}
// Launches the graphs of all local ranks `times` times, each time with a new routing, and compares.
inline void replay_and_check(EpGroupRig& rig, const EpCase& c,
                             const std::vector<cuda::Graph>& graphs, u32 times) {
  for (u32 replay = 1; replay <= times; ++replay) {
    const EpInputs inputs = finite_inputs(c, replay);
    rig.load(inputs);
    for (u32 i = 0; i < graphs.size(); ++i) {
      const u32 rank = rig.group().local_ranks()[i];
      ASSERT_TRUE(graphs[i].launch(*rig.rank(rank).device().stream()).ok());
    }
    ASSERT_NO_FATAL_FAILURE(rig.synchronize());
    ASSERT_NO_FATAL_FAILURE(check_identity(rig, c, inputs)) << "replay " << replay;
  }
}
// A graph of three identity rounds on each local rank, replayed.
inline void capture_replay_and_check(EpGroupRig& rig, const EpCase& c, u32 times) {
  rig.load(finite_inputs(c, 1));
  std::vector<cuda::Graph> graphs;
  for (const u32 rank : rig.group().local_ranks()) {
    auto capture = cuda::Capture::begin(*rig.rank(rank).device().stream()).value();
    for (u32 i = 0; i < 3; ++i)
      ASSERT_NO_FATAL_FAILURE(identity_round(rig, rank));
    graphs.push_back(capture.finish().value());
  }
  ASSERT_NO_FATAL_FAILURE(replay_and_check(rig, c, graphs, times));
}
inline EpCase identity_case(u32 world, u32 tokens) {
  return {.world = world,
          .experts = 32,
          .top_k = 4,
          .max_tokens = tokens,
          .row_bytes = 2048,
          .combine_bytes = 2048,
          .blocks = {6}};
}

}  // namespace crossdock::testing
