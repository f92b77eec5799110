// Which rows a warp copies, and those that are to be copied as they come: a lane remembers which of
// 32 rows have not been taken, so a warp looks after 1024 at a time. Rows need not come in their
// order. Those of a source that is masked meanwhile are forgotten. By all lanes.
//
// A block of a source sends its tokens about in their order, so of the rows in a row the last come
// last. Blocks that copied such pieces would have nothing to do at first and all of it at the end;
// so rows are dealt in turns of eight, and those of a block are spread over all of them:
//
//   round 0    turns of blocks  0 1 2 3 4 ...
//   round 1                     5 6 7 ... 0 1 ...      begun elsewhere each time, so that no block
//   round 2                     ... 0 1 2              always gets the same part of a source's
//   block
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/copy_sources.cuh>

namespace crossdock::device {

// The turns of one of `blocks` blocks.
struct EpTurns {
  static constexpr u32 kRows = 8;  // they come together, and their flags are one sector
  u32 block;
  u32 blocks;
  u32 rows;  // of all blocks

  // How many turns the block has, at most; the last may begin behind all rows.
  CROSSDOCK_DEVICE u32 count() const { return ceil_div(ceil_div(rows, kRows), blocks); }
  // How many of them one of its warps has, of so many that take turns.
  CROSSDOCK_DEVICE u32 of_warp(u32 warp, u32 warps) const {
    return warp < count() ? ceil_div(count() - warp, warps) : 0;
  }
  // The first row of a turn.
  CROSSDOCK_DEVICE u32 first(u32 turn) const {
    const u32 step = max_of(blocks * 5 / 13, 1u);
    const u32 place = (block + turn % blocks * step) % blocks;
    return (turn * blocks + place) * kRows;
  }
};

template <class Block>
struct EpRowsToCome {
  static constexpr u32 kAtOnce = kWarpSize * kWarpSize;
  static constexpr u32 kTurn = EpTurns::kRows;
  // The block's turns, of which the warp takes every `warps`-th.
  struct Rows {
    EpTurns turns;
    u32 warp, warps;
  };
  const Block& b;
  const EpCopySources<Block>& sources;
  const EpArriving& arriving;
  Rows rows;
  u32 count;
  u32 lane;
  u32 base = 0;     // of `rows`, the first of those that are looked at
  u32 missing = 0;  // bit i: row base + 32 * lane + i has not been taken
  u32 ready = 0;    // of the group: rows that are here
  u32 group = 0;
  u32 gone = 0;  // sources whose rows have been forgotten
  bool failed = false;

  CROSSDOCK_DEVICE EpRowsToCome(const EpCopySources<Block>& from, const EpArriving& arrived,
                                Rows of)
      : b(from.b),
        sources(from),
        arriving(arrived),
        rows(of),
        count(of.turns.of_warp(of.warp, of.warps) * kTurn),
        lane(lane_index()) {
    fill();
  }
  // A row that has come, of which bulk loads may follow; kNoRow: none now. When it `waits`: none is
  // left, or the rank aborts, and `failed` says so.
  CROSSDOCK_DEVICE u32 next(bool waits) {
    u64 since = 0;
    for (u32 turn = 1;; ++turn) {
      if (ready == 0) search();
      if (ready != 0) break;
      if (!waits || !left()) return kNoRow;
      if (turn == 1) since = ptx::global_timer();
      if (sources.late()) forget();
      ptx::spin("rows to copy");
      ptx::nanosleep(200);
      if (turn % kTurnsPerCheck != 0) continue;
      const u64 deadline = deadline_of(b.p.common, Phase::kRowFlag);
      const bool late = ptx::any(kFullMask, ptx::global_timer() - since > deadline);
      if (late) report();
      failed = ptx::any(kFullMask, late || aborted(b.p.common));
      if (failed) return kNoRow;
    }
    const u32 i = lowest_bit(ready);
    ready &= ready - 1;
    return row(group * kWarpSize + i);
  }

 private:
  CROSSDOCK_DEVICE bool left() const { return ptx::any(kFullMask, missing != 0); }
  // Of the rows of all blocks, the warp's `i`-th of those it looks after now.
  CROSSDOCK_DEVICE u32 number(u32 i) const {
    const u32 n = base + i;
    return rows.turns.first(rows.warp + n / kTurn * rows.warps) + n % kTurn;
  }
  CROSSDOCK_DEVICE u32 row(u32 i) const { return sources.row_at(number(i)); }
  CROSSDOCK_DEVICE void fill() {
    const u32 before = base + lane * kWarpSize;
    const u32 mine = before < count ? min_of(count - before, kWarpSize) : 0;
    missing = mine == kWarpSize ? kFullMask : (1u << mine) - 1;
    keep([&](u32 i) { return number(i) < rows.turns.rows && !is_gone(i); });
  }
  // Forgets the lane's rows that are not `wanted`.
  template <class Wanted>
  CROSSDOCK_DEVICE void keep(const Wanted& wanted) {
    CROSSDOCK_NO_UNROLL
    for (u32 bits = missing; bits != 0; bits &= bits - 1) {
      const u32 i = lowest_bit(bits);
      if (!wanted(lane * kWarpSize + i)) missing &= ~(1u << i);
    }
  }
  CROSSDOCK_DEVICE bool is_gone(u32 i) const {
    return gone != 0 && is_masked(gone, row(i) / arriving.stride);
  }
  CROSSDOCK_DEVICE void forget() {
    const u32 now = ptx::shuffle(kFullMask, sources.gone(), 0);
    if (now == gone) return;
    gone = now;
    keep([&](u32 i) { return !is_gone(i); });
  }
  CROSSDOCK_DEVICE void search() {
    u32 groups = ptx::ballot(kFullMask, missing != 0);
    while (groups == 0 && base + kAtOnce < count) {
      base += kAtOnce;
      fill();
      groups = ptx::ballot(kFullMask, missing != 0);
    }
    CROSSDOCK_NO_UNROLL
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
    const u32 source = arriving.source_of(late);
    const u32 seen = ptx::ld_relaxed_sys(b.row_flag(late));
    raise_fault(b.p.common, {Phase::kRowFlag, source, b.epoch}, seen,
                deadline_of(b.p.common, Phase::kRowFlag));
  }
};

}  // namespace crossdock::device
