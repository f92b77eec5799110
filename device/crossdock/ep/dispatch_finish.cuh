// What a dispatch has received: where the rows of each source end, that all of them are here, and
// how many choices each expert has. By warps of block 0.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/ep/dispatch_block.cuh>

namespace crossdock::device {

// A reused routing is that of all ranks, or of none.
template <class Block>
CROSSDOCK_DEVICE bool ep_same_routing(const Block& b, u32 source, u32 end, bool reused) {
  const u32 expected = b.reuses() ? ptx::ld_weak(b.p.reuse.source_ends + source) : end;
  if (reused == b.reuses() && end == expected) return true;
  raise_fault(b.p.common, {Phase::kReuse, source, expected}, end, 0);
  return false;
}
// By a warp: how many rows there are, to the host. `rows`: where those of the lane's source end.
template <class Block>
CROSSDOCK_DEVICE void ep_tell_rows(const Block& b, u32 rows) {
  const u32 lane = lane_index();
  // Where the last end, or with gaps between the sources all that they have.
  u32 all = ptx::shuffle(kFullMask, rows, b.world() - 1);
  if (b.fixed()) all = ptx::reduce_add(kFullMask, lane < b.world() ? rows - lane * b.p.stride : 0);
  if (lane == 0 && b.p.result.host_rows != nullptr)
    put_epoch_word(b.p.result.host_rows, b.p.result.host_ticket, all);
}
// By a warp of block 0: where the rows of each source end, for the caller and the host; with late
// masks the host is told when it is known who has come. False when the rank aborts; the lanes
// agree.
template <class Block>
CROSSDOCK_DEVICE bool ep_take_ends(const Block& b) {
  const u32 lane = lane_index();
  bool got = true;
  u32 rows = 0;
  if (lane < b.world()) {
    u64 end = Block::kMaskedWord;
    got = !b.talks_to(lane) || b.template wait_word<false>(b.end_word(lane), lane, end);
    if (end == Block::kMaskedWord) {
      rows = lane * b.p.stride;
    } else {
      if (got && ep_is_given_up(end)) got = b.pass_on(lane, end);
      rows = static_cast<u32>(end);
      if (got) got = ep_same_routing(b, lane, rows, (end & kEpReused) != 0);
    }
    if (got) ptx::st_weak(b.p.result.source_ends + lane, rows);
  }
  if (ptx::any(kFullMask, !got)) return false;
  if (!b.p.masking.late) ep_tell_rows(b, rows);
  return true;
}
// By a warp: adds to the shared `counts` how often each of `number` experts from `first` is among
// the `choices`. Cold, as no rank is masked in almost all dispatches.
CROSSDOCK_COLD void ep_count_choices(const i32* ids, u32 choices, u32* counts, u32 first,
                                     u32 number) {
  CROSSDOCK_NO_UNROLL
  for (u32 i = lane_index(); i < choices; i += kWarpSize * kEpBatch) {
    i32 id[kEpBatch];
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < kEpBatch; ++j)
      id[j] = i + j * kWarpSize < choices ? ptx::ld_weak(ids + i + j * kWarpSize) : -1;
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < kEpBatch; ++j) {
      const u32 expert = static_cast<u32>(id[j]) - first;
      if (id[j] >= 0 && expert < number) ptx::red_add_shared(counts + expert, 1u);
    }
  }
}

// The end of a dispatch, by the first warps of block 0: all rows of all sources are here. Each
// waits for itself, which is faster than waiting for one that tells the others.
template <class Block>
struct EpDispatchFinish {
  static constexpr u32 kWarps = Block::kVariant.dispatch_warps;

  const Block& b;
  u32 total = 0;  // without masks: blocks of the lane's source, of all epochs so far

  // Early, so that the load has ended when it is needed.
  CROSSDOCK_DEVICE void begin() {
    if (b.block != 0 || lane_index() >= b.world()) return;
    total = ptx::ld_weak(b.p.state->arrived + lane_index()) + b.p.source_blocks[lane_index()];
  }
  CROSSDOCK_DEVICE void run() {
    const u32 warp = warp_index();
    // A rank that has given up says so here; the abort then ends the other warps' waits.
    if (b.few() && warp == kWarps - 2 && !ep_take_ends(b)) return;
    // No more warps than there are experts for.
    if (warp * kWarpSize >= b.p.experts.count(b.rank()) && warp != 0) return;
    if (!(b.fixed() ? wait_flags(warp == 0) : wait_rows(warp == 0))) return;
    if (!b.p.masking.late) take_experts();
  }
  // With late masks: after run(), when `masked` is what has been decided for all.
  CROSSDOCK_DEVICE void run_late() const {
    if (warp_index() == 0) drop_rows();
    take_experts();
  }

 private:
  // By a warp: those of sources that have not come.
  CROSSDOCK_DEVICE void drop_rows() const {
    const u32 lane = lane_index();
    u32 rows = lane * b.p.stride;
    if (lane < b.world()) {
      u32* end = b.p.result.source_ends + lane;
      if (b.talks_to(lane)) {
        rows = ptx::ld_weak(end);
      } else {
        ptx::st_weak(end, rows);
      }
    }
    ep_tell_rows(b, rows);
  }
  CROSSDOCK_DEVICE void take_experts() const {
    const u32 count = b.p.experts.count(b.rank());
    const bool without_some = b.reuses() && b.masked != 0;
    CROSSDOCK_NO_UNROLL
    for (u32 first = warp_index() * kWarpSize; first < count; first += kWarps * kWarpSize) {
      if (without_some) count_left_out(first, min_of(count - first, kWarpSize));
      if (first + lane_index() < count) take_expert(first + lane_index());
    }
  }
  // Whether it is still worth waiting for.
  CROSSDOCK_DEVICE bool comes(u32 source) const {
    return !b.p.masking.late || !is_masked(masked_ranks(b.p.masking), source);
  }
  // Without masks: a lane a source.
  CROSSDOCK_DEVICE bool wait_rows(bool first) const {
    const u32 lane = lane_index();
    bool came = true;
    if (lane < b.world()) {
      const u64 start = ptx::global_timer();
      came = wait_arrival(b.p.common, b.arrivals(lane), total, lane);
      if (first) note_wait(lane, start);
      if (first && came) ptx::st_weak(b.p.state->arrived + lane, total);
    }
    return all_came(came);
  }
  // With masks: a lane a block. A later epoch will do: its source has been here for this one, too.
  CROSSDOCK_DEVICE bool wait_flags(bool first) const {
    const u64 start = ptx::global_timer();
    const u32 most = b.p.areas.most_blocks;
    bool came = true;
    for (u32 i = lane_index(); i < b.world() * most && came; i += kWarpSize) {
      const u32 source = i / most;
      const u32 blocks = b.p.source_blocks[source];
      if (i % most >= blocks || !b.talks_to(source) || !comes(source)) continue;
      came = wait_flag_of(source, i % most);
      if (first && i % most == blocks - 1) note_wait(source, start);
    }
    return all_came(came);
  }
  CROSSDOCK_DEVICE bool wait_flag_of(u32 source, u32 block) const {
    const u32* flag = b.block_flag(source, block);
    return wait_or_mask(b.p.common, b.p.masking,
                        {b.p.masking.late ? Phase::kSourceFlag : Phase::kArrival, source, b.epoch},
                        AcquireSys{flag}, Reached{b.epoch}) != Came::kAbort;
  }
  CROSSDOCK_DEVICE void note_wait(u32 source, u64 start) const {
    u64* waited = b.p.statistics.source_wait_ns;
    if (waited != nullptr) ptx::red_add_relaxed_gpu(waited + source, ptx::global_timer() - start);
  }
  CROSSDOCK_DEVICE static bool all_came(bool mine) {
    if (ptx::any(kFullMask, !mine)) return false;
    ptx::sync_warp(kFullMask);  // what each lane has acquired is for all
    return true;
  }
  // Selections of the expert in this epoch.
  CROSSDOCK_DEVICE u32 added(u32 expert) const {
    u32* previous = b.p.expert_previous + b.total_index(expert);
    const u32 total_now = ptx::ld_relaxed_sys(b.expert_total(expert));
    const u32 selections = total_now - ptx::ld_weak(previous);
    ptx::st_weak(previous, total_now);
    return selections;
  }
  // With masks: of the sources that have come. A block that has not chosen it says nothing.
  CROSSDOCK_DEVICE u32 selected(u32 expert) const {
    u32 selections = 0;
    CROSSDOCK_NO_UNROLL
    for (u32 source = 0; source < b.world(); ++source) {
      if (!b.talks_to(source)) continue;
      const u64* words = b.block_experts(source) + expert;
      const u32 blocks = b.p.source_blocks[source];
      for (u32 first = 0; first < blocks; first += kEpBatch) {
        u64 word[kEpBatch];
        CROSSDOCK_UNROLL
        for (u32 j = 0; j < kEpBatch; ++j) {
          const u32 block = min_of(first + j, blocks - 1);
          word[j] = ptx::ld_relaxed_sys(words + u64{block} * b.p.areas.most_experts);
        }
        CROSSDOCK_UNROLL
        for (u32 j = 0; j < kEpBatch; ++j)
          if (first + j < blocks && word_epoch(word[j]) == b.epoch)
            selections += word_value(word[j]);
      }
    }
    return selections;
  }
  // By a warp, in the place of `number` experts from `first` in the histogram, which nobody else
  // uses by now: their choices in a reused routing by sources that have not come this time.
  CROSSDOCK_DEVICE void count_left_out(u32 first, u32 number) const {
    u32* left_out = b.template at<u32>(b.shared.histogram) + first;
    if (lane_index() < number) ptx::st_shared(left_out + lane_index(), 0u);
    ptx::sync_warp(kFullMask);
    CROSSDOCK_NO_UNROLL
    for (u32 source = 0; source < b.world(); ++source) {
      if (b.talks_to(source)) continue;
      const u32 rows = ptx::ld_weak(b.p.reuse.source_ends + source) - source * b.p.stride;
      ep_count_choices(b.p.reuse.ids + u64{source} * b.p.stride * b.p.input.top_k,
                       rows * b.p.input.top_k, left_out, first, number);
    }
    ptx::sync_warp(kFullMask);
  }
  // As in the earlier dispatch, without the sources that have not come this time.
  CROSSDOCK_DEVICE u32 selected_again(u32 expert) const {
    const u32 all = ptx::ld_weak(b.p.reuse.expert_counts + expert);
    if (b.masked == 0) return all;
    return all - ptx::ld_shared(b.template at<u32>(b.shared.histogram) + expert);
  }
  CROSSDOCK_DEVICE void take_expert(u32 i) const {
    const u32 selections = b.reuses() ? selected_again(i) : b.fixed() ? selected(i) : added(i);
    ptx::st_weak(b.p.result.expert_counts + i, selections);
    u64* kept = b.reuses() ? nullptr : b.p.statistics.expert_selections;
    if (kept != nullptr && selections != 0) ptx::red_add_relaxed_gpu(kept + i, u64{selections});
    if (b.p.result.host_experts != nullptr)
      put_epoch_word(b.p.result.host_experts + i, b.p.result.host_ticket, selections);
  }
};

}  // namespace crossdock::device
