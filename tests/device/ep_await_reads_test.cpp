// ep_await_reads in the twin, in every world: one dispatch of few tokens combined again and again,
// all queued at once, with the input written anew in between by those ranks that like to.
// SPDX-License-Identifier: Apache-2.0
#include <crossdock/kernel/ep_await_reads.cuh>

#include "ep_small_rig.hpp"

namespace crossdock::testing {
namespace {

constexpr u32 kCombines = 4;

// Who writes nothing anew has its rows of an earlier combine added up, and tells by its next
// combine that it has read.
bool writes(u32 rank, u32 combine, u32 seed) {
  return combine == 0 || seed % 2 == 0 || (rank + combine + seed) % 3 != 0;
}
u32 written_by(u32 rank, u32 combine, u32 seed) {
  while (!writes(rank, combine, seed))
    --combine;
  return combine;
}

void launch_await(EpSmallRig& rig, u32 rank) {
  const EpCombineParams& c = rig.combined(rank, 0);
  const EpAwaitReadsParams p{.common = rig.ranks().common(rank, KernelId::kEpReduceRows),
                             .view = c.view,
                             .areas = rig.params(rank, 0).areas,
                             .state = c.state,
                             .masking = c.masking};
  rig.ranks().launch(rank, {1, kWarpSize, 0, "ep_await_reads", true},
                     kernel::ep_await_reads<EpAwaitReadsConfig{kWarpSize}>, p);
}

void combine_again(EpSmallRig& rig, const std::vector<u8*>& outputs, bool packets, u32 seed) {
  const EpCase& c = rig.of();
  const EpInputs inputs(c, seed);
  rig.load(inputs, 0);
  for (u32 rank = 0; rank < c.world; ++rank) {
    if (packets) rig.launch_packets<false>(rank, 0);
    if (!packets) rig.launch<kSmallPlain>(rank, 0);
    for (u32 i = 0; i < kCombines; ++i) {
      if (writes(rank, i, seed)) {
        // The first time the dispatch has waited for the readers.
        if (i != 0 && !packets) launch_await(rig, rank);
        rig.launch_experts(rank, 0, i);
      }
      u8* rows = outputs[i * c.world + rank];
      if (packets) rig.launch_packet_combine(rank, 0, rows);
      if (!packets) rig.launch_combine(rank, 0, rows);
    }
  }
  ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
  for (u32 i = 0; i < kCombines; ++i)
    for (u32 rank = 0; rank < c.world; ++rank)
      for (u32 token = 0; token < inputs.of(rank).tokens; ++token)
        for (u32 v = 0; v < c.combine_bytes / 2; ++v) {
          float sum = 0;
          for (u32 d = 0; d < c.world; ++d)
            if (inputs.goes_to(rank, token, d))
              sum += from_bf16(expert_value(d, rank, token, v, written_by(d, i, seed)));
          const auto* got = reinterpret_cast<const u16*>(outputs[i * c.world + rank]);
          ASSERT_EQ(got[u64{token} * (c.combine_bytes / 2) + v], bf16_of(sum))
              << "combine " << i << " rank " << rank << " token " << token << " value " << v;
        }
}

void every_world(bool packets) {
  for (const u32 world : {1u, 2u, 3u, 4u, 5u, 8u, 32u}) {
    EpSmallRig rig({.world = world,
                    .experts = 2 * world + 3,
                    .top_k = 4,
                    .max_tokens = world > 8 ? 1u : 6u,
                    .row_bytes = 16,
                    .combine_bytes = world > 8 ? 16u : 208u,
                    .combine_weights = false,
                    .blocks = {1},
                    .fixed = true});
    std::vector<u8*> outputs;
    for (u32 i = 0; i < kCombines * world; ++i)
      outputs.push_back(
          rig.ranks().local<u8>(i % world, u64{rig.of().max_tokens} * rig.of().combine_bytes + 16));
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      SCOPED_TRACE("world " + std::to_string(world) + " seed " + std::to_string(seed));
      ASSERT_NO_FATAL_FAILURE(combine_again(rig, outputs, packets, seed));
    }
  }
}
TEST(EpAwaitReads, OneDispatchCombinedAgainInEveryWorld) {
  every_world(false);
}
// Rows in packets are sent by the rank that writes them, in the order of its stream.
TEST(EpAwaitReads, InPacketsNothingHasToBeAwaited) {
  every_world(true);
}

}  // namespace
}  // namespace crossdock::testing
