// Ranks that are let in again, in the twin, on all paths: with no host in between, with one of the
// two far ahead of the other, after being late; and planted bugs in what is made up for.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "ep_small_rig.hpp"
#include "planted_bugs.hpp"

namespace crossdock::testing {
namespace {

// In a rank's stream: until `word` has that tag, or `counter` that value. One thread.
struct EpGateParams {
  const u64* word;
  u32 tag;
  const u32* counter;
  u32 value;
};
void gate(const EpGateParams& p) {
  if (thread_index() != 0) return;
  const auto open = [&] {
    if (p.word != nullptr) return ptx::ld_acquire_sys(p.word) >> 48 == (p.tag & 0xffffu);
    return static_cast<i32>(ptx::ld_acquire_sys(p.counter) - p.value) >= 0;
  };
  while (!open())
    ptx::spin("gate");
}
struct EpOpenParams {
  u32* counter;  // of another rank
};
void open_gate(const EpOpenParams& p) {
  if (thread_index() == 0) ptx::st_release_sys(p.counter, 1u);
}

EpCase comeback_case(u32 tokens) {
  return {.world = 3,
          .experts = 7,
          .top_k = 3,
          .max_tokens = tokens,
          .combine_bytes = 208,
          .combine_weights = false,
          .blocks = {2, 3},
          .fixed = true};
}

struct LargePath {
  using Rig = EpRig;
  static constexpr u32 kTokens = 12;
  static void dispatch(Rig& rig, u32 rank, u32 round) { rig.launch<kPlain>(rank, round); }
  static void combine(Rig& rig, u32 rank, u32 round, u8* rows) {
    rig.launch_combine<kPull>(rank, round, rows);
  }
  // What `rank` gets from `peer` as soon as that has let it in and begun with dispatch `round`: the
  // counts of its second block.
  static EpGateParams begun(Rig& rig, u32 rank, u32 peer, u32 round) {
    const EpDispatchParams& p = rig.params(rank, 0);
    const u32 epoch = round + 1;
    const u64 source = u64{epoch & 1u} * p.view.world + peer;
    const u64 word = (source * p.areas.most_blocks + 1) * ep_quads(p.view.world);
    return {rig.ranks().window<u64>(rank, p.areas.counts) + word, epoch, nullptr, 0};
  }
};
struct SmallPath {
  using Rig = EpSmallRig;
  static constexpr u32 kTokens = 12;
  static void dispatch(Rig& rig, u32 rank, u32 round) { rig.launch<kSmallPlain>(rank, round); }
  static void combine(Rig& rig, u32 rank, u32 round, u8* rows) {
    rig.launch_combine(rank, round, rows);
  }
  static EpGateParams begun(Rig& rig, u32 rank, u32 peer, u32 round) {
    const u32* word = rig.ranks().window<u32>(rank, rig.params(rank, round).areas.free) + peer;
    return {nullptr, 0, word, round / EpSmallRig::kSlots};
  }
};
struct Packets : SmallPath {
  static constexpr u32 kTokens = 4;
  static void dispatch(Rig& rig, u32 rank, u32 round) { rig.launch_packets<false>(rank, round); }
  static void combine(Rig& rig, u32 rank, u32 round, u8* rows) {
    rig.launch_packet_combine(rank, round, rows);
  }
};

// Rounds of all ranks, all queued at once. In those that `apart` has a bit for ranks 0 and 1 mask
// each other; rank 2 sees both.
template <class Path>
struct Comeback {
  static constexpr u32 kRounds = 7;
  EpCase c = comeback_case(Path::kTokens);
  typename Path::Rig rig{c};
  std::vector<u8*> outputs;  // [round][rank]
  u32 apart;
  u32 behind = kNoPeer;  // it comes back when the other is already there
  u32 so_far = 0;        // uses of each slot; of few tokens by flags

  explicit Comeback(u32 rounds_apart) : apart(rounds_apart) {
    for (u32 i = 0; i < kRounds * c.world; ++i)
      outputs.push_back(
          rig.ranks().template local<u8>(i % c.world, u64{c.max_tokens} * c.combine_bytes + 16));
  }
  [[nodiscard]] bool is_apart(u32 round) const { return (apart >> round & 1u) != 0; }
  void launch(u32 rank, u32 round) {
    if (rank < 2) {
      const u32 peer = 1 - rank;
      const bool back = round != 0 && is_apart(round - 1) && !is_apart(round);
      if (back && rank == behind)
        rig.ranks().launch(rank, {1, 32, 0, "gate"}, gate, Path::begun(rig, rank, peer, round));
      rig.launch_mask(rank, is_apart(round) ? 1u << peer : 0, 1u << peer);
    }
    Path::dispatch(rig, rank, round);
    rig.launch_experts(rank, round, round);
    Path::combine(rig, rank, round, outputs[round * c.world + rank]);
  }
  void run_and_check(u32 seed) {
    rig.reset();
    if constexpr (std::is_same_v<Path, SmallPath>) rig.used_so_far(so_far);
    std::vector<EpInputs> inputs;
    for (u32 slot = 0; slot < 2; ++slot) {
      inputs.emplace_back(c, 2 * seed + slot);
      rig.load(inputs[slot], slot);
    }
    for (u32 rank = 0; rank < c.world; ++rank)
      for (u32 round = 0; round < kRounds; ++round)
        launch(rank, round);
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
    for (u32 round = 0; round < kRounds; ++round)
      for (u32 rank = 0; rank < c.world; ++rank) {
        SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
        const EpInputs& all = inputs[round % 2];
        const EpInputs seen = rank < 2 && is_apart(round) ? all.without(1 - rank) : all;
        const EpReference reference(c, seen);
        ASSERT_NO_FATAL_FAILURE(
            reference.check_combined(rank, outputs[round * c.world + rank], round));
        if (round + 2 < kRounds) continue;
        ASSERT_NO_FATAL_FAILURE(reference.check(rank, rig.delivered(rank, round)));
      }
  }
};

template <class Path>
void comes_back() {
  // One round, rounds in a row, the first ones, those of one slot only.
  for (const u32 apart : {0b0000100u, 0b0011110u, 0b0000011u, 0b0010101u}) {
    Comeback<Path> rounds(apart);
    for (u32 seed = 1; seed <= kEpSeeds; seed += 4)
      ASSERT_NO_FATAL_FAILURE(rounds.run_and_check(seed)) << "apart " << apart;
  }
}
TEST(EpComeback, OfManyTokens) {
  comes_back<LargePath>();
}
TEST(EpComeback, OfFewTokens) {
  comes_back<SmallPath>();
}
// Uses of a slot are compared by their distance, which is half of all numbers here.
TEST(EpComeback, OfFewTokensAfterMonths) {
  for (const u32 uses : {1u << 31, 3u << 30, ~0u - 1}) {
    SCOPED_TRACE("uses " + std::to_string(uses));
    Comeback<SmallPath> rounds(0b0011110u);
    rounds.so_far = uses;
    ASSERT_NO_FATAL_FAILURE(rounds.run_and_check(1));
  }
}
TEST(EpComeback, InPackets) {
  comes_back<Packets>();
}

// One of the two lets the other in, and begins, when the other is still far behind.
template <class Path>
void comes_back_later() {
  for (const u32 apart : {0b0000100u, 0b0011110u}) {
    Comeback<Path> rounds(apart);
    for (u32 seed = 1; seed <= kEpSeeds; seed += 4)
      for (const u32 behind : {0u, 1u}) {
        rounds.behind = behind;
        ASSERT_NO_FATAL_FAILURE(rounds.run_and_check(seed)) << "behind: rank " << behind;
      }
  }
}
TEST(EpComeback, OfManyTokensAfterTheOtherHasBegun) {
  comes_back_later<LargePath>();
}
TEST(EpComeback, OfFewTokensAfterTheOtherHasBegun) {
  comes_back_later<SmallPath>();
}
TEST(EpComeback, InPacketsAfterTheOtherHasBegun) {
  comes_back_later<Packets>();
}

// Rank 1 comes when rank 0 has masked it and gone on: it must not take what rank 0 has told the
// others for rows of its own.
template <class Path>
void comes_too_late() {
  constexpr u32 kLast = 2;  // the first one in which slots have to be told to be free
  for (u32 seed = 1; seed <= kEpSeeds; ++seed) {
    const EpCase c = comeback_case(Path::kTokens);
    typename Path::Rig rig(c);
    rig.mask_late();
    const EpInputs all(c, seed);
    rig.load(all, 0);
    rig.load(all, 1);
    auto* opened = rig.ranks().template local<u32>(1, 1);
    for (u32 rank = 0; rank < c.world; ++rank)
      for (u32 round = 0; round <= kLast; ++round) {
        if (rank == 1 && round == kLast)
          rig.ranks().launch(1, {1, 32, 0, "gate"}, gate, {nullptr, 0, opened, 1});
        Path::dispatch(rig, rank, round);
        if (rank == 0 && round == kLast)
          rig.ranks().launch(0, {1, 32, 0, "open"}, open_gate, EpOpenParams{opened});
      }
    ASSERT_NO_FATAL_FAILURE(rig.ranks().run_clean(fault_schedule(seed)));
    EXPECT_NE(rig.mask(0).ranks & 2u, 0u);
    for (u32 rank = 0; rank < 2; ++rank) {
      const bool without = (rig.mask(rank).ranks >> (1 - rank) & 1u) != 0;
      EpInputs seen = without ? all.without(1 - rank) : all;
      if ((rig.mask(rank).ranks & 4u) != 0) seen = seen.without(2);
      ASSERT_NO_FATAL_FAILURE(EpReference(c, seen).check(rank, rig.delivered(rank, kLast)))
          << "seed " << seed << " rank " << rank;
    }
  }
}
TEST(EpComeback, ALateRankOfManyTokensTakesNoRowsThatWereNotSent) {
  comes_too_late<LargePath>();
}
TEST(EpComeback, ALateRankOfFewTokensTakesNoRowsThatWereNotSent) {
  comes_too_late<SmallPath>();
}

// ---- planted bugs -------------------------------------------------------------------------------

template <class Path>
std::string failure_of(MaskBug bug, u64 seed) {
  Comeback<Path> rounds(0b0001100u);
  g_mask_bug = bug;
  const std::string failure = first_failure([&] { rounds.run_and_check(static_cast<u32>(seed)); });
  g_mask_bug = MaskBug::kNone;
  return failure;
}
TEST(EpComebackMutation, PullsThatAreNotMadeUpForAreMissed) {
  expect_found("nothing_made_up",
               [](u64 seed) { return failure_of<LargePath>(MaskBug::kNothingMadeUp, seed); });
}
TEST(EpComebackMutation, SlotsThatAreNotToldToBeFreeAreMissed) {
  expect_found("nothing_released",
               [](u64 seed) { return failure_of<SmallPath>(MaskBug::kNothingReleased, seed); });
}

}  // namespace
}  // namespace crossdock::testing
