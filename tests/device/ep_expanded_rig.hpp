// The twin rig of dispatches that copy rows to their places as they come: what a launch writes
// besides a dispatch, and a check of all of it against plain loops over the rows that were
// delivered. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/kernel/ep_dispatch_expanded.cuh>

#include "ep_rig.hpp"

namespace crossdock::testing {

inline constexpr EpDispatchConfig kFlagged{.dispatch_warps = 2,
                                           .stages = 3,
                                           .notify_warps = 2,
                                           .cast = false,
                                           .wide_ids = false,
                                           .flag_warps = 1,
                                           .copy_stages = 2,
                                           .copy_stage_bytes = 128};
inline constexpr EpDispatchConfig kFlaggedCast{.dispatch_warps = 2,
                                               .stages = 1,
                                               .notify_warps = 1,
                                               .cast = true,
                                               .wide_ids = false,
                                               .flag_warps = 1,
                                               .copy_stages = 3,
                                               .copy_stage_bytes = 256};

struct EpPlacesShape {
  bool masked = false;
  bool scales_by_column = false;
  u32 copy_blocks = 2;  // of every rank
  u32 alignment = 4;
  u32 room_less_by = 0;  // places
};

class EpExpandedRig {
 public:
  static constexpr u32 kTurns = EpRig::kTurns;
  static constexpr u8 kPattern = 0x5a;

  EpExpandedRig(const EpCase& c, const EpPlacesShape& shape) : case_(c), shape_(shape), rig_(c) {
    for (u32 rank = 0; rank < c.world; ++rank)
      words_.push_back(ranks().local<u64>(rank, copy_words()));
    for (u32 turn = 0; turn < kTurns; ++turn)
      for (u32 rank = 0; rank < c.world; ++rank)
        params_[turn].push_back(make(rank));
  }
  [[nodiscard]] EpRig& rig() { return rig_; }
  [[nodiscard]] Ranks& ranks() { return rig_.ranks(); }
  [[nodiscard]] EpExpandedDispatchParams& params(u32 rank, u32 turn) {
    return params_[turn % kTurns][rank];
  }
  void reset() {
    rig_.reset();
    for (u64* words : words_)
      std::memset(words, 0, copy_words() * sizeof(u64));
  }
  // Tokens for every rank; what will be written is filled with a pattern.
  void load(const EpInputs& inputs, u32 turn) {
    rig_.load(inputs, turn);
    for (u32 rank = 0; rank < case_.world; ++rank) {
      const EpExpanded& to = params(rank, turn).to;
      const EpOutputLayout out = case_.output();
      std::memset(to.rows, kPattern, memory_places() * out.row_bytes);
      if (to.scales != nullptr) std::memset(to.scales, kPattern, memory_places() * out.scale_bytes);
      if (to.weights != nullptr)
        std::memset(static_cast<void*>(to.weights), kPattern, memory_places() * 4);
      std::memset(static_cast<void*>(to.sources), kPattern, memory_places() * sizeof(EpSource));
    }
  }
  template <EpDispatchConfig kConfig>
  void launch(u32 rank, u32 turn) {
    EpExpandedDispatchParams p = params(rank, turn);
    p.dispatch = rig_.params(rank, turn);
    p.parts = ceil_div(case_.output().row_bytes, kConfig.copy_stage_bytes);
    p.part_bytes = ep_part_bytes(case_.output().row_bytes, p.parts);
    const u32 dispatch = ep_dispatch_shared(kConfig, p.dispatch.input.row_bytes, case_.world,
                                            case_.experts, p.dispatch.tokens.groups)
                             .bytes;
    const u32 copies = ep_copy_shared(kConfig, case_.world, case_.expert_map().most()).bytes;
    ranks().launch(rank,
                   {p.dispatch.tokens.blocks + shape_.copy_blocks, kConfig.threads(),
                    std::max(dispatch, copies), "ep_dispatch_expanded", true},
                   kernel::ep_dispatch_expanded<kConfig>, p);
  }
  template <EpDispatchConfig kConfig>
  void launch_all(u32 turn) {
    for (u32 rank = 0; rank < case_.world; ++rank)
      launch<kConfig>(rank, turn);
  }
  // Lists and copies of a rank; what was delivered is right. `beyond`: what lies behind the places
  // is untouched.
  void check(u32 rank, u32 turn, bool beyond = true) {
    const Delivered d = delivered(rank, turn);
    const EpExpandedDispatchParams& p = params(rank, turn);
    const u32 experts = case_.expert_map().count(rank);
    std::vector<bool> used(memory_places(), false);
    u32 place = 0;
    for (u32 e = 0; e < experts; ++e) {
      ASSERT_EQ(p.grouping.offsets[e], place) << "expert " << e;
      const u32 begin = place;
      for (u32 choice = 0; choice < d.rows * case_.top_k; ++choice) {
        if (!d.holds(choice / case_.top_k) || d.ids[choice] != static_cast<i32>(e)) continue;
        ASSERT_EQ(p.grouping.rows[place], static_cast<i32>(choice / case_.top_k)) << place;
        ASSERT_EQ(p.grouping.positions[choice], place);
        if (case_.weights) {
          ASSERT_EQ(p.grouping.weights[place], d.weights[choice]);
        }
        const u64 at = ep_target(place, e, begin, p.to.rows_per_expert);
        used[at] = true;
        ASSERT_NO_FATAL_FAILURE(check_copy(p, d, at, choice)) << "expert " << e << " " << place;
        ++place;
      }
      for (; place % shape_.alignment != 0; ++place) {
        ASSERT_EQ(p.grouping.rows[place], -1);
        if (shape_.masked && place - begin >= p.to.rows_per_expert) continue;
        const u64 at = ep_target(place, e, begin, p.to.rows_per_expert);
        used[at] = true;
        ASSERT_NO_FATAL_FAILURE(check_bytes(p, at, 0)) << "padding of expert " << e;
        ASSERT_EQ(p.to.sources[at].rank, -1);
        ASSERT_EQ(p.to.sources[at].token, -1);
      }
      ASSERT_EQ(p.grouping.aligned[e], place - begin);
    }
    ASSERT_EQ(p.grouping.offsets[experts], place);
    for (u64 at = 0; beyond && at < memory_places(); ++at)
      if (!used[at]) {
        ASSERT_NO_FATAL_FAILURE(check_bytes(p, at, kPattern)) << "untouched " << at;
      }
  }
  // Nothing has been copied.
  void check_untouched(u32 rank, u32 turn) {
    for (u64 at = 0; at < memory_places(); ++at)
      ASSERT_NO_FATAL_FAILURE(check_bytes(params(rank, turn), at, kPattern)) << at;
  }

 private:
  struct Delivered {
    u32 rows;    // with the gaps between sources
    u32 stride;  // from source to source; 0: no gaps
    const i32* ids;
    const float* weights;
    const u8* payload;
    const u8* block;
    const u32* tokens;
    const u32* ends;
    [[nodiscard]] bool holds(u32 row) const { return stride == 0 || row < ends[row / stride]; }
  };
  [[nodiscard]] u64 copy_words() const {
    return EpCopyWords{shape_.copy_blocks, case_.expert_map().most()}.count();
  }
  [[nodiscard]] u64 choices() const { return u64{case_.world} * case_.max_tokens * case_.top_k; }
  [[nodiscard]] u64 most_places() const {
    return choices() + u64{case_.expert_map().most()} * (shape_.alignment - 1);
  }
  [[nodiscard]] u64 memory_places() const {
    return shape_.masked ? choices() * case_.expert_map().most() : most_places();
  }
  EpExpandedDispatchParams make(u32 rank) {
    EpExpandedDispatchParams p{};
    const EpOutputLayout out = case_.output();
    const u64 places = memory_places();
    p.grouping = {.offsets = ranks().local<u32>(rank, case_.expert_map().most() + 1),
                  .aligned = ranks().local<u32>(rank, case_.expert_map().most() + 1),
                  .rows = ranks().local<i32>(rank, most_places()),
                  .positions = ranks().local<u32>(rank, choices()),
                  .weights = case_.weights ? ranks().local<float>(rank, most_places()) : nullptr,
                  .alignment = shape_.alignment};
    const u64 row_room = choices() - (shape_.masked ? shape_.room_less_by : 0);
    p.to = {.rows = ranks().local<u8>(rank, places * out.row_bytes),
            .scales =
                out.scale_bytes == 0 ? nullptr : ranks().local<u8>(rank, places * out.scale_bytes),
            .weights = case_.weights ? ranks().local<float>(rank, places) : nullptr,
            .sources = ranks().local<EpSource>(rank, places),
            .row_stride = out.row_bytes,
            .scale_stride = shape_.scales_by_column ? places : out.scale_bytes,
            .places = places - shape_.room_less_by,
            .rows_per_expert = shape_.masked ? static_cast<u32>(row_room) : 0,
            .scales_by_column = shape_.scales_by_column};
    p.words = words_[rank];
    return p;
  }
  Delivered delivered(u32 rank, u32 turn) {
    const EpOutputLayout out = case_.output();
    const u8* block = rig_.output(rank, turn);
    const u32* ends = rig_.params(rank, turn).result.source_ends;
    const u32 stride = rig_.params(rank, turn).stride;
    return {stride != 0 ? case_.world * stride : ends[case_.world - 1],
            stride,
            reinterpret_cast<const i32*>(block + out.ids),
            reinterpret_cast<const float*>(block + out.weights),
            block + out.rows,
            block,
            reinterpret_cast<const u32*>(block + out.sources),
            ends};
  }
  [[nodiscard]] u32 scale_at(const EpExpandedDispatchParams& p, u64 place, u32 word) const {
    const auto* words = reinterpret_cast<const u32*>(p.to.scales);
    return shape_.scales_by_column ? words[u64{word} * p.to.scale_stride + place]
                                   : words[place * (case_.output().scale_bytes / 4) + word];
  }
  void check_bytes(const EpExpandedDispatchParams& p, u64 place, u8 value) const {
    const EpOutputLayout out = case_.output();
    for (u32 i = 0; i < out.row_bytes; ++i)
      ASSERT_EQ(p.to.rows[place * out.row_bytes + i], value) << "byte " << i;
    for (u32 i = 0; i < out.scale_bytes / 4; ++i)
      ASSERT_EQ(scale_at(p, place, i), value * 0x01010101u) << "scale " << i;
    if (case_.weights) {
      ASSERT_EQ(bit_cast<u32>(p.to.weights[place]), value * 0x01010101u);
    }
  }
  void check_copy(const EpExpandedDispatchParams& p, const Delivered& d, u64 place,
                  u32 choice) const {
    const EpOutputLayout out = case_.output();
    const u32 row = choice / case_.top_k;
    ASSERT_EQ(std::memcmp(p.to.rows + place * out.row_bytes, d.payload + u64{row} * out.row_bytes,
                          out.row_bytes),
              0)
        << "row " << row;
    const auto* scales = reinterpret_cast<const u32*>(d.block + out.scales);
    for (u32 i = 0; i < out.scale_bytes / 4; ++i)
      ASSERT_EQ(scale_at(p, place, i), out.scale_columns == 0
                                           ? scales[u64{row} * (out.scale_bytes / 4) + i]
                                           : scales[u64{i} * out.scale_columns + row])
          << "scale " << i << " of row " << row;
    if (case_.weights) {
      ASSERT_EQ(p.to.weights[place], d.weights[choice]);
    }
    u32 source = 0;
    while (d.ends[source] <= row)
      ++source;
    ASSERT_EQ(p.to.sources[place].rank, static_cast<i32>(source));
    ASSERT_EQ(p.to.sources[place].token, static_cast<i32>(d.tokens[row]));
  }
  EpCase case_;
  EpPlacesShape shape_;
  EpRig rig_;
  std::vector<u64*> words_;
  std::vector<EpExpandedDispatchParams> params_[kTurns];
};

// Both turns of a case at once, with no host in between, under each seed; each checked.
template <EpDispatchConfig kConfig>
void expand_under_seeds(const EpCase& c, const EpPlacesShape& shape, u32 seeds = kEpSeeds) {
  SCOPED_TRACE("world " + std::to_string(c.world) + " top_k " + std::to_string(c.top_k) + " row " +
               std::to_string(c.row_bytes));
  EpExpandedRig rig(c, shape);
  for (u32 seed = 1; seed <= seeds; ++seed) {
    std::vector<EpInputs> inputs;
    for (u32 turn = 0; turn < EpRig::kTurns; ++turn) {
      inputs.emplace_back(c, seed * EpRig::kTurns + turn);
      rig.load(inputs[turn], turn);
      rig.launch_all<kConfig>(turn);
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 turn = 0; turn < EpRig::kTurns; ++turn)
      for (u32 rank = 0; rank < c.world; ++rank) {
        SCOPED_TRACE("seed " + std::to_string(seed) + " turn " + std::to_string(turn) + " rank " +
                     std::to_string(rank));
        ASSERT_NO_FATAL_FAILURE(
            EpReference(c, inputs[turn]).check(rank, rig.rig().delivered(rank, turn)));
        if (shape.copy_blocks != 0) {
          ASSERT_NO_FATAL_FAILURE(rig.check(rank, turn));
        }
      }
  }
}

}  // namespace crossdock::testing
