// The block of ep_small_dispatch that tells: that the slot here is free, how many rows come from
// this rank, how often it has chosen each expert; and the routes, for combine. And what all that
// send ask: whether the slot is free at their destinations.
//
//   zero the histogram, barrier
//   warp 0: fence for the system, beside the loads of all others
//   all: ids -> masks of destinations, selections of each expert -> barrier
//   warp 0: free[rank] = epoch - 1 at all, unless combine has told
//   free there? -> its header (warp 0); all free? -> counts (all), routes (the last warp)
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/small_block.cuh>

namespace crossdock::device {

// What the lane's destination has said of the slot: so many of its uses there are over.
template <class Block>
struct EpSmallCredit {
  const Block& b;
  u32 destination;  // world or more: the lane has none
  u32 seen = 0;
  bool open = false;  // after wait(): the lane may store there

  // Early, so that the load has ended when it is needed.
  CROSSDOCK_DEVICE void look() {
    if (b.talks_to(destination)) seen = ptx::ld_acquire_sys(b.free_word(destination));
  }
  // All that the destinations had in the slot before has been read there; a lane calls `opened` as
  // soon as its own is, whatever the others still wait for. False when the rank aborts; the lanes
  // agree.
  template <class Opened>
  CROSSDOCK_DEVICE bool wait(const Opened& opened) {
    Came came = Came::kYes;
    if (b.talks_to(destination)) {
      const u32 uses = b.epoch - 1;
      const u32* word = b.free_word(destination);
      const auto is_free = [&](u64 now) {
        // This rank's own experts have come before in the stream.
        if (destination != b.rank() && static_cast<i32>(static_cast<u32>(now) - uses) < 0)
          return false;
        opened();
        return true;
      };
      if (!is_free(seen))
        came = wait_or_mask(
            b.p.common, b.p.masking, {Phase::kSlotFree, destination, uses},
            [&] { return u64{ptx::ld_acquire_sys(word)}; }, is_free);
      ptx::fence_proxy_async();
      open = came == Came::kYes;
    }
    return !ptx::any(kFullMask, came == Came::kAbort);
  }
};

// Instead of rows: this rank has given up, because of whom its abort flag says. By a warp.
template <class Block>
CROSSDOCK_DEVICE void ep_small_give_up(const Block& b) {
  if (!b.talks_to(lane_index())) return;
  // An atomic: a load might still return the value from before another thread raised the flag.
  u32* abort = &b.p.common.control->abort.value;
  const auto header = EpHeader::give_up(abort_peer(ptx::atom_or_relaxed_gpu(abort, 0u)));
  put_epoch_word(b.p.view.map(b.header(b.rank()), lane_index()), b.epoch, header.value);
}

template <class Block>
struct EpSmallTeller {
  static constexpr EpSmallConfig kConfig = Block::kVariant;
  const Block& b;
  u32 warp;
  u32 lane;
  u32 released = 0;
  EpSmallCredit<Block> credit;

  CROSSDOCK_DEVICE EpSmallTeller(const Block& block, u32 index)
      : b(block), warp(index), lane(lane_index()), credit{block, lane_index()} {}

  // Shared memory only; then a barrier.
  CROSSDOCK_DEVICE void prepare() const {
    for (u32 i = thread_index(); i < b.p.experts.experts; i += kConfig.threads())
      b.template at<u32>(b.shared.histogram)[i] = 0;
  }
  CROSSDOCK_DEVICE void begin() {
    credit.look();
    if (warp != 0) return;
    released = ptx::ld_weak(&b.p.state->released.value);
    // For the words of the slot: whoever came before in the stream has read it.
    ptx::fence_acq_rel_sys();
  }
  // After the plan. False when the rank aborts; the lanes agree.
  CROSSDOCK_DEVICE bool run() {
    if (warp == 0) release();
    // A header must not wait for another destination, which may be gone: it is what a peer waits
    // for first.
    const bool opened = credit.wait([&] {
      if (warp == 0) tell_header();
    });
    if (!opened) return false;
    if (warp == kConfig.warps - 1) write_routes();
    tell_counts();
    return true;
  }

 private:
  CROSSDOCK_DEVICE void release() const {
    const u32 uses = b.epoch - 1;
    if (static_cast<i32>(released - uses) >= 0) return;
    if (b.talks_to(lane)) ptx::st_relaxed_sys(b.p.view.map(b.free_word(b.rank()), lane), uses);
    if (lane == 0) ptx::st_weak(&b.p.state->released.value, uses);
  }
  CROSSDOCK_DEVICE void tell_header() const {
    const EpHeader header = EpHeader::make(b.before(b.groups(), lane), b.p.send_blocks, b.p.output);
    put_epoch_word(b.p.view.map(b.header(b.rank()), lane), b.epoch, header.value);
  }
  CROSSDOCK_DEVICE void tell_counts() const {
    const u32* histogram = b.template at<u32>(b.shared.histogram);
    const u32 open = ptx::ballot(kFullMask, credit.open);
    for (u32 expert = thread_index(); expert < b.p.experts.experts; expert += kConfig.threads()) {
      const u32 owner = b.p.experts.owner(expert);
      if ((open >> owner & 1u) != 0)
        put_epoch_word(
            b.p.view.map(b.counts(b.rank()), owner) + (expert - b.p.experts.first(owner)), b.epoch,
            histogram[expert]);
    }
  }
  CROSSDOCK_DEVICE void write_routes() const {
    if (lane >= b.world()) return;
    u32 place = b.rank() * b.p.stride;
    for (u32 group = 0; group < b.groups(); ++group) {
      const u32 tokens = b.route(group, lane);
      auto* word = reinterpret_cast<U32x2*>(b.p.result.routes + u64{group} * b.world() + lane);
      ptx::st_weak(word, U32x2{tokens, place});
      place += popcount(tokens);
    }
  }
};

}  // namespace crossdock::device
