// The twin rig of dispatches that copy rows to their places as they come: what a launch writes
// besides a dispatch, and its check. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/kernel/ep_dispatch_expanded.cuh>

#include "ep_places.hpp"
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

class EpExpandedRig {
 public:
  static constexpr u32 kTurns = EpRig::kTurns;

  EpExpandedRig(const EpCase& c, const EpPlacesShape& shape) : case_(c), shape_(shape), rig_(c) {
    for (u32 rank = 0; rank < c.world; ++rank)
      words_.push_back(ranks().local<u64>(rank, copy_words()));
    for (u32 turn = 0; turn < kTurns; ++turn)
      for (u32 rank = 0; rank < c.world; ++rank) {
        places_[turn].emplace_back(ranks(), rank, c, shape);
        EpExpandedDispatchParams p{};
        p.grouping = places_[turn].back().grouping();
        p.to = places_[turn].back().to();
        p.words = words_[rank];
        params_[turn].push_back(p);
      }
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
    for (EpPlaces& places : places_[turn % kTurns])
      places.fill();
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
  // Lists and copies of a rank; what was delivered is right.
  void check(u32 rank, u32 turn, bool beyond = true) {
    places_[turn % kTurns][rank].check(rig_.delivered(rank, turn), rig_.params(rank, turn).stride,
                                       beyond);
  }
  // Nothing has been copied.
  void check_untouched(u32 rank, u32 turn) { places_[turn % kTurns][rank].check_untouched(); }

 private:
  [[nodiscard]] u64 copy_words() const {
    return EpCopyWords{shape_.copy_blocks, case_.expert_map().most()}.count();
  }
  EpCase case_;
  EpPlacesShape shape_;
  EpRig rig_;
  std::vector<u64*> words_;
  std::vector<EpPlaces> places_[kTurns];
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
