// The choices of received rows as a list of places for each expert, in the order of the rows:
// counted, given places and written by a block that has a piece of the choices. What the pieces
// before it hold, the block is told. Nothing here waits for another block.
//
//   count    each warp counts the experts of its part of the piece       counts[warp][expert]
//   tell     what of each expert is before the piece, and of all         before, total [expert]
//   begin    where each expert's places begin; the counts become the
//            place of each warp's next choice of the expert
//   write    32 choices at a time: those of one expert find each other
//            (match), and take places in the order of the lanes
//
// Choices are read twice, whatever the number of experts is, up to kRange of them; more are taken
// in turns. All functions are for all threads of the block unless they say otherwise.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/layout/ep_grouping.cuh>

namespace crossdock::device {

// `Arrived`: EpArrived, or one that knows better which rows there are (`holds`).
template <u32 kWarps, class Arrived = EpArrived>
struct EpExpertLists {
  static constexpr u32 kThreads = kWarps * kWarpSize;
  static constexpr u32 kRange = kEpListRange;
  static constexpr u32 kBatch = 4;  // loads in flight of a thread
  static constexpr u32 kNone = 0xffffffffu;

  const Arrived& arrived;
  const EpGrouping& to;
  u32* counts;  // shared [kWarps][width], as ep_list_shared_bytes
  u32* before;  // shared [width]
  u32* total;   // shared [width]
  u32* begins;  // shared [width + 1]
  u32 width;    // experts of a turn
  u32 first;    // of this warp's choices
  u32 end;
  u32 turn_first = 0;  // expert
  u32 turn = 0;        // experts of the turn
  u32 place = 0;       // where the first expert of the turn begins
  u32 warp;
  u32 lane;

  // The block has the choices from `begin` to `stop`.
  CROSSDOCK_DEVICE EpExpertLists(const Arrived& rows, const EpGrouping& lists, u32* shared,
                                 u32 begin, u32 stop)
      : arrived(rows), to(lists), counts(shared), warp(warp_index()), lane(lane_index()) {
    width = min_of(rows.experts, kRange);
    before = counts + kWarps * width;
    total = before + width;
    begins = total + width;
    const u32 part = round_up(ceil_div(stop - begin, kWarps), kWarpSize);
    first = min_of(begin + warp * part, stop);
    end = min_of(first + part, stop);
  }
  // The next turn of experts, from `expert` on.
  CROSSDOCK_DEVICE void take(u32 expert) {
    turn_first = expert;
    turn = min_of(width, arrived.experts - expert);
  }
  // Choices of the piece by warp and expert. Ends with a barrier.
  CROSSDOCK_DEVICE void count() const {
    CROSSDOCK_NO_UNROLL
    for (u32 i = thread_index(); i < (kWarps + 2) * width; i += kThreads)
      counts[i] = 0;
    ThreadGroup::block().sync();
    each([&](u32, u32 expert) {
      if (expert != kNone) ptx::red_add_shared(counts + warp * width + expert, 1u);
    });
    ThreadGroup::block().sync();
  }
  // Of the turn's `expert`, in the whole piece. Any thread, after count().
  CROSSDOCK_DEVICE u32 in_piece(u32 expert) const {
    u32 sum = 0;
    CROSSDOCK_NO_UNROLL
    for (u32 w = 0; w < kWarps; ++w)
      sum += counts[w * width + expert];
    return sum;
  }
  // `n` choices of `expert` are in a piece. By any threads, between count() and begin().
  CROSSDOCK_DEVICE void tell(u32 expert, u32 n, bool earlier) const {
    ptx::red_add_shared(total + expert, n);
    if (earlier) ptx::red_add_shared(before + expert, n);
  }
  // After all has been told.
  CROSSDOCK_DEVICE void begin() {
    ThreadGroup::block().sync();
    if (warp == 0) place_experts();
    ThreadGroup::block().sync();
    place = begins[turn];
    CROSSDOCK_NO_UNROLL
    for (u32 expert = thread_index(); expert < turn; expert += kThreads) {
      u32 next = begins[expert] + before[expert];
      CROSSDOCK_NO_UNROLL
      for (u32 w = 0; w < kWarps; ++w) {
        const u32 n = counts[w * width + expert];
        counts[w * width + expert] = next;
        next += n;
      }
    }
    ThreadGroup::block().sync();
  }
  // Choices of the expert of the turn that has most. Any thread, after begin().
  CROSSDOCK_DEVICE u32 most() const {
    u32 out = 0;
    CROSSDOCK_NO_UNROLL
    for (u32 expert = 0; expert < turn; ++expert)
      out = max_of(out, total[expert]);
    return out;
  }
  // The warp's choices to their places.
  CROSSDOCK_DEVICE void write() const {
    u32* next = counts + warp * width;
    each([&](u32 choice, u32 expert) {
      const u32 alike = ptx::match_any(kFullMask, expert);
      const u32 earlier = popcount(alike & ((1u << lane) - 1));
      const u32 at = expert == kNone ? 0 : next[expert] + earlier;
      ptx::sync_warp(kFullMask);  // all have read before the first of them counts on
      if (expert != kNone) {
        if (earlier == 0) next[expert] = at + popcount(alike);
        ptx::st_weak(to.rows + at, static_cast<i32>(choice / arrived.top_k));
        ptx::st_weak(to.positions + choice, at);
        if (to.weights != nullptr)
          ptx::st_weak(to.weights + at, ptx::ld_weak(arrived.weights + choice));
      }
      ptx::sync_warp(kFullMask);
    });
  }
  // The lists of a rank without experts. By any thread.
  CROSSDOCK_DEVICE void write_none() const { ptx::st_weak(to.offsets, 0u); }
  // Offsets, counts and padding of the turn's experts that are dealt to this block.
  CROSSDOCK_DEVICE void write_ends(u32 block, u32 blocks) const {
    CROSSDOCK_NO_UNROLL
    for (u32 i = block + warp * blocks; i < turn; i += kWarps * blocks) {
      const u32 stop = begins[i + 1];
      CROSSDOCK_NO_UNROLL
      for (u32 at = begins[i] + total[i] + lane; at < stop; at += kWarpSize)
        ptx::st_weak(to.rows + at, -1);
      if (lane != 0) continue;
      const u32 expert = turn_first + i;
      ptx::st_weak(to.offsets + expert, begins[i]);
      ptx::st_weak(to.aligned + expert, stop - begins[i]);
      if (expert == arrived.experts - 1) ptx::st_weak(to.offsets + expert + 1, stop);
    }
  }

 private:
  // Calls `visit(choice, expert)` for 32 choices of the warp at a time, in their order; the expert
  // counts from the first of the turn and is kNone for what is not to be listed. All lanes call.
  template <class Visit>
  CROSSDOCK_DEVICE void each(const Visit& visit) const {
    for (u32 from = first; from < end; from += kWarpSize * kBatch) {
      u32 ids[kBatch];
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 at = from + j * kWarpSize + lane;
        ids[j] = at < end ? static_cast<u32>(ptx::ld_weak(arrived.ids + at)) : kNone;
      }
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 at = from + j * kWarpSize;
        if (at >= end) break;
        const u32 expert = ids[j] - turn_first;
        visit(at + lane, expert < turn && is_row(at + lane) ? expert : kNone);
      }
    }
  }
  // Only where there are gaps a choice may be none of a row.
  CROSSDOCK_DEVICE bool is_row(u32 choice) const {
    return arrived.stride == 0 || arrived.holds(choice / arrived.top_k);
  }
  // By one warp.
  CROSSDOCK_DEVICE void place_experts() const {
    u32 next = place;
    CROSSDOCK_NO_UNROLL
    for (u32 i = 0; i < turn; i += kWarpSize) {
      const u32 mine = i + lane < turn ? round_up(total[i + lane], to.alignment) : 0;
      u32 sum = mine;
      CROSSDOCK_NO_UNROLL
      for (u32 delta = 1; delta < kWarpSize; delta *= 2) {
        const u32 other = ptx::shuffle_up(kFullMask, sum, delta);
        if (lane >= delta) sum += other;
      }
      if (i + lane < turn) begins[i + lane] = next + sum - mine;
      next += ptx::shuffle(kFullMask, sum, kWarpSize - 1);
    }
    if (lane == 0) begins[turn] = next;
  }
};

}  // namespace crossdock::device
