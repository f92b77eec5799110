// The warps of ep_combine by push, in the blocks that send: rows of other ranks' tokens go from
// where this rank's experts have left them to the staging of their ranks.
//
//   sender warp, one lane                                 flag warp, lane w for sender w
//     ticket -> row: peer, n-th of its rows
//     bulk load a part                   -> full[stage]
//     bulk store to staging[this rank][n] of the peer
//     bulk_wait of the parts that left 16 ago
//     note {peer, n}                     -> sent[note]     all that have been sent
//                                           taken[note] <- one fence for the system
//                                                          flags[this rank][n] of the peer = epoch
//
// Rows go out in the order of the tokens, peers in turns, so that they come in the order in which
// they are added up. A fence costs a sender more than the row: so another warp makes it, for as
// many rows as there are.
//
// Nobody sends before the peer has begun this epoch: all that it had in its staging has then been
// added up. There is always room, so senders wait for nothing else.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/flag_loop.cuh>
#include <crossdock/ep/pull_role.cuh>

namespace crossdock::device {

// The ring of one sender warp.
template <EpCombineConfig kConfig>
struct EpSendRing {
  static constexpr EpCombineShared kShared = ep_combine_shared(kConfig);
  static constexpr u32 kNotes = kConfig.send_notes;
  u32 warp;

  CROSSDOCK_DEVICE static u32 parity(u32 n) { return n / kNotes & 1u; }
  CROSSDOCK_DEVICE static ptx::MBarrier* barriers() {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.send_barriers);
  }
  CROSSDOCK_DEVICE ptx::MBarrier* sent(u32 n) const {
    return barriers() + kConfig.send_warps * kConfig.send_stages + warp * kNotes + n % kNotes;
  }
  CROSSDOCK_DEVICE ptx::MBarrier* taken(u32 n) const {
    return sent(n) + kConfig.send_warps * kNotes;
  }
  CROSSDOCK_DEVICE EpSendNote& note(u32 n) const {
    return reinterpret_cast<EpSendNote*>(dynamic_shared() +
                                         kShared.send_notes)[warp * kNotes + n % kNotes];
  }
};

template <EpCombineConfig kConfig>
struct EpPushWarp {
  static constexpr u32 kStages = kConfig.send_stages;
  static constexpr u32 kNotes = kConfig.send_notes;
  static constexpr u32 kAhead = kStages / 2;  // loads beyond the stores
  static constexpr u32 kDraining = kStages - kAhead;
  // Parts that have left their stages and may not have arrived yet. A store arrives microseconds
  // after its stage has been read: waiting for it any earlier would leave the wire idle.
  static constexpr u32 kTravelling = min_of(kNotes - kStages - 1, 16u);
  static_assert(kStages > kAhead && kNotes > kStages + 1);

  const EpCombineParams& p;
  EpSendRing<kConfig> ring;
  u32 lane;
  u32 epoch = 0;
  u32 most = 0;     // rows of any peer's tokens that are here
  u32 claimed = 0;  // the answer to the last claim
  EpSendNote next{kNoPeer, 0, 0, 0};
  u32 row = 0;  // of `next`, at this rank
  bool rows_left = true;
  u32 loaded = 0, stored = 0, told = 0;  // parts

  CROSSDOCK_DEVICE EpPushWarp(const EpCombineParams& params, u32 index)
      : p(params), ring{index}, lane(lane_index()) {}

  // Shared memory only.
  CROSSDOCK_DEVICE void prepare() const {
    if (lane == 0) {
      for (u32 i = 0; i < kStages; ++i)
        ptx::mbarrier_init(full(i), 1);
      for (u32 i = 0; i < kNotes; ++i) {
        ptx::mbarrier_init(ring.sent(i), 1);
        ptx::mbarrier_init(ring.taken(i), 1);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::sync_warp(kFullMask);
  }
  // Before the epoch is known.
  CROSSDOCK_DEVICE void begin() {
    u32 rows = 0;
    if (lane < p.view.world && lane != p.view.rank) rows = end(lane) - start(lane);
    most = ptx::reduce_max(kFullMask, rows);
  }
  // False when the rank aborts; all lanes agree.
  CROSSDOCK_DEVICE bool run(u32 of_epoch) {
    epoch = of_epoch;
    if (lane == 0) claimed = claim();
    const u8* unused = nullptr;
    const EpCombineBlocks of{p.send_blocks, grid_size()};
    const bool first = ring.warp == 0 && of.senders_before(block_index()) == 0;
    bool ok = ep_wait_inputs(p, 0, epoch, unused, first ? p.rank_wait_ns : nullptr);
    ptx::sync_warp(kFullMask);  // what the lanes have acquired is for lane 0
    if (lane == 0) {
      ptx::fence_proxy_async();  // ordinary stores of the experts and of the peers, bulk copies
                                 // here
      ok = ok && send_all();
      say_end();
    }
    return !ptx::any(kFullMask, !ok);
  }

 private:
  CROSSDOCK_DEVICE ptx::MBarrier* full(u32 n) const {
    return ring.barriers() + ring.warp * kStages + n % kStages;
  }
  CROSSDOCK_DEVICE static u32 parity(u32 n) { return n / kStages & 1u; }
  CROSSDOCK_DEVICE u8* stage(u32 n) const {
    return dynamic_shared() + (ring.warp * kStages + n % kStages) * kConfig.send_stage_bytes;
  }
  CROSSDOCK_DEVICE u32 part_bytes(u32 part) const {
    return min_of(p.send_parts.bytes, p.input.row_bytes - part * p.send_parts.bytes);
  }

  // ---- rows, by lane 0 --------------------------------------------------------------------------

  // This rank's rows of the tokens of `source`.
  CROSSDOCK_DEVICE u32 end(u32 source) const { return ptx::ld_weak(p.source_ends + source); }
  CROSSDOCK_DEVICE u32 start(u32 source) const { return source == 0 ? 0 : end(source - 1); }
  CROSSDOCK_DEVICE u32 claim() const {
    return ptx::atom_add_relaxed_gpu(&p.state->send_tickets[epoch & 1u].value, 1u);
  }
  CROSSDOCK_DEVICE bool next_row() {
    const u32 others = p.view.world - 1;
    while (rows_left) {
      const u32 ticket = claimed;
      rows_left = ticket / others < most;
      if (!rows_left) break;
      claimed = claim();
      const u32 after = p.view.rank + 1 + ticket % others;
      const u32 peer = after < p.view.world ? after : after - p.view.world;
      const u32 place = ticket / others;
      const u32 first = start(peer);
      if (place >= end(peer) - first) continue;
      next = {peer, place, 0, 0};
      row = first + place;
      return true;
    }
    return false;
  }

  // ---- the pipe, by lane 0 ----------------------------------------------------------------------

  // The next part into a stage, if there is one. False when the rank aborts.
  CROSSDOCK_DEVICE bool load() {
    if ((loaded == 0 || next.last != 0) && !next_row()) return true;
    if (!may_note(loaded)) return false;
    const u32 bytes = part_bytes(next.part);
    next.last = next.part == p.send_parts.count - 1;
    ring.note(loaded) = next;
    const u8* from = p.view.template at<u8>(p.input_offset + p.input.rows) +
                     u64{row} * p.input.row_bytes + next.part * p.send_parts.bytes;
    ptx::mbarrier_arrive_expect_tx(full(loaded), bytes);
    ptx::bulk_load(stage(loaded), from, bytes, full(loaded));
    ++loaded;
    ++next.part;
    return true;
  }
  CROSSDOCK_DEVICE void store() {
    const EpSendNote what = ring.note(stored);
    const u64 place = u64{p.view.rank} * p.staging.capacity + what.place;
    u8* to = p.view.template at<u8>(p.staging.rows, what.peer) + place * p.input.row_bytes +
             what.part * p.send_parts.bytes;
    ptx::bulk_store(to, stage(stored), part_bytes(what.part));
    ptx::bulk_commit();
    ++stored;
  }
  CROSSDOCK_DEVICE bool send_all() {
    bool ok = true;
    for (u32 i = 0; i < kAhead && ok; ++i)
      ok = load();
    while (ok && stored < loaded) {
      ok = wait_stage(p.common, full(stored), parity(stored));
      if (!ok) break;
      store();
      ptx::bulk_wait_read<kDraining>();  // the stage of the next load is free
      ok = load();
      ptx::bulk_wait<kTravelling>();
      if (stored > kTravelling) tell(stored - kTravelling);
    }
    for (; stored < loaded; ++stored)
      settle_stage(p.common, full(stored), parity(stored));
    ptx::bulk_wait<0>();
    if (ok) tell(stored);
    return ok;
  }
  // A note may be written: the flag warp has taken the one before in its place.
  CROSSDOCK_DEVICE bool may_note(u32 n) const {
    return n < kNotes || wait_stage(p.common, ring.taken(n), ring.parity(n - kNotes));
  }
  CROSSDOCK_DEVICE void tell(u32 until) {
    for (; told < until; ++told)
      ptx::mbarrier_arrive(ring.sent(told));
  }
  CROSSDOCK_DEVICE void say_end() {
    if (told == loaded && !may_note(told)) return;  // the flag warp leaves because of the abort
    ring.note(told) = {kNoPeer, 0, 0, 0};
    tell(told + 1);
  }
};

// Raises the flags of the rows that the sender warps of the block have sent.
template <EpCombineConfig kConfig>
struct EpFlagWarp {
  const EpCombineParams& p;
  static constexpr u32 kNotes = kConfig.send_notes;
  EpSendRing<kConfig> ring;  // of the lane's sender
  bool done;
  u32 taken = 0;

  CROSSDOCK_DEVICE explicit EpFlagWarp(const EpCombineParams& params)
      : p(params), ring{lane_index()}, done(lane_index() >= kConfig.send_warps) {}

  // False when the rank aborts; all lanes agree.
  CROSSDOCK_DEVICE bool run(u32 epoch) {
    return ep_raise_flags(
        p.common, [&] { return done; }, [&] { return look(); },
        [&](u32 sent) { raise(sent, epoch); });
  }

 private:
  // How many notes of the lane's sender are there.
  CROSSDOCK_DEVICE u32 look() const {
    u32 sent = 0;
    while (!done && sent < kNotes &&
           ptx::mbarrier_test_wait(ring.sent(taken + sent), ring.parity(taken + sent)))
      ++sent;
    return sent;
  }
  CROSSDOCK_DEVICE void raise(u32 sent, u32 epoch) {
    // The senders' rows, which their arrivals have handed over, before the flags.
    ptx::fence_acq_rel_sys();
    for (u32 i = 0; i < sent && !done; ++i) {
      const EpSendNote note = ring.note(taken);
      done = note.peer == kNoPeer;
      if (note.peer != kNoPeer && note.last != 0) {
        const u64 place = u64{p.view.rank} * p.staging.capacity + note.place;
        ptx::st_relaxed_sys(p.view.template at<u32>(p.staging.flags, note.peer) + place, epoch);
      }
      ptx::mbarrier_arrive(ring.taken(taken));
      ++taken;
    }
    ptx::sync_warp(kFullMask);
  }
};

}  // namespace crossdock::device
