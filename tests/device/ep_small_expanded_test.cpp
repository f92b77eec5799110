// ep_small_expanded in the twin: rows of few tokens copied to their places in the launch that
// receives them, whole and in halves, in every world, under sixteen schedules with weak memory and
// with both slots queued at once, against plain loops.
// SPDX-License-Identifier: Apache-2.0
#include <crossdock/kernel/ep_small_expanded.cuh>

#include "ep_places.hpp"
#include "ep_small_rig.hpp"

namespace crossdock::testing {
namespace {

// Many ranks have many blocks, which have a warp each.
constexpr EpSmallConfig kOneWarp{.warps = 1, .cast = false};

class EpSmallExpandedRig {
 public:
  static constexpr u32 kSlots = EpSmallRig::kSlots;
  using Half = EpSmallRig::Half;

  EpSmallExpandedRig(const EpCase& c, const EpPlacesShape& shape)
      : case_(c), shape_(shape), rig_(c) {
    for (u32 slot = 0; slot < kSlots; ++slot)
      for (u32 rank = 0; rank < c.world; ++rank) {
        places_[slot].emplace_back(rig_.ranks(), rank, c, shape);
        // Of the twin's clock, by which thousands of threads take turns.
        rig_.params(rank, slot).common.deadline_ns = 200 * kMillisecond;
      }
  }
  [[nodiscard]] Ranks& ranks() { return rig_.ranks(); }
  [[nodiscard]] EpSmallRig& rig() { return rig_; }
  void load(const EpInputs& inputs, u32 slot) {
    rig_.load(inputs, slot);
    for (EpPlaces& places : places_[slot])
      places.fill();
  }
  // Each rank decides for itself whether it copies. Among many ranks few do: a block for each
  // source, at each of them, is more than the twin has time for.
  [[nodiscard]] bool copies(u32 rank, u32 seed) const {
    return case_.world <= 8 || (rank + seed) % 16 == 0;
  }
  template <EpSmallConfig kConfig>
  void launch(u32 rank, u32 slot, u32 seed) {
    if (!copies(rank, seed)) return rig_.launch<kConfig>(rank, slot);
    if ((seed + slot + rank) % 3 != 0) return launch_part<kConfig>(rank, slot, Half::kBoth);
    rig_.launch<kConfig>(rank, slot, Half::kSend);
    launch_part<kConfig>(rank, slot, Half::kReceive);
  }
  void check(u32 rank, u32 slot) {
    places_[slot][rank].check(rig_.delivered(rank, slot), rig_.params(rank, slot).stride);
  }

 private:
  template <EpSmallConfig kConfig>
  void launch_part(u32 rank, u32 slot, Half half) {
    EpSmallExpandedParams p{};
    p.small = rig_.params(rank, slot);
    p.small.receives = true;
    p.small.sends = half == Half::kBoth;
    if (!p.small.sends) p.small.send_blocks = 0;
    p.grouping = places_[slot][rank].grouping();
    p.to = places_[slot][rank].to();
    p.copy_blocks = round_up(shape_.copy_blocks, case_.world);
    p.part_bytes = case_.output().row_bytes;
    p.parts = 1;
    if (p.part_bytes > 128) {
      p.part_bytes = 128;
      p.parts = ceil_div(case_.output().row_bytes, p.part_bytes);
    }
    const u32 dispatch = ep_small_shared(kConfig, p.small.input.row_bytes, case_.world,
                                         case_.experts, p.small.tokens)
                             .bytes;
    const u32 copies = ep_small_copy_shared(kConfig, case_.world, case_.expert_map().most()).bytes;
    const u32 blocks = p.small.send_blocks + (p.small.sends ? 1 : 0) + 1 + p.copy_blocks;
    ranks().launch(
        rank, {blocks, kConfig.threads(), std::max(dispatch, copies), "ep_small_expanded", true},
        kernel::ep_small_expanded<kConfig>, p);
  }
  EpCase case_;
  EpPlacesShape shape_;
  EpSmallRig rig_;
  std::vector<EpPlaces> places_[kSlots];
};

// The sixteen seeds that are `first` by `turns`.
template <EpSmallConfig kConfig>
void under_seeds(EpCase c, const EpPlacesShape& shape, u32 first = 1, u32 turns = 1) {
  c.fixed = true;
  EpSmallExpandedRig rig(c, shape);
  for (u32 seed = first; seed <= kEpSeeds; seed += turns) {
    SCOPED_TRACE("world " + std::to_string(c.world) + " seed " + std::to_string(seed));
    std::vector<EpInputs> inputs;
    for (u32 slot = 0; slot < EpSmallExpandedRig::kSlots; ++slot) {
      inputs.emplace_back(c, seed * EpSmallExpandedRig::kSlots + slot);
      rig.load(inputs[slot], slot);
      for (u32 rank = 0; rank < c.world; ++rank)
        rig.launch<kConfig>(rank, slot, seed);
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 slot = 0; slot < EpSmallExpandedRig::kSlots; ++slot)
      for (u32 rank = 0; rank < c.world; ++rank) {
        ASSERT_NO_FATAL_FAILURE(
            EpReference(c, inputs[slot]).check(rank, rig.rig().delivered(rank, slot)))
            << "slot " << slot;
        if (!rig.copies(rank, seed)) continue;
        ASSERT_NO_FATAL_FAILURE(rig.check(rank, slot)) << "slot " << slot << " rank " << rank;
      }
  }
}

// Four layouts share the seeds of a world.
TEST(EpSmallExpanded, EveryWorldUnderSixteenSchedules) {
  for (const u32 world : {1u, 2u, 3u, 4u, 5u, 8u})
    for (u32 v = 0; v < 4; ++v)
      ASSERT_NO_FATAL_FAILURE(under_seeds<kSmallPlain>(
          {.world = world,
           .experts = 2 * world + 3,
           .top_k = 4,
           .max_tokens = world > 3 ? 5u : 11u,
           .row_bytes = 144,
           .scale_bytes = 12,
           .scales_by_column = v % 2 != 0,
           .blocks = {2, 1}},
          {.masked = v / 2 != 0, .scales_by_column = v == 1 || v == 2, .copy_blocks = 3}, 1 + v,
          4));
}
TEST(EpSmallExpanded, ThirtyTwoRanks) {
  under_seeds<kOneWarp>({.world = 32,
                         .experts = 50,
                         .top_k = 8,
                         .max_tokens = 2,
                         .row_bytes = 16,
                         .scale_bytes = 4,
                         .blocks = {1}},
                        {});
}

}  // namespace
}  // namespace crossdock::testing
