// The notify warps of ep_dispatch: everything of a dispatch that is not a row.
//
//   beside the plan   the slot is free again; where this rank's rows of the epoch go, to all
//                     sources; where those of all destinations go
//   routes            published for the pool and for combine
//   ends              how many rows come from each source, to the host at once
//   metadata          expert ids, weights, token numbers and scales of every row, in runs: the
//                     tokens of a group that go to one rank have consecutive rows there
//   experts           selections of each expert, added up at its owner
//
// Where tokens are few, selections are counted beside the plan, and the host is told at the end.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/ep/dispatch_finish.cuh>
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

  // Shared memory only.
  CROSSDOCK_DEVICE void prepare() const {
    CROSSDOCK_NO_UNROLL
    for (u32 i = thread(); i < b.p.experts.experts; i += kThreads)
      b.template at<u32>(b.shared.histogram)[i] = 0;
  }
  // Before the epoch is known: the slot is free of all sources. False when the rank aborts.
  CROSSDOCK_DEVICE bool begin() const {
    if (b.block != 0 || warp != 0) return true;
    const bool free = !b.talks_to(lane) || slot_is_free(lane);
    ptx::sync_warp(kFullMask);
    // For the announcement: what the lanes have acquired, and what this rank did before. It takes a
    // microsecond, which nobody waits for here.
    ptx::fence_acq_rel_sys();
    return free;
  }
  // By one warp of block 0: where the rows of this rank go, or that it has given up.
  CROSSDOCK_DEVICE void announce_output(bool failed) const {
    if (b.block != 0 || warp != 0) return;
    if (b.talks_to(lane))
      put_tagged_word(
          b.p.view.map(b.output_word(b.rank()), lane), b.epoch,
          failed ? b.given_up() : EpPlaceWord::make(b.p.output_offset, b.p.output).value);
    if (lane == 0) ptx::st_relaxed_gpu(&b.p.state->pool[(b.epoch + 1) & 1u].value, 0u);
  }
  // Beside the plan. False when the rank aborts.
  CROSSDOCK_DEVICE bool open() const {
    if (counts_early()) count_experts();
    return warp != 0 || lane >= b.world() || b.wait_output(lane);
  }
  // After the plan. False when the rank aborts; the lanes of a warp agree.
  CROSSDOCK_DEVICE bool run(const EpPlan<Block>& plan) const {
    publish_routes(plan);
    const bool ok = b.few() || b.block != 0 || warp != 0 || ep_take_ends(b);
    const EpMetadata<Block> metadata(b, warp);
    if constexpr (kConfig.flag_warps == 0) {
      if (ok) metadata.run(plan, true, true);
    } else {
      // First what the places of rows follow from.
      if (ok) metadata.run(plan, true, false);
      tell_all(EpTold::kSelections, ok);
      if (ok) metadata.run(plan, false, true);
      tell_all(EpTold::kScales, ok);
    }
    // Whatever has happened: the notify warps meet in there.
    if (!counts_early() && !b.reuses()) count_experts();
    return ok;
  }

  // Of a block without tokens, by one warp.
  CROSSDOCK_DEVICE void tell_nothing() const {
    tell(EpTold::kSelections, b.talks_to(lane));
    tell(EpTold::kScales, b.talks_to(lane));
  }

 private:
  CROSSDOCK_DEVICE u32 thread() const { return thread_index() - kFirstThread; }
  // With masks only after a peer has said where its rows go: one that is let in again may still be
  // two launches behind, and read its words of that parity.
  CROSSDOCK_DEVICE bool counts_early() const { return b.few() && !b.reuses() && !b.fixed(); }

  // By one warp: what all notify warps have written, and met after, is at every rank that is told.
  CROSSDOCK_DEVICE void tell(EpTold what, bool told) const {
    if (!told) return;
    ptx::st_release_sys(b.p.view.map(b.told_word(what, b.rank(), b.block), lane), b.epoch);
  }
  // By the notify warps together; nothing when one of them has failed.
  CROSSDOCK_DEVICE void tell_all(EpTold what, bool ok) const {
    const ThreadGroup group{kBarrier, kFirstThread, kThreads};
    // A rank that did not come in time is told nothing: it may still read what came before.
    if (!group.any(!ok) && warp == 0) tell(what, b.talks_to(lane) && b.output(lane) != nullptr);
  }

  // The rank `source` has read all that it needed of what the slot's input held before.
  CROSSDOCK_DEVICE bool slot_is_free(u32 source) const {
    if (b.p.slot == kNoSlot) return true;
    const u32* pulled = b.p.view.template at<u32>(b.p.areas.pulled + source * sizeof(PaddedWord));
    const u32 target = ptx::ld_weak(&b.p.state->free_at[b.p.slot][source]);
    return wait_or_mask(b.p.common, b.p.masking, {Phase::kSlotFree, source, target},
                        AcquireSys{pulled}, Reached{target}) != Came::kAbort;
  }
  CROSSDOCK_DEVICE void publish_routes(const EpPlan<Block>& plan) const {
    const u32 words = b.groups() * b.world();
    EpRoute* routes = b.global_route(b.block, 0);
    CROSSDOCK_NO_UNROLL
    for (u32 i = thread(); i < words; i += kThreads) {
      const u32 destination = i % b.world();
      const EpRoute local = b.route(i / b.world(), destination);
      ptx::st_weak(reinterpret_cast<U32x2*>(routes + i),
                   U32x2{local.tokens, plan.base(destination) + local.row});
    }
    if (!b.pooled()) return;
    const ThreadGroup group{kBarrier, kFirstThread, kThreads};
    group.sync();
    // Pairs with the acquire of EpDispatchWarp::load_pooled.
    if (group.leader()) ptx::st_release_gpu(&b.p.state->routed[b.block], b.epoch);
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
    CROSSDOCK_NO_UNROLL
    for (u32 expert = thread(); expert < b.p.experts.experts; expert += kThreads) {
      const u32 selections = histogram[expert];
      if (selections == 0) continue;
      const u32 owner = b.p.experts.owner(expert);
      if (!b.talks_to(owner)) continue;
      tell_expert(owner, expert - b.p.experts.first(owner), selections);
    }
  }
  CROSSDOCK_DEVICE void tell_expert(u32 owner, u32 local, u32 selections) const {
    if (!b.fixed())
      return ptx::red_add_relaxed_sys(b.p.view.map(b.expert_total(local), owner), selections);
    if (b.output(owner) == nullptr) return;  // it did not come
    u64* there = b.block_experts(b.rank()) + u64{b.block} * b.p.areas.most_experts + local;
    put_epoch_word(b.p.view.map(there, owner), b.epoch, selections);
  }
};

}  // namespace crossdock::device
