// Masks that change while a launch of the same rank runs beside, in the twin: nobody's is lost, and
// whatever a launch has of a rank it has all of, or nothing.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_rig.hpp"

namespace crossdock::testing {
namespace {

EpCase beside_case(u32 world) {
  return {.world = world,
          .experts = 4 * world,
          .top_k = 3,
          .max_tokens = 12,
          .combine_bytes = 208,
          .combine_weights = false,
          .blocks = {2},
          .fixed = true};
}

// In a stream of a rank: until all these flags of two sources have come. One thread.
struct FlagGateParams {
  const u32* flags;
  u32 count;
  u32 epoch;
};
void flag_gate(const FlagGateParams& p) {
  for (u32 i = 0; thread_index() == 0 && i < p.count; ++i)
    while (ptx::ld_acquire_sys(p.flags + i) != p.epoch)
      ptx::spin("flag gate");
}

TEST(EpMaskBeside, RanksMaskedSideBySideAreBothMasked) {
  EpRig rig(beside_case(4));
  for (u32 seed = 1; seed <= 4 * kEpSeeds; ++seed) {
    rig.reset();
    rig.launch_mask(0, 2, 2, 0);
    rig.launch_mask(0, 4, 4, 1);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    ASSERT_EQ(rig.mask(0).ranks, 6u) << "seed " << seed;
    // One is let in beside, and the other one stays what it is.
    rig.mask(0).late = 2;
    rig.launch_mask(0, 0, 4, 0);
    rig.launch_mask(0, 8, 8, 1);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    ASSERT_EQ(rig.mask(0).ranks, 10u) << "seed " << seed;
    ASSERT_EQ(rig.mask(0).late, 2u) << "seed " << seed;
  }
}

// Rank 1 is masked at rank 0 at any moment of a dispatch. Whatever is decided, ends, selections and
// what the host is told agree about it.
TEST(EpMaskBeside, ADispatchDecidesOnceWhoHasCome) {
  EpCase c = beside_case(3);
  c.experts = 40 * c.world;
  EpRig rig(c);
  rig.mask_late();
  u32 with = 0, without = 0;
  for (u32 seed = 1; seed <= 4 * kEpSeeds; ++seed) {
    rig.reset();
    const EpInputs all(c, seed);
    rig.load(all, 0);
    // When the last rows have come, and a little later.
    const EpDispatchParams& p = rig.params(0, 0);
    const u32* flags = rig.ranks().window<u32>(0, p.areas.block_flags) + p.areas.most_blocks;
    rig.ranks().launch(0, {1, 32, 0, "gate", false, 1}, flag_gate,
                       FlagGateParams{flags, 2 * p.areas.most_blocks, 1});
    for (u32 i = 0; i < seed % 8; ++i)
      rig.launch_mask(0, 0, 0, 1);  // nothing but time
    rig.launch_mask(0, 2, 2, 1);
    rig.launch_all<kPlain>(0);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
    const EpDispatchResult& result = rig.params(0, 0).result;
    const bool came = result.source_ends[1] != c.max_tokens;
    ++(came ? with : without);
    const EpInputs seen = came ? all : all.without(1);
    const EpReference reference(c, seen);
    ASSERT_NO_FATAL_FAILURE(reference.check(0, rig.delivered(0, 0)))
        << "seed " << seed << (came ? " came" : " left out");
    ASSERT_EQ(word_value(*result.host_rows), reference.rows_at(0)) << "seed " << seed;
  }
  EXPECT_GT(with, 0u);
  EXPECT_GT(without, 0u);
}

// Rank 0 tells where its rows end, and a block of it that the others wait for does not come. The
// host is told how many rows there are without it.
TEST(EpMaskBeside, TheHostIsNotToldOfRowsThatDoNotCount) {
  for (const u32 tokens : {12u, 70u}) {
    EpCase c = beside_case(3);
    c.max_tokens = tokens;
    c.blocks = {2, 3, 3};
    EpRig rig(c);
    rig.mask_late();
    for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
      rig.reset();
      const EpInputs all(c, seed);
      rig.load(all, 0);
      for (u32 rank = 1; rank < c.world; ++rank)
        rig.params(rank, 0).source_blocks[0] = 3;
      rig.launch_all<kPlain>(0);
      ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
      for (u32 rank = 0; rank < c.world; ++rank) {
        const EpInputs seen = rank == 0 ? all : all.without(0);
        const EpReference reference(c, seen);
        ASSERT_NO_FATAL_FAILURE(reference.check(rank, rig.delivered(rank, 0))) << "seed " << seed;
        const u64 told = *rig.params(rank, 0).result.host_rows;
        ASSERT_EQ(word_value(told), reference.rows_at(rank)) << "seed " << seed << " rank " << rank;
      }
    }
  }
}

// In a stream of a rank: until a peer has told that its input is there. One thread.
struct InputGateParams {
  const u64* word;
};
void input_gate(const InputGateParams& p) {
  while (thread_index() == 0 && ptx::ld_acquire_sys(p.word) >> 48 != 1)
    ptx::spin("input gate");
}
// Whether the sums of `rank` are those of `seen`.
bool sums_are(const EpCase& c, const EpInputs& seen, u32 rank, const u8* rows) {
  for (u32 token = 0; token < seen.of(rank).tokens; ++token)
    for (u32 i = 0; i < c.combine_bytes / 2; ++i) {
      float sum = 0;
      for (u32 d = 0; d < c.world; ++d)
        if (seen.goes_to(rank, token, d)) sum += from_bf16(expert_value(d, rank, token, i, 0));
      const u64 at = u64{token} * (c.combine_bytes / 2) + i;
      if (reinterpret_cast<const u16*>(rows)[at] != bf16_of(sum)) return false;
    }
  return true;
}
// Rank 1 is masked at rank 0 when it has told and rank 0 begins to add: its rows are in all sums,
// or in none, whichever warp has which parts of a token.
TEST(EpMaskBeside, ACombineHasAllRowsOfARankOrNone) {
  const EpCase c = beside_case(3);
  u32 with = 0, without = 0;
  for (u32 seed = 1; seed <= 8 * kEpSeeds; ++seed) {
    EpRig rig(c);
    rig.mask_late();
    const EpInputs all(c, seed);
    rig.load(all, 0);
    rig.launch_all<kPlain>(0);
    std::vector<u8*> outputs;
    for (u32 rank = 0; rank < c.world; ++rank) {
      outputs.push_back(rig.ranks().local<u8>(rank, u64{c.max_tokens} * c.combine_bytes));
      rig.launch_experts(rank, 0, 0);
      rig.combined(rank, 0).parts.per_ticket = 1;
      rig.launch_combine<kPull>(rank, 0, outputs[rank]);
    }
    const u64 word = rig.params(0, 0).areas.inputs + (c.world + 1) * sizeof(u64);  // of epoch 1
    rig.ranks().launch(0, {1, 32, 0, "gate", false, 1}, input_gate,
                       InputGateParams{rig.ranks().window<u64>(0, word)});
    for (u32 i = 0; i < seed % 16; ++i)
      rig.launch_mask(0, 0, 0, 1);  // nothing but time
    rig.launch_mask(0, 2, 2, 1);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
    const bool has_all = sums_are(c, all, 0, outputs[0]);
    const bool has_none = sums_are(c, all.without(1), 0, outputs[0]);
    with += has_all ? 1 : 0;
    without += has_none ? 1 : 0;
    ASSERT_TRUE(has_all || has_none) << "seed " << seed << ": a part of the rows of rank 1";
  }
  EXPECT_GT(with, 0u);
  EXPECT_GT(without, 0u);
}

}  // namespace
}  // namespace crossdock::testing
