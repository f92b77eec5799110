// Combines of few tokens whose rows travel compressed, in the twin, in every world: dispatch, rows
// made compressed, combine, all queued at once; every bit against the plain reference.
// SPDX-License-Identifier: Apache-2.0
#include <crossdock/kernel/ep_reduce_rows.cuh>

#include "ep_small_rig.hpp"
#include "support/ep_payload.hpp"

namespace crossdock::testing {
namespace {

template <EpPayload kPayload>
struct Compressed {
  static constexpr EpCombineConfig kCombine{.warps = 2,
                                            .stages = 2,
                                            .stage_bytes = 1408,  // a unit of two rows
                                            .small = true,
                                            .payload = static_cast<u32>(kPayload)};
  static constexpr EpReduceRowsConfig kPack{.warps = 2, .packs = true};
  const EpCase c;
  EpSmallRig rig;
  std::vector<u16*> rows;    // [rank], of the experts
  std::vector<u8*> outputs;  // [rank]

  explicit Compressed(const EpCase& of) : c(of), rig(c) {
    for (u32 rank = 0; rank < c.world; ++rank) {
      rows.push_back(
          rig.ranks().local<u16>(rank, u64{c.world} * c.max_tokens * c.combine_bytes / 2));
      outputs.push_back(rig.ranks().local<u8>(rank, u64{c.max_tokens} * c.combine_bytes));
    }
  }
  [[nodiscard]] u32 most_rows() const { return min_of(c.world, c.top_k); }
  // Compressed rows lie where those of bf16 would.
  [[nodiscard]] EpInputLayout packed(u32 rank, u32 slot) {
    EpInputLayout input = rig.combined(rank, slot).input;
    input.packed = input.rows;
    return ep_packed_input(input, kPayload);
  }
  void launch_pack(u32 rank, u32 slot) {
    const EpCombineParams& combine = rig.combined(rank, slot);
    const EpSmallParams& d = rig.params(rank, slot);
    EpReduceRowsParams p{};
    p.common = rig.ranks().common(rank, KernelId::kEpReduceRows);
    p.view = d.view;
    p.arrived = {.source_ends = d.result.source_ends,
                 .expert_counts = d.result.expert_counts,
                 .ids = nullptr,
                 .weights = nullptr,
                 .world = c.world,
                 .experts = c.expert_map().count(rank),
                 .top_k = c.top_k,
                 .stride = d.stride};
    p.outputs = reinterpret_cast<const u8*>(rows[rank]);
    p.output_stride = c.combine_bytes;
    p.input = rig.ranks().window<u8>(rank, combine.input_offset) + packed(rank, slot).rows;
    p.payload = kPayload;
    p.row_bytes = c.combine_bytes;
    rig.ranks().launch(rank, {1, kPack.warps * kWarpSize, 0, "ep_reduce_rows", true},
                       kernel::ep_reduce_rows<kPack>, p);
  }
  void launch_combine(u32 rank, u32 slot) {
    EpCombineParams p = rig.combined(rank, slot);
    p.tokens = EpTokens::make(rig.params(rank, slot).tokens, 1);
    p.input = packed(rank, slot);
    p.payload = kPayload;
    p.parts = EpParts::make(kCombine.stage_bytes, p.input.row_bytes, most_rows(), 1,
                            ep_payload_grain(kPayload, kCombine.stage_bytes, most_rows()));
    p.output.rows = outputs[rank];
    p.output.weights = nullptr;
    rig.ranks().launch(rank,
                       {c.blocks_of(rank), kCombine.threads(), ep_combine_shared(kCombine).bytes,
                        "ep_combine", true},
                       kernel::ep_combine<kCombine>, p);
  }
  void run_and_check(u32 seed) {
    const u32 slot = seed % EpSmallRig::kSlots;
    const EpInputs inputs(c, seed);
    const EpPayloadReference reference(c, inputs, static_cast<ep::Payload>(kPayload));
    rig.load(inputs, slot);
    for (u32 rank = 0; rank < c.world; ++rank) {
      const std::vector<u16> made = reference.expert_rows(rank, seed);
      std::copy(made.begin(), made.end(), rows[rank]);
      rig.launch<kSmallPlain>(rank, slot);
      launch_pack(rank, slot);
      launch_combine(rank, slot);
    }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(schedule(seed)));
    for (u32 rank = 0; rank < c.world; ++rank)
      ASSERT_NO_FATAL_FAILURE(reference.check(rank, outputs[rank], seed)) << "seed " << seed;
  }
};

template <EpPayload kPayload>
void every_world() {
  for (const u32 world : {1u, 2u, 3u, 4u, 5u, 8u, 32u}) {
    SCOPED_TRACE("world " + std::to_string(world));
    Compressed<kPayload> rounds({.world = world,
                                 .experts = 2 * world + 3,
                                 .top_k = 2,
                                 .max_tokens = world > 3 ? 1u : 3u,
                                 .row_bytes = 16,
                                 .combine_bytes = world > 3 ? 1024u : 2048u,
                                 .combine_weights = false,
                                 .blocks = {1},
                                 .fixed = true});
    for (u32 seed = 1; seed <= kEpSeeds; ++seed)
      ASSERT_NO_FATAL_FAILURE(rounds.run_and_check(seed));
  }
}
TEST(EpCompressedCombine, AsFp8InEveryWorld) {
  every_world<EpPayload::kFp8>();
}
TEST(EpCompressedCombine, AsLogarithmsInEveryWorld) {
  every_world<EpPayload::kLogFmt10>();
}

}  // namespace
}  // namespace crossdock::testing
