// The rows of a warp that are to be copied as they come: a lane remembers which of 32 rows have not
// been taken, so a warp looks after 1024 at a time. Rows need not come in their order. By all
// lanes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/epoch.cuh>
#include <crossdock/ep/dispatch_block.cuh>

namespace crossdock::device {

template <class Block>
struct EpRowsToCome {
  static constexpr u32 kAtOnce = kWarpSize * kWarpSize;
  // Warps take eight rows in turns: those come all the time, and their flags are one sector.
  static constexpr u32 kTurn = 8;
  struct Rows {
    u32 first, end, warps;
  };
  const Block& b;
  const u32* ends;  // of the rows of each source
  Rows rows;
  u32 count;
  u32 lane;
  u32 base = 0;     // of `rows`, the first of those that are looked at
  u32 missing = 0;  // bit i: row base + 32 * lane + i has not been taken
  u32 ready = 0;    // of the group: rows that are here
  u32 group = 0;
  bool failed = false;

  CROSSDOCK_DEVICE EpRowsToCome(const Block& block, const u32* source_ends, Rows of)
      : b(block),
        ends(source_ends),
        rows(of),
        count(of.first < of.end ? turns(of.end - of.first, of.warps) : 0),
        lane(lane_index()) {
    fill();
  }
  // A row that has come; kNoRow: none now. Bulk loads of it may follow.
  CROSSDOCK_DEVICE u32 look() {
    if (ready == 0) search();
    if (ready == 0) return kNoRow;
    const u32 i = lowest_bit(ready);
    ready &= ready - 1;
    return row(group * kWarpSize + i);
  }
  // As look(), but waits. kNoRow: none is left, or the rank aborts, and `failed` says so.
  CROSSDOCK_DEVICE u32 wait() {
    const u64 deadline = deadline_of(b.p.common, Phase::kRowFlag);
    const u64 since = ptx::global_timer();
    for (u32 turn = 1;; ++turn) {
      const u32 found = look();
      if (found != kNoRow || !left()) return found;
      ptx::spin("rows to copy");
      ptx::nanosleep(200);
      if (turn % kTurnsPerCheck != 0) continue;
      const bool late = ptx::any(kFullMask, ptx::global_timer() - since > deadline);
      if (late) report();
      failed = ptx::any(kFullMask, late || aborted(b.p.common));
      if (failed) return kNoRow;
    }
  }

 private:
  CROSSDOCK_DEVICE bool left() const { return ptx::any(kFullMask, missing != 0); }
  CROSSDOCK_DEVICE static u32 turns(u32 n, u32 warps) {
    const u32 all = kTurn * warps;
    return n / all * kTurn + min_of(n % all, kTurn);
  }
  CROSSDOCK_DEVICE u32 row(u32 i) const {
    const u32 n = base + i;
    return rows.first + n / kTurn * (kTurn * rows.warps) + n % kTurn;
  }
  CROSSDOCK_DEVICE void fill() {
    const u32 before = base + lane * kWarpSize;
    const u32 mine = before < count ? min_of(count - before, kWarpSize) : 0;
    missing = mine == kWarpSize ? kFullMask : (1u << mine) - 1;
  }
  CROSSDOCK_DEVICE void search() {
    u32 groups = ptx::ballot(kFullMask, missing != 0);
    if (groups == 0 && base + kAtOnce < count) {
      base += kAtOnce;
      fill();
      groups = ptx::ballot(kFullMask, missing != 0);
    }
    for (; groups != 0; groups &= groups - 1) {
      group = lowest_bit(groups);
      const u32 of_group = ptx::shuffle(kFullMask, missing, group);
      const bool came = (of_group >> lane & 1u) != 0 &&
                        look_at_flag(b.row_flag(row(group * kWarpSize + lane)), b.epoch);
      ready = ptx::ballot(kFullMask, came);
      if (ready == 0) continue;
      if (lane == group) missing &= ~ready;
      ptx::sync_warp(kFullMask);  // what the lanes have acquired is for the one that loads
      ptx::fence_proxy_async();
      return;
    }
  }
  // A row that has not come, by the first lane that knows of one.
  CROSSDOCK_DEVICE void report() const {
    const u32 lanes = ptx::ballot(kFullMask, missing != 0);
    if (lanes == 0 || lane != lowest_bit(lanes)) return;
    const u32 late = row(lane * kWarpSize + lowest_bit(missing));
    u32 source = 0;
    while (ends[source] <= late)
      ++source;
    const u32 seen = ptx::ld_relaxed_sys(b.row_flag(late));
    raise_fault(b.p.common, {Phase::kRowFlag, source, b.epoch}, seen,
                deadline_of(b.p.common, Phase::kRowFlag));
  }
};

}  // namespace crossdock::device
