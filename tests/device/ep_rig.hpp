// The twin rig of the expert-parallel kernels: ranks with the areas, state and output blocks that
// dispatch and combine need. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/kernel/ep_dispatch.cuh>

#include "ranks.hpp"
#include "support/ep_case.hpp"

namespace crossdock::testing {

inline constexpr EpDispatchConfig kPlain{
    .dispatch_warps = 2, .stages = 3, .notify_warps = 1, .cast = false, .wide_ids = false};
inline constexpr EpDispatchConfig kWide{
    .dispatch_warps = 3, .stages = 2, .notify_warps = 2, .cast = false, .wide_ids = true};
inline constexpr EpDispatchConfig kCast{
    .dispatch_warps = 2, .stages = 2, .notify_warps = 1, .cast = true, .wide_ids = false};

// Two sets of everything that a launch reads and writes, for launches in turns.
class EpRig {
 public:
  static constexpr u32 kTurns = 2;

  explicit EpRig(const EpCase& c, bool table = false) : case_(c), ranks_(c.world, layout(), table) {
    for (u32 rank = 0; rank < c.world; ++rank) {
      state_.push_back(ranks_.local<EpState>(rank, 1));
      previous_.push_back(ranks_.local<u32>(rank, u64{kTurns} * areas_.most_experts));
    }
    for (u32 turn = 0; turn < kTurns; ++turn)
      for (u32 rank = 0; rank < c.world; ++rank)
        params_[turn].push_back(make(rank, turn));
  }

  [[nodiscard]] Ranks& ranks() { return ranks_; }
  [[nodiscard]] EpDispatchParams& params(u32 rank, u32 turn) {
    return params_[turn % kTurns][rank];
  }
  [[nodiscard]] u8* output(u32 rank, u32 turn) {
    return ranks_.window<u8>(rank, params(rank, turn).output_offset);
  }
  [[nodiscard]] EpDelivered delivered(u32 rank, u32 turn) {
    const EpDispatchResult& result = params(rank, turn).result;
    return {output(rank, turn), result.source_ends, result.expert_counts};
  }

  // Tokens for every rank; everything at the destinations is poisoned.
  void load(const EpInputs& inputs, u32 turn) {
    for (u32 rank = 0; rank < case_.world; ++rank) {
      const EpTokensIn& in = inputs.of(rank);
      EpDispatchParams& p = params(rank, turn);
      std::memcpy(const_cast<u8*>(p.input.rows), in.rows.data(), in.rows.size());
      std::memcpy(const_cast<u8*>(p.input.scales), in.scales.data(), in.scales.size());
      for (u64 i = 0; i < in.ids.size(); ++i)
        set_id(p, i, in.ids[i]);
      if (case_.weights)
        std::memcpy(const_cast<float*>(p.input.weights), in.weights.data(),
                    in.weights.size() * sizeof(float));
      p.tokens = EpTokens::make(in.tokens, case_.blocks_of(rank));
      std::memset(output(rank, turn), 0xee, case_.output().bytes);
    }
  }
  void set_id(EpDispatchParams& p, u64 index, i64 id) const {
    if (case_.wide_ids) {
      static_cast<i64*>(const_cast<void*>(p.input.ids))[index] = id;
    } else {
      static_cast<i32*>(const_cast<void*>(p.input.ids))[index] = static_cast<i32>(id);
    }
  }
  template <EpDispatchConfig kConfig>
  void launch(u32 rank, u32 turn) {
    const EpDispatchParams& p = params(rank, turn);
    const u32 shared =
        ep_dispatch_shared(kConfig, p.input.row_bytes, case_.world, case_.experts, p.tokens.groups)
            .bytes;
    ranks_.launch(rank, {p.tokens.blocks, kConfig.threads(), shared, "ep_dispatch"},
                  kernel::ep_dispatch<kConfig>, p);
  }
  template <EpDispatchConfig kConfig>
  void launch_all(u32 turn) {
    for (u32 rank = 0; rank < case_.world; ++rank)
      launch<kConfig>(rank, turn);
  }
  // What a reset of the group does.
  void reset() {
    ranks_.reset();
    for (u32 rank = 0; rank < case_.world; ++rank) {
      std::memset(static_cast<void*>(state_[rank]), 0, sizeof(EpState));
      std::memset(previous_[rank], 0, u64{kTurns} * areas_.most_experts * sizeof(u32));
    }
  }

 private:
  SymmetricLayout layout() {
    SymmetricLayout window;
    areas_ = add_ep(window, case_.world, case_.experts, case_.most_blocks());
    outputs_ = window.add("outputs", kTurns * case_.output().bytes);
    return window;
  }
  EpDispatchParams make(u32 rank, u32 turn) {
    const u64 tokens = case_.max_tokens;
    EpDispatchParams p{};
    p.common = ranks_.common(rank, KernelId::kEpDispatch);
    p.view = ranks_.view(rank);
    p.areas = areas_;
    p.experts = case_.expert_map();
    p.output = case_.output();
    p.output_offset = outputs_ + u64{turn} * case_.output().bytes;
    p.slot = kNoSlot;
    p.input.rows = ranks_.local<u8>(rank, tokens * case_.row_bytes);
    p.input.row_bytes = case_.row_bytes;
    p.input.row_stride = case_.row_bytes;
    p.input.scales = ranks_.local<u8>(rank, tokens * case_.scale_bytes + 4);
    p.input.scale_stride = case_.scale_bytes;
    p.input.top_k = case_.top_k;
    p.input.ids = ranks_.local<u64>(rank, tokens * case_.top_k);
    if (case_.weights) p.input.weights = ranks_.local<float>(rank, tokens * case_.top_k);
    p.result.routes = ranks_.local<EpRoute>(
        rank, EpTokens::most_routes(case_.max_tokens, case_.blocks_of(rank), case_.world));
    p.result.source_ends = ranks_.local<u32>(rank, case_.world);
    p.result.expert_counts = ranks_.local<u32>(rank, areas_.most_experts + 1);
    p.result.host_rows = ranks_.local<u64>(rank, 1);
    p.result.host_experts = ranks_.local<u64>(rank, areas_.most_experts + 1);
    p.statistics.expert_selections = ranks_.local<u64>(rank, areas_.most_experts + 1);
    p.statistics.source_wait_ns = ranks_.local<u64>(rank, case_.world);
    p.state = state_[rank];
    p.expert_previous = previous_[rank];
    for (u32 peer = 0; peer < case_.world; ++peer)
      p.source_blocks[peer] = static_cast<u8>(case_.blocks_of(peer));
    p.most_blocks = case_.most_blocks();
    return p;
  }
  EpCase case_;
  EpAreas areas_{};
  u64 outputs_ = 0;
  Ranks ranks_;
  std::vector<EpState*> state_;
  std::vector<u32*> previous_;
  std::vector<EpDispatchParams> params_[kTurns];
};

// Both turns of a case at once, with no host in between, under each seed; each checked.
template <EpDispatchConfig kConfig>
void dispatch_under_all_seeds(const EpCase& c, bool table = false) {
  SCOPED_TRACE("world " + std::to_string(c.world) + " top_k " + std::to_string(c.top_k) + " row " +
               std::to_string(c.row_bytes));
  EpRig rig(c, table);
  for (u32 seed = 1; seed <= kSeeds; ++seed) {
    std::vector<EpInputs> inputs;
    for (u32 turn = 0; turn < EpRig::kTurns; ++turn) {
      inputs.emplace_back(c, seed * EpRig::kTurns + turn);
      rig.load(inputs[turn], turn);
      rig.launch_all<kConfig>(turn);
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 turn = 0; turn < EpRig::kTurns; ++turn)
      for (u32 rank = 0; rank < c.world; ++rank)
        ASSERT_NO_FATAL_FAILURE(EpReference(c, inputs[turn]).check(rank, rig.delivered(rank, turn)))
            << "seed " << seed << " turn " << turn;
  }
}

}  // namespace crossdock::testing
