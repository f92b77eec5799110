// Rounds of dispatch, experts and combine in the twin, all queued at once. Test code; one thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ep_rig.hpp"

namespace crossdock::testing {

// Rounds of dispatch, experts, combine in alternating slots, all queued at once.
struct Rounds {
  static constexpr u32 kRounds = 4;
  const EpCase c;
  EpRig rig;
  std::vector<u8*> outputs;  // [round][rank]

  explicit Rounds(const EpCase& of, bool table = false) : c(of), rig(of, table) {
    for (u32 round = 0; round < kRounds; ++round)
      for (u32 rank = 0; rank < c.world; ++rank)
        outputs.push_back(rig.ranks().local<u8>(rank, u64{c.max_tokens} * c.combine_bytes + 16));
  }
  template <EpCombineConfig kConfig>
  void launch(u32 rank, u32 parts_per_ticket) {
    for (u32 round = 0; round < kRounds; ++round) {
      rig.launch<kPlain>(rank, round);
      rig.launch_experts(rank, round, round);
      if (parts_per_ticket != 0) rig.combined(rank, round).parts.per_ticket = parts_per_ticket;
      rig.launch_combine<kConfig>(rank, round, outputs[round * c.world + rank]);
    }
  }
  // One rank dispatches and does not combine: all others name it, and after a reset all is well.
  template <EpCombineConfig kConfig>
  void check_missing_rank(u32 seed) {
    const u32 missing = seed % c.world;
    rig.load(EpInputs(c, seed), 0);
    rig.launch_all<kPlain>(0);
    for (u32 rank = 0; rank < c.world; ++rank) {
      rig.launch_experts(rank, 0, 0);
      if (rank != missing) rig.launch_combine<kConfig>(rank, 0, outputs[rank]);
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run(fault_schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank) {
      if (rank == missing) continue;
      SCOPED_TRACE("seed " + std::to_string(seed) + " rank " + std::to_string(rank));
      expect_fault(rig.ranks().fault(rank), KernelId::kEpCombine, Phase::kEpochWord, rank, missing);
    }
    rig.reset();
    ASSERT_NO_FATAL_FAILURE(run_and_check<kConfig>(seed, 0));
  }
  template <EpCombineConfig kConfig = kPull>
  void run_and_check(u32 seed, u32 parts_per_ticket) {
    std::vector<EpInputs> inputs;
    for (u32 turn = 0; turn < EpRig::kTurns; ++turn) {
      inputs.emplace_back(c, seed * EpRig::kTurns + turn);
      rig.load(inputs[turn], turn);
    }
    for (u32 rank = 0; rank < c.world; ++rank)
      launch<kConfig>(rank, parts_per_ticket);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 round = 0; round < kRounds; ++round)
      for (u32 rank = 0; rank < c.world; ++rank) {
        const EpReference reference(c, inputs[round % EpRig::kTurns]);
        ASSERT_NO_FATAL_FAILURE(
            reference.check_combined(rank, outputs[round * c.world + rank], round))
            << "seed " << seed;
        if (round < kRounds - EpRig::kTurns || !c.combine_weights) continue;
        ASSERT_NO_FATAL_FAILURE(
            reference.check_weights(rank, rig.combined(rank, round).output.weights));
      }
  }
};

}  // namespace crossdock::testing
