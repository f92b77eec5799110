// The notify warps of ep_dispatch: everything of a dispatch that is not a row.
//
//   before the plan   the slot is free again; where this rank's rows of the epoch go, to all
//   sources routes            published for the pool and for combine ends              how many
//   rows come from each source, to the host at once metadata          expert ids, weights, token
//   numbers and scales of every row, in runs: the tokens
//                     of a group that go to one rank have consecutive rows there
//   experts           selections of each expert, added up at its owner
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/ep/metadata.cuh>

namespace crossdock::device {

template <class Block>
struct EpNotifyWarp {
  static constexpr EpDispatchConfig kConfig = Block::kVariant;
  static constexpr u32 kFirstThread = kConfig.dispatch_warps * kWarpSize;
  static constexpr u32 kThreads = kConfig.notify_warps * kWarpSize;
  static constexpr u32 kBarrier = 1;

  const Block& b;
  u32 warp;  // 0 .. notify_warps - 1
  u32 lane;

  CROSSDOCK_DEVICE EpNotifyWarp(const Block& block, u32 index)
      : b(block), warp(index), lane(lane_index()) {}

  // Before the plan. False when the rank aborts.
  CROSSDOCK_DEVICE bool begin() const {
    for (u32 i = thread(); i < b.p.experts.experts; i += kThreads)
      b.template at<u32>(b.shared.histogram)[i] = 0;
    if (b.block != 0 || warp != 0) return true;
    if (lane == 0) ptx::st_relaxed_gpu(&b.p.state->pool[(b.epoch + 1) & 1u].value, 0u);
    bool free = true;
    if (lane < b.world()) free = slot_is_free(lane);
    if (ptx::any(kFullMask, !free)) return false;
    ptx::sync_warp(kFullMask);  // the slot is free of all sources
    if (lane < b.world())
      announce(b.p.view.map(b.output_word(b.rank()), lane), b.epoch,
               EpPlaceWord::make(b.p.output_offset, b.p.output).value);
    return true;
  }
  // After the plan. False when the rank aborts; the lanes of a warp agree.
  CROSSDOCK_DEVICE bool run(const EpPlan<Block>& plan) const {
    publish_routes(plan);
    bool ok = b.block != 0 || warp != 0 || take_ends();
    if (ok) ok = EpMetadata<Block>(b, warp).run(plan);
    // Whatever has happened: the notify warps meet in there.
    if (!b.reuses()) count_experts();
    return ok;
  }

 private:
  CROSSDOCK_DEVICE u32 thread() const { return thread_index() - kFirstThread; }

  // The rank `source` has read all that it needed of what the slot's input held before.
  CROSSDOCK_DEVICE bool slot_is_free(u32 source) const {
    if (b.p.slot == kNoSlot) return true;
    const u32* pulled = b.p.view.template at<u32>(b.p.areas.pulled + source * sizeof(PaddedWord));
    const u32 target = ptx::ld_weak(&b.p.state->free_at[b.p.slot][source]);
    return wait_counter(b.p.common, pulled, {Phase::kSlotFree, source, target});
  }
  CROSSDOCK_DEVICE void publish_routes(const EpPlan<Block>& plan) const {
    const u32 words = b.groups() * b.world();
    EpRoute* routes = b.global_route(b.block, 0);
    for (u32 i = thread(); i < words; i += kThreads) {
      const u32 destination = i % b.world();
      const EpRoute local = b.route(i / b.world(), destination);
      ptx::st_weak(reinterpret_cast<U32x2*>(routes + i),
                   U32x2{local.tokens, plan.base(destination) + local.row});
    }
    const ThreadGroup group{kBarrier, kFirstThread, kThreads};
    group.sync();
    // Pairs with the acquire of EpDispatchWarp::load_pooled.
    if (group.leader()) ptx::st_release_gpu(&b.p.state->routed[b.block], b.epoch);
  }
  // By one warp of block 0: where the rows of each source end, for the caller and the host.
  CROSSDOCK_DEVICE bool take_ends() const {
    bool got = true;
    if (lane < b.world()) {
      u64 end = 0;
      got = wait_tagged_word(b.p.common, b.end_word(lane), b.epoch, lane, end);
      if (got && ep_is_given_up(end)) got = b.pass_on(lane, end);
      const u32 rows = static_cast<u32>(end);
      if (got) got = same_routing(lane, rows, (end & kEpReused) != 0);
      if (got) ptx::st_weak(b.p.result.source_ends + lane, rows);
      if (got && lane == b.world() - 1 && b.p.result.host_rows != nullptr)
        put_epoch_word(b.p.result.host_rows, b.p.result.host_ticket, rows);
    }
    return !ptx::any(kFullMask, !got);
  }
  // A reused routing is that of all ranks, or of none.
  CROSSDOCK_DEVICE bool same_routing(u32 source, u32 end, bool reused) const {
    const u32 expected = b.reuses() ? ptx::ld_weak(b.p.reuse.source_ends + source) : end;
    if (reused == b.reuses() && end == expected) return true;
    raise_fault(b.p.common, {Phase::kReuse, source, expected}, end, 0);
    return false;
  }
  CROSSDOCK_DEVICE void count_experts() const {
    const ThreadGroup group{kBarrier, kFirstThread, kThreads};
    u32* histogram = b.template at<u32>(b.shared.histogram);
    const u64 from = u64{b.first} * b.p.input.top_k;
    const u32 total = b.count * b.p.input.top_k;
    for (u32 i = thread(); i < total; i += kThreads * kEpBatch) {
      i64 ids[kEpBatch];
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpBatch; ++j)
        ids[j] =
            i + j * kThreads < total ? ep_load_id<kConfig>(b.p.input, from + i + j * kThreads) : -1;
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpBatch; ++j)
        if (ids[j] >= 0) ptx::red_add_shared(histogram + ids[j], 1u);
    }
    group.sync();
    for (u32 expert = thread(); expert < b.p.experts.experts; expert += kThreads) {
      const u32 selections = histogram[expert];
      if (selections == 0) continue;
      const u32 owner = b.p.experts.owner(expert);
      u32* total_there = b.p.view.map(b.expert_total(expert - b.p.experts.first(owner)), owner);
      ptx::red_add_relaxed_sys(total_there, selections);
    }
  }
};

// The end of a dispatch, by warp 0 of block 0: all rows of all sources are here.
template <class Block>
struct EpDispatchFinish {
  const Block& b;

  CROSSDOCK_DEVICE void run() const {
    const u32 lane = lane_index();
    bool came = true;
    if (lane < b.world()) {
      const u32 total = ptx::ld_weak(b.p.state->arrived + lane) + b.p.source_blocks[lane];
      const u64 start = ptx::global_timer();
      came = wait_arrival(b.p.common, b.arrivals(lane), total, lane);
      if (came) ptx::st_weak(b.p.state->arrived + lane, total);
      u64* waited = b.p.statistics.source_wait_ns;
      if (waited != nullptr)
        ptx::st_weak(waited + lane, ptx::ld_weak(waited + lane) + ptx::global_timer() - start);
    }
    if (ptx::any(kFullMask, !came)) return;
    ptx::sync_warp(kFullMask);  // what each lane has acquired is for all
    take_experts();
  }

 private:
  // Selections of the expert in this epoch.
  CROSSDOCK_DEVICE u32 added(u32 expert) const {
    u32* previous = b.p.expert_previous + u64{b.epoch & 1u} * b.p.areas.most_experts + expert;
    const u32 total = ptx::ld_relaxed_sys(b.expert_total(expert));
    const u32 selections = total - ptx::ld_weak(previous);
    ptx::st_weak(previous, total);
    return selections;
  }
  CROSSDOCK_DEVICE void take_experts() const {
    const u32 experts = b.p.experts.count(b.rank());
    for (u32 i = lane_index(); i < experts; i += kWarpSize) {
      const u32 selections = b.reuses() ? ptx::ld_weak(b.p.reuse.expert_counts + i) : added(i);
      ptx::st_weak(b.p.result.expert_counts + i, selections);
      u64* kept = b.reuses() ? nullptr : b.p.statistics.expert_selections;
      if (kept != nullptr) ptx::st_weak(kept + i, ptx::ld_weak(kept + i) + selections);
      if (b.p.result.host_experts != nullptr)
        put_epoch_word(b.p.result.host_experts + i, b.p.result.host_ticket, selections);
    }
  }
};

}  // namespace crossdock::device
