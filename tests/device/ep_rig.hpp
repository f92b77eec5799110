// The twin rig of the expert-parallel kernels: ranks with the areas, state and output blocks that
// dispatch and combine need. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include <crossdock/kernel/ep_combine.cuh>
#include <crossdock/kernel/ep_dispatch.cuh>
#include <crossdock/kernel/ep_mask.cuh>

#include "ranks.hpp"
#include "support/ep_case.hpp"
#include "twin/sanitizer.hpp"

namespace crossdock::testing {

// Sixteen schedules; under TSan, which makes every access slow and needs no lucky schedule, two.
inline constexpr u32 kEpSeeds = twin::kTsan ? 2 : kSeeds;

inline constexpr EpDispatchConfig kPlain{
    .dispatch_warps = 2, .stages = 3, .notify_warps = 2, .cast = false, .wide_ids = false};
inline constexpr EpDispatchConfig kWide{
    .dispatch_warps = 3, .stages = 2, .notify_warps = 2, .cast = false, .wide_ids = true};
inline constexpr EpDispatchConfig kCast{
    .dispatch_warps = 2, .stages = 1, .notify_warps = 1, .cast = true, .wide_ids = false};

inline constexpr EpCombineConfig kPull{.warps = 2, .stages = 2, .stage_bytes = 256};
// Few stages of small parts, so that rings and stages come round.
inline constexpr EpCombineConfig kPush{.warps = 2,
                                       .stages = 2,
                                       .stage_bytes = 256,
                                       .send_warps = 2,
                                       .send_stages = 3,
                                       .send_stage_bytes = 64,
                                       .send_notes = 5};

// In place of the experts: a row of known values for every row that has arrived. One block.
struct EpExpertsParams {
  u32 rank;
  u32 world;
  u32 round;
  u32 top_k;
  const u32* source_ends;
  const u8* block;  // of the dispatch
  EpOutputLayout output;
  u8* input;  // of combine
  EpInputLayout layout;
  u32 stride = 0;  // places from source to source; 0: rows without gaps
};
inline void fake_experts(const EpExpertsParams& p) {
  u32 first = 0;
  for (u32 source = 0; source < p.world; ++source) {
    const u32 end = ptx::ld_weak(p.source_ends + source);
    if (p.stride != 0) first = source * p.stride;
    for (u32 row = first + thread_index(); row < end; row += block_size()) {
      const u32 token =
          ptx::ld_weak(reinterpret_cast<const u32*>(p.block + p.output.sources) + row);
      auto* to = reinterpret_cast<u16*>(p.input + p.layout.rows + u64{row} * p.layout.row_bytes);
      for (u32 i = 0; i < p.layout.row_bytes / 2; ++i)
        ptx::st_weak(to + i, expert_value(p.rank, source, token, i, p.round));
      auto* weights = reinterpret_cast<float*>(p.input + p.layout.weights) + u64{row} * p.top_k;
      for (u32 k = 0; k < p.top_k; ++k)
        ptx::st_weak(weights + k, expert_weight(p.rank, row, k));
    }
    first = end;
  }
}

// One id of a rank's tokens, and all of them with rows, scales and weights.
inline void put_id(const EpCase& c, EpDispatchInput& to, u64 index, i64 id) {
  if (c.wide_ids) {
    static_cast<i64*>(const_cast<void*>(to.ids))[index] = id;
  } else {
    static_cast<i32*>(const_cast<void*>(to.ids))[index] = static_cast<i32>(id);
  }
}
inline void put_tokens(const EpCase& c, const EpTokensIn& in, EpDispatchInput& to) {
  std::copy(in.rows.begin(), in.rows.end(), const_cast<u8*>(to.rows));
  std::copy(in.scales.begin(), in.scales.end(), const_cast<u8*>(to.scales));
  for (u64 i = 0; i < in.ids.size(); ++i)
    put_id(c, to, i, in.ids[i]);
  if (c.weights) std::copy(in.weights.begin(), in.weights.end(), const_cast<float*>(to.weights));
}

// Bugs that are planted in ep_mask by what it is told.
enum class MaskBug { kNone, kNothingMadeUp, kNothingReleased };
inline MaskBug g_mask_bug = MaskBug::kNone;
inline void launch_mask_kernel(Ranks& ranks, EpMaskParams p, u32 stream = 0) {
  if (g_mask_bug == MaskBug::kNothingMadeUp) p.combine_blocks = 0;
  if (g_mask_bug == MaskBug::kNothingReleased) p.slots = 0;
  ranks.launch(p.view.rank, {1, kWarpSize, 0, "ep_mask", true, stream},
               kernel::ep_mask<EpMaskConfig{kWarpSize}>, p);
}

// Two sets of everything that a launch reads and writes, for launches in turns.
class EpRig {
 public:
  static constexpr u32 kTurns = 2;

  explicit EpRig(const EpCase& c, bool table = false) : case_(c), ranks_(c.world, layout(), table) {
    for (u32 rank = 0; rank < c.world; ++rank) {
      state_.push_back(ranks_.local<EpState>(rank, 1));
      previous_.push_back(ranks_.local<u32>(rank, previous_words()));
      masks_.push_back(ranks_.local<EpMask>(rank, 1));
    }
    for (u32 turn = 0; turn < kTurns; ++turn)
      for (u32 rank = 0; rank < c.world; ++rank) {
        params_[turn].push_back(make(rank, turn));
        combines_[turn].push_back(make_combine(rank, turn));
      }
  }

  [[nodiscard]] Ranks& ranks() { return ranks_; }
  [[nodiscard]] EpMask& mask(u32 rank) { return *masks_[rank]; }
  // As if every rank had combined `epoch` times, in the first slot the last two times and never in
  // another one.
  void combined_so_far(u32 epoch) {
    for (u32 rank = 0; rank < case_.world; ++rank) {
      state_[rank]->combine.finished = epoch;
      std::fill_n(ranks_.window<u64>(rank, areas_.inputs), 2 * case_.world, u64{0x8000} << 48);
      for (u32 source = 0; source < case_.world; ++source) {
        const u32 total = epoch * case_.blocks_of(source);
        *ranks_.window<u32>(rank, areas_.pulled + source * sizeof(PaddedWord)) = total;
        state_[rank]->pulled[source] = state_[rank]->free_at[0][source] = total;
      }
    }
  }
  // In the order of a stream of the rank; all else is in stream 0.
  void launch_mask(u32 rank, u32 set, u32 clear, u32 stream = 0) {
    EpMaskParams p{};
    p.mask = masks_[rank];
    p.set = set;
    p.clear = clear;
    p.view = ranks_.view(rank);
    p.areas = areas_;
    p.state = state_[rank];
    p.combine_blocks = case_.blocks_of(rank);
    launch_mask_kernel(ranks_, p, stream);
  }
  // From now on a rank that does not come is masked.
  void mask_late() {
    for (u32 turn = 0; turn < kTurns; ++turn)
      for (u32 rank = 0; rank < case_.world; ++rank)
        params_[turn][rank].masking.late = combines_[turn][rank].masking.late = true;
  }
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
      put_tokens(case_, in, p.input);
      p.tokens = EpTokens::make(in.tokens, case_.blocks_of(rank));
      std::memset(output(rank, turn), 0xee, case_.output().bytes);
    }
  }
  void set_id(EpDispatchParams& p, u64 index, i64 id) const { put_id(case_, p.input, index, id); }
  template <EpDispatchConfig kConfig>
  void launch(u32 rank, u32 turn) {
    const EpDispatchParams& p = params(rank, turn);
    const u32 shared =
        ep_dispatch_shared(kConfig, p.input.row_bytes, case_.world, case_.experts, p.tokens.groups)
            .bytes;
    ranks_.launch(rank, {p.tokens.blocks, kConfig.threads(), shared, "ep_dispatch", true},
                  kernel::ep_dispatch<kConfig>, p);
  }
  template <EpDispatchConfig kConfig>
  void launch_all(u32 turn) {
    for (u32 rank = 0; rank < case_.world; ++rank)
      launch<kConfig>(rank, turn);
  }
  // ---- combine
  // -----------------------------------------------------------------------------------

  [[nodiscard]] EpCombineParams& combined(u32 rank, u32 turn) {
    return combines_[turn % kTurns][rank];
  }
  void launch_experts(u32 rank, u32 turn, u32 round) {
    const EpDispatchParams& p = params(rank, turn);
    const EpCombineParams& c = combined(rank, turn);
    ranks_.launch(rank, {1, 32, 0, "experts"}, fake_experts,
                  EpExpertsParams{rank, case_.world, round, case_.top_k, p.result.source_ends,
                                  output(rank, turn), p.output,
                                  ranks_.window<u8>(rank, c.input_offset), c.input, p.stride});
  }
  // `rows`: where this launch puts its result.
  template <EpCombineConfig kConfig>
  void launch_combine(u32 rank, u32 turn, u8* rows) {
    EpCombineParams p = combined(rank, turn);
    p.tokens = params(rank, turn).tokens;
    p.output.rows = rows;
    if (!case_.combine_weights) p.output.weights = nullptr;
    const u32 more = kConfig.pushes() ? 1 : 0;  // a block that sends
    const u32 blocks = case_.blocks_of(rank) + more;
    p.send_blocks = case_.world == 1 ? 0 : more * (blocks / 2);
    for (u32 peer = 0; peer < case_.world; ++peer)
      p.source_blocks[peer] = static_cast<u8>(case_.blocks_of(peer) + more);
    ranks_.launch(rank,
                  {blocks, kConfig.threads(), ep_combine_shared(kConfig).bytes, "ep_combine", true},
                  kernel::ep_combine<kConfig>, p);
  }
  // What a reset of the group does.
  void reset() {
    ranks_.reset();
    for (u32 rank = 0; rank < case_.world; ++rank) {
      std::memset(static_cast<void*>(state_[rank]), 0, sizeof(EpState));
      std::memset(previous_[rank], 0, previous_words() * sizeof(u32));
      *masks_[rank] = {};
    }
  }

 private:
  [[nodiscard]] u64 previous_words() const { return u64{kTurns} * areas_.most_experts; }
  SymmetricLayout layout() {
    SymmetricLayout window;
    areas_ = add_ep(window, case_.world, case_.experts, case_.most_blocks(), case_.fixed);
    outputs_ = window.add("outputs", kTurns * case_.output().bytes);
    input_ = ep_input_layout(case_.world * case_.max_tokens, case_.combine_bytes, case_.top_k);
    inputs_ = window.add("inputs", kTurns * input_.bytes);
    staging_ = add_ep_staging(window, case_.world, case_.max_tokens, case_.combine_bytes);
    flags_ = add_ep_flags(window, case_.world, case_.world * case_.max_tokens, case_.most_blocks());
    return window;
  }
  EpDispatchParams make(u32 rank, u32 turn) {
    const u64 tokens = case_.max_tokens;
    EpDispatchParams p{};
    p.common = ranks_.common(rank, KernelId::kEpDispatch);
    p.view = ranks_.view(rank);
    p.areas = areas_;
    p.flags = flags_;
    p.experts = case_.expert_map();
    p.output = case_.output();
    p.output_offset = outputs_ + u64{turn} * case_.output().bytes;
    p.slot = turn;
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
    p.result.sent_ends = ranks_.local<u32>(rank, case_.world);
    p.result.expert_counts = ranks_.local<u32>(rank, areas_.most_experts + 1);
    p.result.host_rows = ranks_.local<u64>(rank, 1);
    p.result.host_experts = ranks_.local<u64>(rank, areas_.most_experts + 1);
    p.statistics.expert_selections = ranks_.local<u64>(rank, areas_.most_experts + 1);
    p.statistics.source_wait_ns = ranks_.local<u64>(rank, case_.world);
    p.state = state_[rank];
    p.expert_previous = previous_[rank];
    p.masking = {masks_[rank], false};
    p.stride = case_.fixed ? case_.max_tokens : 0;
    for (u32 peer = 0; peer < case_.world; ++peer)
      p.source_blocks[peer] = static_cast<u8>(case_.blocks_of(peer));
    p.most_blocks = case_.most_blocks();
    return p;
  }
  EpCombineParams make_combine(u32 rank, u32 turn) {
    const u64 values = u64{case_.max_tokens} * case_.combine_bytes / 2;
    EpCombineParams p{};
    p.common = ranks_.common(rank, KernelId::kEpCombine);
    p.view = ranks_.view(rank);
    p.areas = areas_;
    p.routes = params(rank, turn).result.routes;
    p.input = input_;
    p.input_offset = inputs_ + turn * input_.bytes;
    p.parts =
        EpParts::make(kPull.stage_bytes, case_.combine_bytes, min_of(case_.world, case_.top_k));
    p.staging = staging_;
    p.send_parts = EpParts::make(kPush.send_stage_bytes, case_.combine_bytes, 1);
    p.source_ends = params(rank, turn).result.source_ends;
    p.output.row_stride = case_.combine_bytes;
    for (u32 which = 0; which < case_.biases; ++which) {
      auto* bias = ranks_.local<u16>(rank, values);
      for (u64 i = 0; i < values; ++i)
        bias[i] = bias_value(which, rank, static_cast<u32>(i / (case_.combine_bytes / 2)),
                             static_cast<u32>(i % (case_.combine_bytes / 2)));
      p.output.bias[which] = reinterpret_cast<const u8*>(bias);
      p.output.bias_stride[which] = case_.combine_bytes;
    }
    p.output.weights = ranks_.local<float>(rank, u64{case_.max_tokens} * case_.top_k);
    p.top_k = case_.top_k;
    p.tells = p.adds = true;
    p.masking = {masks_[rank], false};
    p.slot = turn;
    p.state = state_[rank];
    return p;
  }
  EpCase case_;
  EpAreas areas_{};
  u64 outputs_ = 0;
  EpInputLayout input_{};
  EpStaging staging_{};
  EpFlagAreas flags_{};
  u64 inputs_ = 0;
  Ranks ranks_;
  std::vector<EpState*> state_;
  std::vector<u32*> previous_;
  std::vector<EpMask*> masks_;
  std::vector<EpDispatchParams> params_[kTurns];
  std::vector<EpCombineParams> combines_[kTurns];
};

// Both turns of a case at once, with no host in between, under each seed; each checked.
template <EpDispatchConfig kConfig>
void dispatch_under_all_seeds(const EpCase& c, bool table = false) {
  SCOPED_TRACE("world " + std::to_string(c.world) + " top_k " + std::to_string(c.top_k) + " row " +
               std::to_string(c.row_bytes));
  EpRig rig(c, table);
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
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
