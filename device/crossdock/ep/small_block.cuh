// What the roles of ep_small_dispatch share: a block's view of its launch, and the plan, which
// every block that sends makes by itself for all tokens of the rank: they are few.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/masking.cuh>
#include <crossdock/layout/ep_small.cuh>

namespace crossdock::device {

template <EpSmallConfig kConfig>
struct EpSmallBlock {
  static constexpr EpSmallConfig kVariant = kConfig;
  static constexpr u32 kIdsAtOnce = 8;  // loads in flight of a thread

  const EpSmallParams& p;
  EpSmallShared shared;
  u32 epoch = 0;   // of this use of the slot, from 1 on
  u32 masked = 0;  // ranks that this launch goes on without

  CROSSDOCK_DEVICE explicit EpSmallBlock(const EpSmallParams& params)
      : p(params),
        shared(ep_small_shared(kConfig, params.input.row_bytes, params.view.world,
                               params.experts.experts, params.tokens)) {}

  template <class T>
  CROSSDOCK_DEVICE T* at(u32 offset) const {
    return reinterpret_cast<T*>(dynamic_shared() + offset);
  }
  CROSSDOCK_DEVICE u32 world() const { return p.view.world; }
  CROSSDOCK_DEVICE u32 rank() const { return p.view.rank; }
  // Whether rank `peer` exists and is not masked.
  CROSSDOCK_DEVICE bool talks_to(u32 peer) const {
    return peer < world() && !is_masked(masked, peer);
  }
  CROSSDOCK_DEVICE u32 groups() const { return ceil_div(p.tokens, kWarpSize); }

  // This rank's words of the slot; `view.map` gives those of a peer.
  CROSSDOCK_DEVICE u64* header(u32 source) const {
    return p.view.at<u64>(p.areas.headers) + source;
  }
  CROSSDOCK_DEVICE u32* flags(u32 source) const {
    return p.view.at<u32>(p.areas.flags) + source * kEpMaxSendBlocks;
  }
  CROSSDOCK_DEVICE u64* counts(u32 source) const {
    return p.view.at<u64>(p.areas.counts) + u64{source} * p.areas.most_experts;
  }
  CROSSDOCK_DEVICE u32* free_word(u32 destination) const {
    return p.view.at<u32>(p.areas.free) + destination;
  }
  CROSSDOCK_DEVICE u8* output(u32 destination) const {
    return p.view.at<u8>(p.output_offset, destination);
  }

  // For blocks that receive, after grid_dependency_wait; by all threads. False: the rank has
  // aborted before.
  CROSSDOCK_DEVICE bool join() {
    const ThreadGroup all = ThreadGroup::block();
    masked = masked_ranks(p.masking);
    u32* shared_epoch = at<u32>(shared.epoch);
    // Of the launch that has sent, if that was another one.
    if (all.leader()) *shared_epoch = read_epoch(&p.state->dispatch) - (p.sends ? 0 : 1);
    if (!may_start(p.common)) return false;  // also the barrier for the epoch
    epoch = *shared_epoch;
    if (all.leader() && p.sends) pass_epoch(&p.state->dispatch, epoch);
    ptx::sync_warp(kFullMask);
    return true;
  }

  // ---- plan -------------------------------------------------------------------------------------

  CROSSDOCK_DEVICE i64 id(u64 index) const {
    if (p.wide_ids)
      return static_cast<i64>(ptx::ld_weak(static_cast<const u64*>(p.input.ids) + index));
    return ptx::ld_weak(static_cast<const i32*>(p.input.ids) + index);
  }
  CROSSDOCK_DEVICE u32& route(u32 group, u32 destination) const {
    return at<u32>(shared.routes)[group * world() + destination];
  }
  // By all threads, then a barrier: which tokens go where; with kCounts how often each expert is
  // chosen. False: an id is out of range, a fault has been raised.
  template <bool kCounts>
  CROSSDOCK_DEVICE bool make_routes() const {
    bool valid = true;
    // Not from warp 0 on: it has the first row to load.
    const u32 warp = (warp_index() + kConfig.warps - 1) % kConfig.warps;
    for (u32 group = warp; group < groups(); group += kConfig.warps) {
      const u32 token = group * kWarpSize + lane_index();
      u32 ranks = 0;
      if (token < p.tokens) valid &= destinations<kCounts>(token, ranks);
      ranks &= ~masked;
      u32 mine = 0;
      for (u32 d = 0; d < world(); ++d) {
        const u32 tokens = ptx::ballot(kFullMask, (ranks >> d & 1u) != 0);
        if (lane_index() == d) mine = tokens;
      }
      if (lane_index() < world()) route(group, lane_index()) = mine;
    }
    return valid;
  }
  // Tokens of the groups before `group` that go to `destination`.
  CROSSDOCK_DEVICE u32 before(u32 group, u32 destination) const {
    u32 sum = 0;
    for (u32 g = 0; g < group; ++g)
      sum += popcount(route(g, destination));
    return sum;
  }
  // The place of a token at `destination`, or kNoRow.
  CROSSDOCK_DEVICE u32 place(u32 token, u32 destination) const {
    const u32 group = token / kWarpSize;
    const EpRoute word{route(group, destination), rank() * p.stride};
    const u32 place = word.row_of(token % kWarpSize);
    return place == kNoRow ? kNoRow : place + before(group, destination);
  }

 private:
  template <bool kCounts>
  CROSSDOCK_DEVICE bool destinations(u32 token, u32& ranks) const {
    const u64 first = u64{token} * p.input.top_k;
    i64 wrong = -1;
    for (u32 k = 0; k < p.input.top_k; k += kIdsAtOnce) {
      i64 ids[kIdsAtOnce];
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kIdsAtOnce; ++i)
        ids[i] = k + i < p.input.top_k ? id(first + k + i) : -1;
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kIdsAtOnce; ++i) {
        const bool valid = ids[i] >= 0 && ids[i] < p.experts.experts;
        if (kCounts && valid) ptx::red_add_shared(at<u32>(shared.histogram) + ids[i], 1u);
        if (valid) ranks |= 1u << p.experts.owner(static_cast<u32>(ids[i]));
        if (!valid && ids[i] != -1) wrong = ids[i];
      }
    }
    if (wrong == -1) return true;
    raise_fault(p.common, {Phase::kRouting, rank(), token}, static_cast<u64>(wrong), 0);
    return false;
  }
};

}  // namespace crossdock::device
