// The warps of ep_combine: each takes tokens of this rank, loads their rows, and adds them up.
//
//   lane d owns rank d: its rows, and the bulk loads of them
//
//   issue   ticket -> token; routes -> rows; per part: one bulk load a row   -> full[stage]
//   add     wait full[stage]; bias + rows in order of their ranks, in fp32; bf16 to the output
//
// The order of the additions is that of the ranks, whatever arrives first: results are the same bit
// by bit in every run. Rows of few tokens may travel compressed (layout/ep_payload.cuh); then a
// part is whole units of theirs. A warp's first ticket is its number; the others are taken one at a
// time from one counter of the rank, ahead of their use.
//
// By pull the rows are loaded from where the experts have left them at each rank. By push they come
// here (ep/push_role.cuh): a row is loaded from this rank's staging once its flag is up; this
// rank's own from where its experts have left it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/masking.cuh>
#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/ep/add_packed.cuh>
#include <crossdock/ep/add_rows.cuh>
#include <crossdock/ep/wait_clock.cuh>
#include <crossdock/ptx/bulk.cuh>

namespace crossdock::device {

// Whether the rank of `verdict` belongs to the sums of this epoch: what the first thread that asks
// has found holds for all, so that no sum has a part of a row. Late masks only; by one thread.
CROSSDOCK_DEVICE bool ep_agree(u32* verdict, u32 epoch, bool came) {
  const u32 mine = epoch << 1 | (came ? 1u : 0u);
  u32 seen = ptx::ld_relaxed_gpu(verdict);
  while (seen >> 1 != mine >> 1) {
    const u32 before = ptx::cas_relaxed_gpu(verdict, seen, mine);
    if (before == seen) return came;
    seen = before;
  }
  return (seen & 1u) != 0;
}

// What a rank announces: where its input block is, and in the lowest bits how its rows travel.
struct EpInputWord {
  static constexpr u64 kPayloads = 3;
  u64 value;

  CROSSDOCK_HOST_DEVICE static constexpr EpInputWord make(u64 offset, EpPayload payload) {
    return {offset | static_cast<u64>(payload)};
  }
  CROSSDOCK_HOST_DEVICE constexpr u64 offset() const { return value & ~kPayloads; }
  CROSSDOCK_HOST_DEVICE constexpr EpPayload payload() const {
    return static_cast<EpPayload>(value & kPayloads);
  }
};

// Whether `rank` has announced rows of the format that this rank expects; else a fault.
CROSSDOCK_DEVICE bool ep_same_payload(const EpCombineParams& p, u32 rank, EpInputWord word) {
  if (word.payload() == p.payload) return true;
  raise_fault(p.common, {Phase::kShape, rank, p.input.row_bytes},
              ep_payload_bytes(word.payload(), p.payload, p.input.row_bytes), 0);
  return false;
}

// By a warp: until every rank has begun this epoch. `input`: where the rows of the lane's rank are,
// or null: it is left out. `waits`: where the times are added, or null. False when the rank aborts;
// the lanes agree.
CROSSDOCK_DEVICE bool ep_wait_inputs(const EpCombineParams& p, u32 masked, u32 epoch,
                                     const u8*& input, u64* waits = nullptr) {
  EpWaitClock clock(waits);
  const u32 lane = lane_index();
  Came came = Came::kYes;
  input = nullptr;
  const bool skips = is_masked(masked, lane);
  // With late masks one that is masked for this thread may have come for another one.
  if (lane < p.view.world && (!skips || p.masking.late)) {
    const u64 index = u64{epoch & 1u} * p.view.world + lane;
    const u64* word = p.view.template at<u64>(p.areas.inputs + index * sizeof(u64));
    // A word of this rank itself: another of its blocks is late, perhaps because of a peer.
    const Phase phase = lane == p.common.rank ? Phase::kGridSync : Phase::kEpochWord;
    u64 seen = 0;
    came = skips ? Came::kMasked
                 : wait_or_mask(
                       p.common, p.masking, {phase, lane, epoch & 0xffffu},
                       [&] { return seen = ptx::ld_acquire_sys(word); },
                       [&](u64 now) { return clock.stamp(tagged_with(now, epoch)); });
    if (!skips) clock.add(lane);
    bool counts = came == Came::kYes;
    if (p.masking.late && came != Came::kAbort)
      counts = ep_agree(&p.state->verdicts[lane], epoch, counts);
    // The word of a rank that others have seen in time is here too, or will be.
    if (counts && came == Came::kMasked) counts = wait_announced(p.common, word, epoch, lane, seen);
    const EpInputWord said{seen & kTaggedValueMask};
    if (counts && !ep_same_payload(p, lane, said)) came = Came::kAbort;
    if (counts) input = p.view.template at<u8>(said.offset(), lane);
    ptx::fence_proxy_async();  // ordinary accesses of the peer, bulk copies here
  }
  return !ptx::any(kFullMask, came == Came::kAbort);
}

template <EpPayload kPayload>
struct EpAdditionOf {
  using Type = EpPackedAddition<kPayload>;
};
template <>
struct EpAdditionOf<EpPayload::kBf16> {
  using Type = EpAddition;
};

template <EpCombineConfig kConfig>
struct EpPullWarp {
  using Addition = typename EpAdditionOf<kConfig.format()>::Type;
  const EpCombineParams& p;
  u32 epoch;
  u32 masked = 0;
  u32 warp;
  u32 lane;
  u32 adder;                   // number of the block among those that add
  u32 adders;                  // how many they are
  const u8* input = nullptr;   // of the lane's rank
  const u32* flags = nullptr;  // by push: of the rows of the lane's rank
  u32 first_row = 0;           // by push: of this rank's tokens at the lane's rank
  u32 issued = 0;
  u32 added = 0;
  bool tokens_left = true;
  // Being issued, and what comes next.
  u32 token = 0, part = 0, fetch_after = 0, last_part = 0, row = kNoRow;
  u32 next_ticket = 0, next_row = kNoRow;
  bool next_came = false;  // by push: the lane's row of it was seen to be here
  u32 claimed = 0;         // lane 0: the answer to the last claim

  CROSSDOCK_DEVICE EpPullWarp(const EpCombineParams& params, u32 index, u32 of_adder, u32 of_adders)
      : p(params), epoch(0), warp(index), lane(lane_index()), adder(of_adder), adders(of_adders) {}

  // Shared memory only.
  CROSSDOCK_DEVICE void prepare() const {
    if (lane == 0) {
      for (u32 i = 0; i < kConfig.stages; ++i)
        ptx::mbarrier_init(full(i), 1);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_warp(kFullMask);
  }
  // Before the epoch is known. Neighbours in number are in different blocks.
  CROSSDOCK_DEVICE void begin(u32 of_masked) {
    masked = of_masked;
    fetch(warp * adders + adder);
    if constexpr (!kConfig.pushes()) return;
    if (p.tokens.tokens == 0 || lane >= p.view.world) return;
    // The first group's routes say where this rank's rows begin.
    first_row = ptx::ld_weak(&p.routes[lane].row);
    flags = p.view.template at<u32>(p.staging.flags) + u64{lane} * p.staging.capacity;
  }
  // False when the rank aborts; all lanes agree. A warp without a token waits for nobody.
  CROSSDOCK_DEVICE bool run(u32 of_epoch) {
    epoch = of_epoch;
    if (next_ticket / p.parts.tickets_per_token() >= p.tokens.tokens) return true;
    if (!find_inputs()) return false;
    bool ok = true;
    for (u32 i = 0; i < kConfig.stages && tokens_left && ok; ++i)
      ok = issue();
    while (ok && added < issued) {
      ok = add();
      if (ok && tokens_left) ok = issue();
    }
    for (; added < issued; ++added)
      settle_stage(p.common, full(added % kConfig.stages), parity(added));
    return ok;
  }

 private:
  // The warp whose waits are kept. It has a token if there is one. By push a sender's are.
  CROSSDOCK_DEVICE bool first() const { return !kConfig.pushes() && adder == 0 && warp == 0; }
  CROSSDOCK_DEVICE u32 place(u32 stage) const { return warp * kConfig.stages + stage; }
  CROSSDOCK_DEVICE ptx::MBarrier* full(u32 stage) const {
    constexpr EpCombineShared kShared = ep_combine_shared(kConfig);
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.barriers) + place(stage);
  }
  CROSSDOCK_DEVICE EpStageNote& note(u32 stage) const {
    constexpr EpCombineShared kShared = ep_combine_shared(kConfig);
    return reinterpret_cast<EpStageNote*>(dynamic_shared() + kShared.notes)[place(stage)];
  }
  CROSSDOCK_DEVICE u8* rows(u32 stage) const {
    return dynamic_shared() + place(stage) * kConfig.stage_bytes;
  }
  CROSSDOCK_DEVICE static u32 parity(u32 n) { return n / kConfig.stages & 1u; }
  CROSSDOCK_DEVICE u32 part_bytes(u32 index) const {
    return min_of(p.parts.bytes, p.input.row_bytes - index * p.parts.bytes);
  }

  // ---- tokens -----------------------------------------------------------------------------------

  CROSSDOCK_DEVICE u32 claim() const {
    return lane == 0 ? ptx::atom_add_relaxed_gpu(&p.state->tickets[epoch & 1u].value, 1u) : 0;
  }
  // The token of a ticket and, per lane, its row at that rank.
  CROSSDOCK_DEVICE void fetch(u32 ticket) {
    next_ticket = ticket;
    const u32 next = next_ticket / p.parts.tickets_per_token();
    next_row = kNoRow;
    next_came = false;
    if (next >= p.tokens.tokens || lane >= p.view.world) return;
    const u32 block = next / p.tokens.per_block;
    const u32 index = next % p.tokens.per_block;
    const u64 group = u64{block} * p.tokens.groups + index / kWarpSize;
    const auto* word = reinterpret_cast<const U32x2*>(p.routes + group * p.view.world + lane);
    const U32x2 route = ptx::ld_weak(word);
    next_row = EpRoute{route.x, route.y}.row_of(index % kWarpSize);
  }
  CROSSDOCK_DEVICE bool next_token() {
    const u32 per_token = p.parts.tickets_per_token();
    token = next_ticket / per_token;
    tokens_left = token < p.tokens.tokens;
    if (!tokens_left) return false;
    row = kConfig.pushes() || input != nullptr ? next_row : kNoRow;
    part = next_ticket % per_token * p.parts.per_ticket;
    last_part = min_of(part + p.parts.per_ticket, p.parts.count) - 1;
    fetch_after = (part + last_part) / 2;
    claimed = claim();
    return true;
  }
  // By push only weights are read where the experts have left them.
  CROSSDOCK_DEVICE bool find_inputs() {
    if (!kConfig.pushes() || p.output.weights != nullptr)
      return ep_wait_inputs(p, masked, epoch, input, first() ? p.rank_wait_ns : nullptr);
    if (lane == p.view.rank) input = p.view.template at<u8>(p.input_offset);
    ptx::fence_proxy_async();  // ordinary stores of this rank's experts, bulk loads here
    return true;
  }
  // By push: the token's rows have come.
  CROSSDOCK_DEVICE bool wait_rows() const {
    bool came = true;
    if (row != kNoRow && lane != p.view.rank) {
      if (!next_came) came = wait_flag(p.common, flags + (row - first_row), epoch, lane);
      ptx::fence_proxy_async();
    }
    return !ptx::any(kFullMask, !came);
  }
  // By push, well before the next token's turn: is its row here already?
  CROSSDOCK_DEVICE void look_ahead() {
    if (next_row != kNoRow && lane != p.view.rank)
      next_came = look_at_flag(flags + (next_row - first_row), epoch);
  }
  // The lane's row of the token.
  CROSSDOCK_DEVICE const u8* row_address() const {
    if (!kConfig.pushes() || lane == p.view.rank)
      return input + p.input.rows + u64{row} * p.input.row_stride;
    const u64 place = u64{lane} * p.staging.capacity + (row - first_row);
    return p.view.template at<u8>(p.staging.rows) + place * p.input.row_bytes;
  }

  // ---- the pipe ---------------------------------------------------------------------------------

  CROSSDOCK_DEVICE bool issue() {
    if (issued == 0 || part > last_part) {
      if (!next_token()) return true;
      if (kConfig.pushes() && !wait_rows()) return false;
    }
    const u32 stage = issued++ % kConfig.stages;
    const u32 mask = ptx::ballot(kFullMask, row != kNoRow);
    const u32 bytes = part_bytes(part);
    if (lane == 0) {
      note(stage) = {token, part, popcount(mask), 0};
      ptx::mbarrier_arrive_expect_tx(full(stage), popcount(mask) * bytes);
    }
    ptx::sync_warp(kFullMask);
    if (row != kNoRow) {
      const u32 at = popcount(mask & ((1u << lane) - 1));
      ptx::bulk_load(rows(stage) + at * p.parts.bytes, row_address() + part * p.parts.bytes, bytes,
                     full(stage));
    }
    if (part == 0 && p.output.weights != nullptr) add_weights(mask);
    if (kConfig.pushes() && part == last_part && part != fetch_after) look_ahead();
    if (part++ == fetch_after) fetch(kConfig.warps * adders + ptx::shuffle(kFullMask, claimed, 0));
    return true;
  }
  CROSSDOCK_DEVICE bool add() {
    const u32 stage = added % kConfig.stages;
    const bool came = wait_stage(p.common, full(stage), parity(added));
    if (ptx::any(kFullMask, !came)) return false;
    ++added;
    const EpStageNote what = note(stage);
    Addition{p, rows(stage), what, part_bytes(what.part)}.run();
    ptx::sync_warp(kFullMask);  // the stage may be loaded again
    return true;
  }
  // The sums of the weights that come with the rows; a lane a selection.
  CROSSDOCK_DEVICE void add_weights(u32 mask) const {
    float sum = 0;
    for (u32 left = mask; left != 0; left &= left - 1) {
      const u32 owner = lowest_bit(left);
      const u64 block = ptx::shuffle(kFullMask, reinterpret_cast<u64>(input), owner);
      const u64 at = u64{ptx::shuffle(kFullMask, row, owner)} * p.top_k + lane;
      if (lane < p.top_k)
        sum += ptx::ld_weak(reinterpret_cast<const float*>(block + p.input.weights) + at);
    }
    if (lane < p.top_k) ptx::st_weak(p.output.weights + u64{token} * p.top_k + lane, sum);
  }
};

}  // namespace crossdock::device
