// Expert parallelism: who owns which expert, how a rank's tokens are dealt to its blocks, the
// symmetric areas that dispatch and combine use, and the state a rank keeps between launches.
// Plain data and constexpr functions, shared by host, kernels and twin.
//
// Words used: a *source* sends tokens, a *destination* is a rank that owns experts they chose. A
// *row* is a token at a destination; rows are ordered by source rank, then by token. A *slot* is a
// piece of the window that holds the rows of one dispatch.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_mask.cuh>
#include <crossdock/layout/fault.cuh>
#include <crossdock/layout/sync.cuh>

namespace crossdock::device {

inline constexpr u32 kEpMaxRanks = 32;    // a token's destinations are one bit mask
inline constexpr u32 kEpMaxBlocks = 160;  // of a launch on one rank
inline constexpr u32 kEpMaxSlots = 16;
inline constexpr u32 kEpMaxTopK = 32;
inline constexpr u32 kEpMaxExperts = 1u << 16;
inline constexpr u32 kNoRow = 0xffffffffu;
inline constexpr u32 kNoSlot = 0xffffffffu;
// Rows are cut between lines of memory: parts that began inside a sector of 32 bytes were pulled at
// two thirds of the rate (docs/design/ep.md, "Figures").
inline constexpr u32 kEpLine = 128;
// Bytes of a part where a row is cut into at most `parts`; the last may be shorter.
CROSSDOCK_HOST_DEVICE constexpr u32 ep_part_bytes(u32 row_bytes, u32 parts) {
  return round_up(ceil_div(row_bytes, parts), kEpLine);
}

// Experts are dealt to ranks in contiguous ranges, the first ranks one more than the last where
// they do not divide.
struct EpExperts {
  u32 experts;
  u32 extra;       // ranks with one expert more
  u32 boundary;    // the first expert of the ranks with fewer
  u32 fewer;       // experts of those ranks
  u64 inverse[2];  // of fewer + 1 and of fewer: ceil(2^32 / n)

  CROSSDOCK_HOST_DEVICE static constexpr EpExperts make(u32 experts, u32 world) {
    EpExperts out{};
    out.experts = experts;
    out.fewer = experts / world;
    out.extra = experts % world;
    out.boundary = out.extra * (out.fewer + 1);
    out.inverse[0] = ceil_div(u64{1} << 32, u64{out.fewer} + 1);
    out.inverse[1] = out.fewer == 0 ? 0 : ceil_div(u64{1} << 32, u64{out.fewer});
    return out;
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 owner(u32 expert) const {
    return expert < boundary ? static_cast<u32>(expert * inverse[0] >> 32)
                             : extra + static_cast<u32>((expert - boundary) * inverse[1] >> 32);
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 first(u32 rank) const {
    return rank <= extra ? rank * (fewer + 1) : boundary + (rank - extra) * fewer;
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 count(u32 rank) const { return fewer + (rank < extra); }
  // The most experts any rank has.
  CROSSDOCK_HOST_DEVICE constexpr u32 most() const { return fewer + (extra != 0); }
};

// A rank's tokens in contiguous pieces, one per block, each in groups of 32.
struct EpTokens {
  u32 tokens;
  u32 blocks;
  u32 per_block;
  u32 groups;  // of a block

  CROSSDOCK_HOST_DEVICE static constexpr EpTokens make(u32 tokens, u32 blocks) {
    const u32 per_block = ceil_div(tokens, blocks);
    return {tokens, blocks, per_block, ceil_div(per_block, kWarpSize)};
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 first(u32 block) const {
    return min_of(block * per_block, tokens);
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 count(u32 block) const {
    return min_of(per_block, tokens - first(block));
  }
  // The last block with tokens; the first when there are none.
  CROSSDOCK_HOST_DEVICE constexpr u32 last_block() const {
    return tokens == 0 ? 0 : (tokens - 1) / per_block;
  }
  // The most words of a routing table that tokens of any number up to `tokens` need.
  CROSSDOCK_HOST_DEVICE static constexpr u64 most_routes(u32 tokens, u32 blocks, u32 world) {
    return u64{blocks} * ceil_div(max_of(ceil_div(tokens, blocks), 1u), kWarpSize) * world;
  }
};

// A word of the routing table, for a group of 32 tokens and a destination: which of the tokens go
// there, and the row of the first of them. [block][group][world].
struct alignas(8) EpRoute {
  u32 tokens;
  u32 row;

  // The row of the group's token `lane`, or kNoRow.
  CROSSDOCK_DEVICE u32 row_of(u32 lane) const {
    const u32 before = popcount(tokens & ((1u << lane) - 1));
    return (tokens >> lane & 1u) != 0 ? row + before : kNoRow;
  }
};

// Counts of four destinations travel in one tagged word, 12 bits each.
inline constexpr u32 kEpCountBits = 12;
inline constexpr u32 kEpMaxTokensPerBlock = (1u << kEpCountBits) - 2;
// Instead of counts, an end or an output: the rank has given up, because of `culprit` (abort_word).
inline constexpr u64 kEpGivenUp = u64{0xfffffffff} << 12;
CROSSDOCK_HOST_DEVICE constexpr u64 ep_given_up(u32 culprit) {
  return kEpGivenUp | abort_word(culprit);
}
CROSSDOCK_HOST_DEVICE constexpr bool ep_is_given_up(u64 value) {
  return (value & kEpGivenUp) == kEpGivenUp;
}
CROSSDOCK_HOST_DEVICE constexpr u32 ep_culprit(u64 value) {
  return abort_peer(static_cast<u32>(value & ~kEpGivenUp));
}
// An end's source reuses the routing of an earlier dispatch, so has counted nothing.
inline constexpr u64 kEpReused = u64{1} << 40;
// Words per block and source: a power of two, so that the words of a warp fall on fixed lanes.
CROSSDOCK_HOST_DEVICE constexpr u32 ep_quads(u32 world) {
  return world <= 4 ? 1 : world <= 8 ? 2 : world <= 16 ? 4 : 8;
}

// Offsets in every rank's window. [2] is the parity of the epoch.
struct EpAreas {
  u64 counts;   // [2][source][most_blocks][quads] tagged words
  u64 ends;     // [2][source] tagged words: the end of the source's rows here
  u64 outputs;  // [2][destination] announced words: where its rows go, an offset
  // Without masks. Both grow from launch to launch, so nobody may be left out of one.
  u64 arrivals;       // [source] padded words: blocks whose rows have all arrived
  u64 expert_totals;  // [2][local expert]: selections that arrived, in all epochs of the parity
  // With masks. Both carry their epoch, so a rank that comes back needs nothing made up for.
  u64 block_flags;    // [source][most_blocks] epochs: the rows of the block have arrived
  u64 block_experts;  // [2][source][most_blocks][local expert] epoch words: the block's selections
  u64 inputs;         // [2][destination] announced words: where its expert outputs are, an offset
  u64 pulled;         // [source] padded words: blocks that have read all they need
  u32 most_blocks;    // of any rank
  u32 most_experts;   // of any rank
};
CROSSDOCK_HOST_DEVICE constexpr EpAreas add_ep(SymmetricLayout& layout, u32 world, u32 experts,
                                               u32 most_blocks, bool masks = false) {
  EpAreas out{};
  out.most_blocks = most_blocks;
  out.most_experts = EpExperts::make(experts, world).most();
  out.counts = layout.add("ep.counts", u64{2} * world * most_blocks * ep_quads(world) * 8);
  out.ends = layout.add("ep.ends", u64{2} * world * 8);
  out.outputs = layout.add("ep.outputs", u64{2} * world * 8);
  if (masks) {
    const u64 blocks = u64{world} * most_blocks;
    out.block_flags = layout.add("ep.block_flags", blocks * 4);
    out.block_experts = layout.add("ep.block_experts", 2 * blocks * out.most_experts * 8);
  } else {
    out.arrivals = layout.add("ep.arrivals", u64{world} * sizeof(PaddedWord));
    out.expert_totals = layout.add("ep.expert_totals", u64{2} * out.most_experts * 4);
  }
  out.inputs = layout.add("ep.inputs", u64{2} * world * 8);
  out.pulled = layout.add("ep.pulled", u64{world} * sizeof(PaddedWord));
  return out;
}

// What a rank keeps between launches, in its device memory; zero before the first launch and after
// a reset.
struct EpState {
  EpochState dispatch;
  EpochState combine;
  PaddedWord pool[2];          // tokens taken out of the common pool, by parity
  PaddedWord tickets[2];       // tokens taken by combine, by parity
  PaddedWord send_tickets[2];  // rows taken by those that push, by parity
  u32 arrived[kEpMaxRanks];    // without masks: blocks of each source, of all epochs so far
  u32 pulled[kEpMaxRanks];     // blocks that will have pulled from here after the last combine
  // `pulled` at which the slot's input is free again; the last is the transit.
  u32 free_at[kEpMaxSlots + 1][kEpMaxRanks];
  u32 verdicts[kEpMaxRanks];  // of combine with late masks: 2 * epoch, and 1 if the rank came
  u32 routed[kEpMaxBlocks];   // the epoch for which a block's routes are complete
};

// Totals of 32 bits are compared by their distance, which must stay below 2^31. So what a slot that
// is seldom used asks for follows the total, every kEpFollowEvery combines: what was pulled that
// long ago has been read, since all ranks have used other slots again meanwhile.
inline constexpr u32 kEpFollowEvery = 1u << 20;
CROSSDOCK_HOST_DEVICE constexpr u32 ep_followed(u32 at, u32 total) {
  constexpr u32 kFurthest = 1u << 30;
  return total - at > kFurthest ? total - kFurthest : at;
}
static_assert(u64{kEpFollowEvery} * kEpMaxBlocks < 1u << 30);

// When an input block is free to be written again: `at` [world] is what the words of `pulled`
// (EpAreas) must have reached. Null: it is free.
struct EpFree {
  u64 pulled;
  const u32* at;
  EpMasking masking;
};

}  // namespace crossdock::device
