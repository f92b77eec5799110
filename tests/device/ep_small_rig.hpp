// The twin rig of dispatch and combine of few tokens: ranks with two slots of that path, and rounds
// of dispatch, experts and combine that are all queued at once. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/kernel/ep_packet_combine.cuh>
#include <crossdock/kernel/ep_packet_dispatch.cuh>
#include <crossdock/kernel/ep_small_dispatch.cuh>

#include "ep_rig.hpp"

namespace crossdock::testing {

inline constexpr EpSmallConfig kSmallPlain{.warps = 2, .cast = false};
inline constexpr EpSmallConfig kSmallCast{.warps = 2, .cast = true};
inline constexpr EpCombineConfig kSmallPull{
    .warps = 2, .stages = 2, .stage_bytes = 256, .small = true};

inline constexpr u32 kPacketWarps = 2;

class EpSmallRig {
 public:
  static constexpr u32 kSlots = 2;

  // `c.fixed` has to be set: places of source s begin at s * max_tokens.
  explicit EpSmallRig(const EpCase& c) : case_(c), ranks_(c.world, layout()) {
    for (u32 rank = 0; rank < c.world; ++rank)
      masks_.push_back(ranks_.local<EpMask>(rank, 1));
    for (u32 rank = 0; rank < c.world; ++rank)
      for (u32 slot = 0; slot < kSlots; ++slot)
        state_.push_back(
            {ranks_.local<EpSmallState>(rank, 1, 128), ranks_.local<EpState>(rank, 1, 128)});
    for (u32 slot = 0; slot < kSlots; ++slot)
      for (u32 rank = 0; rank < c.world; ++rank) {
        params_[slot].push_back(make(rank, slot));
        combines_[slot].push_back(make_combine(rank, slot));
      }
  }

  [[nodiscard]] Ranks& ranks() { return ranks_; }
  [[nodiscard]] EpMask& mask(u32 rank) { return *masks_[rank]; }
  // In the order of the rank's stream.
  void launch_mask(u32 rank, u32 set, u32 clear) {
    EpMaskParams p{};
    p.mask = masks_[rank];
    p.set = set;
    p.clear = clear;
    p.view = ranks_.view(rank);
    p.areas.pulled = unused_;
    p.state = state_[rank * kSlots].combine;
    for (; p.slots < kSlots; ++p.slots)
      p.small[p.slots] = state_[rank * kSlots + p.slots].dispatch;
    launch_mask_kernel(ranks_, p);
  }
  // As if every rank had combined `epoch` times in every slot.
  void combined_so_far(u32 epoch) {
    for (u32 rank = 0; rank < case_.world; ++rank)
      for (u32 slot = 0; slot < kSlots; ++slot) {
        state_[rank * kSlots + slot].combine->combine.finished = epoch;
        std::fill_n(ranks_.window<u64>(rank, areas_[slot].inputs), 2 * case_.world,
                    u64{0x8000} << 48);
      }
  }
  // As if every rank had used every slot so many times, by flags.
  void used_so_far(u32 uses) {
    for (const State& state : state_)
      state.dispatch->dispatch.finished = state.dispatch->released.value = uses;
    const u32 world = case_.world;
    for (u32 rank = 0; rank < world; ++rank)
      for (const EpSmallAreas& areas : areas_) {
        std::fill_n(ranks_.window<u64>(rank, areas.headers), world, epoch_word(uses, 0));
        std::fill_n(ranks_.window<u32>(rank, areas.flags), world * kEpMaxSendBlocks, uses);
        std::fill_n(ranks_.window<u64>(rank, areas.counts), world * areas.most_experts,
                    epoch_word(uses, 0));
        std::fill_n(ranks_.window<u32>(rank, areas.free), world, uses);
      }
  }
  // As if every rank had made so many dispatches and combines in packets since.
  void in_packets_so_far(u32 dispatches, u32 combines) {
    for (const State& state : state_) {
      state.dispatch->dispatch.finished = dispatches;
      state.combine->combine.finished = combines;
    }
  }
  // What `source` has told `rank` that it has read.
  [[nodiscard]] u32 told_reads(u32 rank, u32 slot, u32 source) {
    return ranks_.window<u32>(rank, areas_[slot].reads)[source];
  }
  // From now on a rank that does not come is masked.
  void mask_late() {
    for (u32 slot = 0; slot < kSlots; ++slot)
      for (u32 rank = 0; rank < case_.world; ++rank)
        params_[slot][rank].masking.late = combines_[slot][rank].masking.late = true;
  }
  [[nodiscard]] const EpCase& of() const { return case_; }
  [[nodiscard]] EpSmallParams& params(u32 rank, u32 turn) { return params_[turn % kSlots][rank]; }
  [[nodiscard]] EpCombineParams& combined(u32 rank, u32 turn) {
    return combines_[turn % kSlots][rank];
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
      EpSmallParams& p = params(rank, turn);
      put_tokens(case_, in, p.input);
      p.tokens = in.tokens;
      p.send_blocks = std::min(in.tokens, case_.blocks_of(rank));
      std::memset(output(rank, turn), 0xee, case_.output().bytes);
    }
  }
  void set_id(EpSmallParams& p, u64 index, i64 id) const { put_id(case_, p.input, index, id); }
  // Both halves in one launch, or the one that is asked for.
  enum class Half { kBoth, kSend, kReceive };
  template <EpSmallConfig kConfig>
  void launch(u32 rank, u32 turn, Half half = Half::kBoth) {
    EpSmallParams p = params(rank, turn);
    p.receives = half != Half::kSend;
    p.sends = half != Half::kReceive;
    if (!p.sends) p.send_blocks = 0;
    const u32 shared =
        ep_small_shared(kConfig, p.input.row_bytes, case_.world, case_.experts, p.tokens).bytes;
    ranks_.launch(rank,
                  {p.send_blocks + (p.sends ? 1 : 0) + (p.receives ? 1 : 0), kConfig.threads(),
                   shared, "ep_small_dispatch", true},
                  kernel::ep_small_dispatch<kConfig>, p);
  }
  // The same in packets; at most kEpMaxPacketTokens tokens a rank.
  template <bool kCast>
  void launch_packets(u32 rank, u32 turn, Half half = Half::kBoth) {
    EpPacketParams p{};
    p.small = params(rank, turn);
    p.small.sends = half != Half::kReceive;
    p.small.receives = half != Half::kSend;
    p.small.send_blocks = p.small.sends ? case_.blocks_of(rank) : 0;
    p.receive_blocks = p.small.receives ? case_.blocks_of(rank + 1) : 0;
    p.areas = packets_[turn % kSlots];
    p.message = message();
    ranks_.launch(rank,
                  {p.small.send_blocks + p.receive_blocks + (p.small.receives ? 1 : 0),
                   kPacketWarps * kWarpSize, ep_packet_shared(kPacketWarps, case_.experts),
                   "ep_packet_dispatch", true},
                  kernel::ep_packet_dispatch<EpPacketConfig{kPacketWarps, kCast}>, p);
  }
  [[nodiscard]] EpMessage message() const {
    return {case_.output().row_bytes / 4, case_.output().scale_bytes / 4, case_.top_k, case_.cast};
  }
  void launch_packet_combine(u32 rank, u32 turn, u8* rows, Half half = Half::kBoth) {
    const EpCombineParams& c = combined(rank, turn);
    const EpSmallParams& d = params(rank, turn);
    EpPacketCombineParams p{};
    p.common = c.common;
    p.view = c.view;
    p.areas = packets_[turn % kSlots];
    p.tokens = EpTokens::make(d.tokens, 1);
    p.stride = d.stride;
    p.top_k = case_.top_k;
    p.routes = c.routes;
    p.source_ends = d.result.source_ends;
    p.rows = ranks_.window<u8>(rank, c.input_offset) + c.input.rows;
    p.weights =
        reinterpret_cast<const float*>(ranks_.window<u8>(rank, c.input_offset) + c.input.weights);
    p.row_words = case_.combine_bytes / 4;
    p.output = c.output;
    p.output.rows = rows;
    if (!case_.combine_weights) p.output.weights = nullptr;
    p.send_blocks = half != Half::kReceive ? case_.blocks_of(rank) : 0;
    p.add_blocks = half != Half::kSend ? case_.blocks_of(rank + 1) : 0;
    p.state = c.state;
    p.masking = c.masking;
    p.input_words = c.areas.inputs;
    p.read_words = c.read_words;
    ranks_.launch(
        rank,
        {p.send_blocks + p.add_blocks, kPacketWarps * kWarpSize, 0, "ep_packet_combine", true},
        kernel::ep_packet_combine<EpPacketCombineConfig{kPacketWarps}>, p);
  }
  template <EpSmallConfig kConfig>
  void launch_all(u32 turn) {
    for (u32 rank = 0; rank < case_.world; ++rank)
      launch<kConfig>(rank, turn);
  }
  void launch_experts(u32 rank, u32 turn, u32 round) {
    const EpSmallParams& p = params(rank, turn);
    const EpCombineParams& c = combined(rank, turn);
    ranks_.launch(rank, {1, 32, 0, "experts"}, fake_experts,
                  EpExpertsParams{rank, case_.world, round, case_.top_k, p.result.source_ends,
                                  output(rank, turn), p.output,
                                  ranks_.window<u8>(rank, c.input_offset), c.input, p.stride});
  }
  void launch_combine(u32 rank, u32 turn, u8* rows) {
    EpCombineParams p = combined(rank, turn);
    p.tokens = EpTokens::make(params(rank, turn).tokens, 1);
    p.output.rows = rows;
    if (!case_.combine_weights) p.output.weights = nullptr;
    ranks_.launch(rank,
                  {case_.blocks_of(rank), kSmallPull.threads(), ep_combine_shared(kSmallPull).bytes,
                   "ep_combine", true},
                  kernel::ep_combine<kSmallPull>, p);
  }
  // What a reset of the group does.
  void reset() {
    ranks_.reset();
    for (const State& state : state_) {
      std::memset(static_cast<void*>(state.dispatch), 0, sizeof(EpSmallState));
      std::memset(static_cast<void*>(state.combine), 0, sizeof(EpState));
    }
    for (EpMask* mask : masks_)
      *mask = {};
  }

 private:
  struct State {
    EpSmallState* dispatch;
    EpState* combine;
  };
  SymmetricLayout layout() {
    SymmetricLayout window;
    for (EpSmallAreas& areas : areas_)
      areas = add_ep_small(window, case_.world, case_.experts);
    for (EpPacketAreas& areas : packets_)
      areas = add_ep_packets(window, case_.world, std::min(case_.max_tokens, kEpMaxPacketTokens),
                             message(), case_.combine_bytes / 4);
    outputs_ = window.add("outputs", kSlots * case_.output().bytes);
    input_ = ep_input_layout(case_.world * case_.max_tokens, case_.combine_bytes, case_.top_k);
    inputs_ = window.add("inputs", kSlots * input_.bytes);
    unused_ = window.add("pulled", u64{case_.world} * sizeof(PaddedWord));
    return window;
  }
  EpSmallParams make(u32 rank, u32 slot) {
    const u64 tokens = case_.max_tokens;
    const u32 experts = areas_[0].most_experts + 1;
    EpSmallParams p{};
    p.common = ranks_.common(rank, KernelId::kEpSmallDispatch);
    p.view = ranks_.view(rank);
    p.areas = areas_[slot];
    p.experts = case_.expert_map();
    p.stride = case_.max_tokens;
    p.wide_ids = case_.wide_ids;
    p.output = case_.output();
    p.output_offset = outputs_ + u64{slot} * case_.output().bytes;
    p.input.rows = ranks_.local<u8>(rank, tokens * case_.row_bytes);
    p.input.row_bytes = case_.row_bytes;
    p.input.row_stride = case_.row_bytes;
    p.input.scales = ranks_.local<u8>(rank, tokens * case_.scale_bytes + 4);
    p.input.scale_stride = case_.scale_bytes;
    p.input.top_k = case_.top_k;
    p.input.ids = ranks_.local<u64>(rank, tokens * case_.top_k);
    if (case_.weights) p.input.weights = ranks_.local<float>(rank, tokens * case_.top_k);
    p.result.routes =
        ranks_.local<EpRoute>(rank, EpTokens::most_routes(case_.max_tokens, 1, case_.world));
    p.result.source_ends = ranks_.local<u32>(rank, case_.world);
    p.result.expert_counts = ranks_.local<u32>(rank, experts);
    p.result.host_rows = ranks_.local<u64>(rank, 1);
    p.result.host_experts = ranks_.local<u64>(rank, experts);
    p.statistics.expert_selections = ranks_.local<u64>(rank, experts);
    p.statistics.source_wait_ns = ranks_.local<u64>(rank, case_.world);
    p.state = state_[rank * kSlots + slot].dispatch;
    p.masking = {masks_[rank], false};
    return p;
  }
  EpCombineParams make_combine(u32 rank, u32 slot) {
    EpCombineParams p{};
    p.common = ranks_.common(rank, KernelId::kEpCombine);
    p.view = ranks_.view(rank);
    p.areas.inputs = areas_[slot].inputs;
    p.routes = params(rank, slot).result.routes;
    p.input = input_;
    p.input_offset = inputs_ + slot * input_.bytes;
    p.parts = EpParts::make(kSmallPull.stage_bytes, case_.combine_bytes,
                            min_of(case_.world, case_.top_k));
    p.output.row_stride = case_.combine_bytes;
    p.output.weights = ranks_.local<float>(rank, u64{case_.max_tokens} * case_.top_k);
    p.top_k = case_.top_k;
    p.tells = p.adds = true;
    p.slot = kNoSlot;
    p.state = state_[rank * kSlots + slot].combine;
    p.free_words = areas_[slot].free;
    p.read_words = areas_[slot].reads;
    p.small = state_[rank * kSlots + slot].dispatch;
    p.masking = {masks_[rank], false};
    return p;
  }
  EpCase case_;
  EpSmallAreas areas_[kSlots]{};
  EpPacketAreas packets_[kSlots]{};
  u64 outputs_ = 0;
  EpInputLayout input_{};
  u64 inputs_ = 0;
  u64 unused_ = 0;  // what the large path counts
  Ranks ranks_;
  std::vector<State> state_;
  std::vector<EpMask*> masks_;
  std::vector<EpSmallParams> params_[kSlots];
  std::vector<EpCombineParams> combines_[kSlots];
};

// Both slots of a case at once, with no host in between, under each seed; each checked.
template <EpSmallConfig kConfig>
void small_under_all_seeds(EpCase c) {
  c.fixed = true;
  SCOPED_TRACE("world " + std::to_string(c.world) + " top_k " + std::to_string(c.top_k) + " row " +
               std::to_string(c.row_bytes));
  EpSmallRig rig(c);
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    std::vector<EpInputs> inputs;
    for (u32 turn = 0; turn < EpSmallRig::kSlots; ++turn) {
      inputs.emplace_back(c, seed * EpSmallRig::kSlots + turn);
      rig.load(inputs[turn], turn);
      rig.launch_all<kConfig>(turn);
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 turn = 0; turn < EpSmallRig::kSlots; ++turn)
      for (u32 rank = 0; rank < c.world; ++rank)
        ASSERT_NO_FATAL_FAILURE(EpReference(c, inputs[turn]).check(rank, rig.delivered(rank, turn)))
            << "seed " << seed << " turn " << turn;
  }
}

// Rounds of dispatch, experts, combine in the slots in turns, all queued at once.
struct SmallRounds {
  static constexpr u32 kRounds = 5;
  EpSmallRig rig;
  std::vector<u8*> outputs;  // [round][rank]

  explicit SmallRounds(EpCase c) : rig(fixed(c)) {
    for (u32 round = 0; round < kRounds; ++round)
      for (u32 rank = 0; rank < c.world; ++rank)
        outputs.push_back(rig.ranks().local<u8>(rank, u64{c.max_tokens} * c.combine_bytes + 16));
  }
  static EpCase fixed(EpCase c) {
    c.fixed = true;
    return c;
  }
  void run_and_check(u32 seed) {
    const EpCase& c = rig.of();
    std::vector<EpInputs> inputs;
    for (u32 slot = 0; slot < EpSmallRig::kSlots; ++slot) {
      inputs.emplace_back(c, seed * EpSmallRig::kSlots + slot);
      rig.load(inputs[slot], slot);
    }
    for (u32 rank = 0; rank < c.world; ++rank)
      for (u32 round = 0; round < kRounds; ++round) {
        rig.launch<kSmallPlain>(rank, round);
        rig.launch_experts(rank, round, round);
        rig.launch_combine(rank, round, outputs[round * c.world + rank]);
      }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 round = 0; round < kRounds; ++round)
      for (u32 rank = 0; rank < c.world; ++rank) {
        const EpReference reference(c, inputs[round % EpSmallRig::kSlots]);
        ASSERT_NO_FATAL_FAILURE(
            reference.check_combined(rank, outputs[round * c.world + rank], round))
            << "seed " << seed;
      }
  }
};

}  // namespace crossdock::testing
