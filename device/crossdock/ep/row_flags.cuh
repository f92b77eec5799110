// Flags of rows that a dispatch has stored, so that a receiver may use each as soon as it is there.
//
//   dispatch warp, lane i for destination (rank + i) % world     flag warp, lane w for dispatch
//   warp w
//     bulk stores of row n, commit
//     taken[n - kNotes], note n = {row at each destination}
//     bulk_wait of the rows before the last kTravelling
//     sent[note]                                            ->   all that have been sent
//                                             taken[note]   <-   one fence for the system
//                                                                flags of the rows = epoch
//
// A fence costs a sender more than a row: so a warp of its own makes it, for as many rows as there
// are.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/dispatch_block.cuh>
#include <crossdock/ep/flag_loop.cuh>
#include <crossdock/ptx/bulk.cuh>

namespace crossdock::device {

// The notes of one dispatch warp.
template <class Block>
struct EpNotes {
  static constexpr u32 kNotes = kEpNotes;
  static constexpr u32 kEnd = kNoRow - 1;  // in place of a row: the warp has stored its last
  const Block& b;
  u32 warp;

  CROSSDOCK_DEVICE static u32 parity(u32 n) { return n / kNotes & 1u; }
  CROSSDOCK_DEVICE ptx::MBarrier* sent(u32 n) const {
    return b.template at<ptx::MBarrier>(b.shared.note_barriers) + warp * kNotes + n % kNotes;
  }
  CROSSDOCK_DEVICE ptx::MBarrier* taken(u32 n) const {
    return sent(n) + Block::kVariant.dispatch_warps * kNotes;
  }
  // [world]: the row at rank (rank + i) % world, kNoRow where it does not go.
  CROSSDOCK_DEVICE u32* note(u32 n) const {
    return b.template at<u32>(b.shared.notes) + (warp * kNotes + n % kNotes) * b.world();
  }
};

// The part of a dispatch warp. By all its lanes, which agree.
template <class Block>
struct EpNoteWriter {
  using Notes = EpNotes<Block>;
  // Rows whose stores may be on their way: a store arrives microseconds after its stage has been
  // read, and waiting for it any earlier would keep the warp from its next row.
  static constexpr u32 kTravelling = Notes::kNotes / 2;

  Notes notes;
  u32 written = 0;
  u32 told = 0;

  CROSSDOCK_DEVICE EpNoteWriter(const Block& block, u32 warp) : notes{block, warp} {}

  // Shared memory only, by one lane, before its fence of mbarriers.
  CROSSDOCK_DEVICE void prepare() const {
    for (u32 i = 0; i < Notes::kNotes; ++i) {
      ptx::mbarrier_init(notes.sent(i), 1);
      ptx::mbarrier_init(notes.taken(i), 1);
    }
  }
  // The row that the lane has stored and committed. False when the rank aborts.
  CROSSDOCK_DEVICE bool put(u32 row) {
    if (!write(row)) return false;
    if (written <= kTravelling) return true;
    ptx::bulk_wait<kTravelling>();
    tell(written - kTravelling);
    return true;
  }
  // After the last row.
  CROSSDOCK_DEVICE void end() {
    ptx::bulk_wait<0>();
    if (write(Notes::kEnd)) tell(written);  // else the flag warp leaves because of the abort
  }

 private:
  CROSSDOCK_DEVICE bool write(u32 row) {
    if (written >= Notes::kNotes) {
      const bool free =
          wait_stage(notes.b.p.common, notes.taken(written), notes.parity(written - Notes::kNotes));
      if (ptx::any(kFullMask, !free)) return false;
    }
    if (lane_index() < notes.b.world()) notes.note(written)[lane_index()] = row;
    ++written;
    return true;
  }
  CROSSDOCK_DEVICE void tell(u32 until) {
    ptx::sync_warp(kFullMask);  // all lanes' stores and notes, for what lane 0 hands over
    CROSSDOCK_NO_UNROLL
    for (; told < until; ++told)
      if (lane_index() == 0) ptx::mbarrier_arrive(notes.sent(told));
  }
};

// Raises the flags of the rows that the dispatch warps of the block have stored.
template <class Block>
struct EpRowFlagWarp {
  using Notes = EpNotes<Block>;
  const Block& b;
  Notes notes;  // of the lane's dispatch warp
  bool done;
  u32 taken = 0;

  CROSSDOCK_DEVICE explicit EpRowFlagWarp(const Block& block)
      : b(block),
        notes{block, lane_index()},
        done(lane_index() >= Block::kVariant.dispatch_warps) {}

  // False when the rank aborts; all lanes agree.
  CROSSDOCK_DEVICE bool run() {
    return ep_raise_flags(
        b.p.common, [&] { return done; }, [&] { return look(); }, [&](u32 sent) { raise(sent); });
  }

 private:
  // How many notes of the lane's dispatch warp are there.
  CROSSDOCK_DEVICE u32 look() const {
    u32 sent = 0;
    CROSSDOCK_NO_UNROLL
    while (!done && sent < Notes::kNotes &&
           ptx::mbarrier_test_wait(notes.sent(taken + sent), notes.parity(taken + sent)))
      ++sent;
    return sent;
  }
  CROSSDOCK_DEVICE void raise(u32 sent) {
    // The rows, which the arrivals at `sent` have handed over, before the flags.
    ptx::fence_acq_rel_sys();
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < sent && !done; ++i) {
      const u32* rows = notes.note(taken);
      done = rows[0] == Notes::kEnd;
      for (u32 d = 0; d < b.world() && !done; ++d) {
        const u32 row = rows[d];
        const u32 peer = b.rank() + d < b.world() ? b.rank() + d : b.rank() + d - b.world();
        if (row != kNoRow) ptx::st_relaxed_sys(b.p.view.map(b.row_flag(row), peer), b.epoch);
      }
      ptx::mbarrier_arrive(notes.taken(taken));
      ++taken;
    }
    ptx::sync_warp(kFullMask);
  }
};

}  // namespace crossdock::device
