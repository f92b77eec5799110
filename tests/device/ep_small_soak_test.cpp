// A long run of few tokens in the twin with no host in between: dispatches and combines by flags,
// in packets and in halves, in the two slots in turns, some without a combine; every rank is held
// up now and then. What a dispatch has delivered is kept, then its slot is poisoned in the stream,
// as is what the experts had left there; everything is compared afterwards.
// SPDX-License-Identifier: Apache-2.0
#include <random>

#include "ep_small_rig.hpp"

namespace crossdock::testing {
namespace {

// In a rank's stream: a copy of bytes that are overwritten with poison then. One block.
struct EpTakeParams {
  u8* from;
  u8* to;  // null: only poison
  u64 bytes;
};
void take_and_poison(const EpTakeParams& p) {
  for (u64 i = thread_index(); i < p.bytes / 4; i += block_size()) {
    auto* word = reinterpret_cast<u32*>(p.from) + i;
    if (p.to != nullptr) ptx::st_weak(reinterpret_cast<u32*>(p.to) + i, ptx::ld_weak(word));
    ptx::st_weak(word, 0xeeeeeeeeu);
  }
}
// Holds the rank up. One thread.
struct EpDelayParams {
  u32* words;
  u32 turns;
};
void delay(const EpDelayParams& p) {
  for (u32 i = 0; i < p.turns; ++i)
    ptx::st_weak(p.words + i % 64, i);
}

// What a round has been given and has left, at all ranks.
struct Round {
  EpCase c;
  EpInputs inputs;
  bool combines;
  bool packets;
  bool halves;
  std::vector<u8*> blocks = {};
  std::vector<EpDispatchResult> results = {};
  std::vector<u8*> outputs = {};
};

class Soak {
 public:
  using Half = EpSmallRig::Half;
  static constexpr u32 kTokens = 10;

  explicit Soak(u32 world, u32 seed) : case_(make_case(world)), rig_(case_), random_(seed) {}

  // Two batches: both are dispatched before the rows of the first are looked at. Without combines
  // nothing but the words of the slots keeps a rank from the slot that another still reads.
  void queue(u32 number) {
    const bool combines = number == 0 || random_() % 2 == 0;
    for (u32 n = number; n < number + 2; ++n)
      rounds_.push_back(make_round(n, combines));
    for (u32 rank = 0; rank < case_.world; ++rank) {
      for (u32 n = number; n < number + 2; ++n)
        dispatch(rank, n);
      for (u32 n = number; n < number + 2; ++n)
        finish(rank, n);
    }
  }
  void run_and_check(u32 seed) {
    ASSERT_NO_FATAL_FAILURE(rig_.ranks().run_clean(schedule(seed)));
    for (u32 number = 0; number < rounds_.size(); ++number)
      for (u32 rank = 0; rank < case_.world; ++rank) {
        SCOPED_TRACE("round " + std::to_string(number));
        const Round& round = rounds_[number];
        const EpReference reference(round.c, round.inputs);
        ASSERT_NO_FATAL_FAILURE(
            reference.check(rank, {round.blocks[rank], round.results[rank].source_ends,
                                   round.results[rank].expert_counts}));
        if (!round.combines) continue;
        ASSERT_NO_FATAL_FAILURE(reference.check_combined(rank, round.outputs[rank], number));
      }
  }

 private:
  static EpCase make_case(u32 world) {
    return {.world = world,
            .experts = 2 * world + 3,
            .max_tokens = kTokens,
            .row_bytes = 48,
            .scale_bytes = 12,
            .combine_bytes = 112,
            .combine_weights = false,
            .blocks = {2, 1},
            .fixed = true};
  }
  static std::vector<Half> halves_of(bool halves) {
    return halves ? std::vector<Half>{Half::kSend, Half::kReceive} : std::vector<Half>{Half::kBoth};
  }
  Round make_round(u32 number, bool combines) {
    EpCase c = case_;
    c.tokens.clear();
    for (u32 rank = 0; rank < c.world; ++rank)
      c.tokens.push_back(static_cast<u32>(random_() % (kTokens + 1)));
    return {c, EpInputs(c, number), combines, random_() % 2 == 0, random_() % 3 == 0};
  }
  void dispatch(u32 rank, u32 number) {
    Round& round = rounds_[number];
    give(round, rank, number);
    if (random_() % 4 == 0) hold_up(rank);
    for (const Half half : halves_of(round.halves)) {
      if (round.packets) rig_.launch_packets<false>(rank, number, half);
      if (!round.packets) rig_.launch<kSmallPlain>(rank, number, half);
    }
  }
  void finish(u32 rank, u32 number) {
    const Round& round = rounds_[number];
    // What the slot's input held has been read by all when a dispatch has come after it.
    const EpCombineParams& combine = rig_.combined(rank, number);
    u8* input = rig_.ranks().window<u8>(rank, combine.input_offset);
    rig_.ranks().launch(rank, {1, 32, 0, "poison"}, take_and_poison,
                        EpTakeParams{input, nullptr, combine.input.bytes});
    rig_.launch_experts(rank, number, number);
    if (random_() % 4 == 0) hold_up(rank);
    rig_.ranks().launch(
        rank, {1, 32, 0, "take"}, take_and_poison,
        EpTakeParams{rig_.output(rank, number), round.blocks[rank], case_.output().bytes});
    if (!round.combines) return;
    for (const Half half : halves_of(round.halves && round.packets)) {
      if (round.packets) rig_.launch_packet_combine(rank, number, round.outputs[rank], half);
      if (!round.packets) rig_.launch_combine(rank, number, round.outputs[rank]);
    }
  }
  // Memory of the round's own for all that the host would give and look at.
  void give(Round& round, u32 rank, u32 number) {
    Ranks& ranks = rig_.ranks();
    EpSmallParams& p = rig_.params(rank, number);
    const EpTokensIn& in = round.inputs.of(rank);
    p.input.rows = ranks.local<u8>(rank, in.rows.size() + 16);
    p.input.scales = ranks.local<u8>(rank, in.scales.size() + 16);
    p.input.ids = ranks.local<u64>(rank, in.ids.size() + 1);
    p.input.weights = ranks.local<float>(rank, in.weights.size() + 1);
    put_tokens(round.c, in, p.input);
    p.tokens = in.tokens;
    p.send_blocks = std::min(in.tokens, case_.blocks_of(rank));
    p.result.source_ends = ranks.local<u32>(rank, case_.world);
    p.result.expert_counts = ranks.local<u32>(rank, case_.expert_map().most() + 1);
    round.results.push_back(p.result);
    round.blocks.push_back(ranks.local<u8>(rank, case_.output().bytes));
    round.outputs.push_back(ranks.local<u8>(rank, u64{kTokens} * case_.combine_bytes));
  }
  void hold_up(u32 rank) {
    const EpDelayParams p{rig_.ranks().local<u32>(rank, 64),
                          1 + static_cast<u32>(random_() % 3000)};
    rig_.ranks().launch(rank, {1, 1, 0, "delay"}, delay, p);
  }

  EpCase case_;
  EpSmallRig rig_;
  std::mt19937 random_;
  std::vector<Round> rounds_;
};

TEST(EpSmallSoak, PoisonAndDelaysHarmNobody) {
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Soak soak(2 + seed % 3, seed);
    for (u32 number = 0; number < 20; number += 2)
      soak.queue(number);
    ASSERT_NO_FATAL_FAILURE(soak.run_and_check(seed));
  }
}

}  // namespace
}  // namespace crossdock::testing
