// The dispatch warps of ep_dispatch: each takes tokens of this rank and stores every one once to
// each of its destinations, straight into its final row.
//
//   lane i owns destination (rank + i) % world: its output block, and the bulk stores to it
//
//   load    stage free (bulk_wait_read of the store before last), bulk load      -> full[stage]
//   await   wait full[stage]
//   move    bulk store to the destinations; commit
//
// With a cast the row is read from its stage and written as e4m3 to a place of its own, from which
// it is stored; the stage is free for the next load as soon as all of it is in registers.
//
// A block's first tokens are dealt to its warps and loaded before the plan is known. The rest of
// all blocks is one pool, taken token by token: under load some SMs get a smaller share of the
// wire, and a static split would wait for them. A token of another block is routed by the words
// that block has published (`routed`, release) in device memory.
//
// A warp that has to give up first lets its loads land: a copy still on its way must not meet the
// next block's shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/cast.cuh>
#include <crossdock/ep/plan.cuh>
#include <crossdock/ep/row_flags.cuh>

namespace crossdock::device {

template <class Block>
struct EpDispatchWarp {
  static constexpr EpDispatchConfig kConfig = Block::kVariant;
  // Loads beyond the stores; the other stages drain. Not more: a stage can be loaded only when its
  // last row has drained, and draining takes longest of all.
  static constexpr u32 kAhead = 1;
  static_assert(kConfig.cast ? kConfig.stages == 1 : kConfig.stages > kAhead);
  static constexpr u32 kNone = 0xffffffffu;

  const Block& b;
  u32 warp;
  u32 lane;
  u32 fixed;       // tokens of the block that are dealt to its warps
  u32 loaded = 0;  // tokens of this warp
  u32 stored = 0;
  u8* output = nullptr;  // of the lane's destination
  u32 base = 0;          // the block's first row there
  bool pool_left = true;
  EpNoteWriter<Block> notes;  // with flag warps

  CROSSDOCK_DEVICE EpDispatchWarp(const Block& block, u32 index)
      : b(block),
        warp(index),
        lane(lane_index()),
        fixed(ep_dealt(kConfig.dispatch_warps, b.p.tokens.per_block)),
        notes(block, index) {}

  // Shared memory only.
  CROSSDOCK_DEVICE void prepare() const {
    if (lane == 0) {
      for (u32 i = 0; i < kConfig.stages; ++i)
        ptx::mbarrier_init(full(i), 1);
      if constexpr (kConfig.flag_warps != 0) notes.prepare();
      ptx::fence_mbarrier_init();
    }
    ptx::sync_warp(kFullMask);
  }
  // Before the plan: the first load.
  CROSSDOCK_DEVICE void begin() {
    if (own_tokens() != 0) load(b.first + warp);
  }
  // Instead of run() when the plan has failed.
  CROSSDOCK_DEVICE void give_up() {
    CROSSDOCK_NO_UNROLL
    for (; stored < loaded; ++stored)
      settle_stage(b.p.common, full(stored % kConfig.stages), parity(stored));
  }
  // After the plan. False when the rank aborts. All lanes agree.
  CROSSDOCK_DEVICE bool run(const EpPlan<Block>& plan) {
    if (lane < b.world()) {
      base = plan.base(destination());
      output = b.output(destination());
    }
    bool ready = true;
    while (ready && stored < loaded) {
      const u32 token = claim();
      ready = await() && move(token);
    }
    if (!ready) give_up();
    ptx::bulk_wait<0>();
    if constexpr (kConfig.flag_warps != 0) notes.end();
    return ready;
  }

 private:
  CROSSDOCK_DEVICE u32 destination() const {
    const u32 d = b.rank() + lane;
    return d < b.world() ? d : d - b.world();
  }
  CROSSDOCK_DEVICE ptx::MBarrier* full(u32 stage) const {
    return b.template at<ptx::MBarrier>(b.shared.barriers) + warp * kConfig.stages + stage;
  }
  CROSSDOCK_DEVICE u8* row(u32 stage) const {
    return b.template at<u8>((warp * kConfig.stages + stage) * b.shared.stage_bytes);
  }
  // The lane's row of the token in the stage; only this lane reads and writes it.
  CROSSDOCK_DEVICE u32& stage_row(u32 stage) const {
    return b.template at<u32>(
        b.shared.stage_rows)[(warp * kConfig.stages + stage) * kWarpSize + lane];
  }
  CROSSDOCK_DEVICE static u32 parity(u32 n) { return n / kConfig.stages & 1u; }

  // ---- tokens -----------------------------------------------------------------------------------

  // Of the fixed ones, this warp's.
  CROSSDOCK_DEVICE u32 own_tokens() const {
    const u32 all = min_of(fixed, b.count);
    return warp < all ? ceil_div(all - warp, kConfig.dispatch_warps) : 0;
  }
  // Asks for a token of the pool, early, so that the answer is there when it is needed. Lane 0.
  CROSSDOCK_DEVICE u32 claim() const {
    if (loaded < own_tokens() || !pool_left || lane != 0) return 0;
    return ptx::atom_add_relaxed_gpu(&b.p.state->pool[b.epoch & 1u].value, 1u);
  }
  CROSSDOCK_DEVICE bool load_next(u32 claimed) {
    if (loaded < own_tokens()) {
      load(b.first + warp + loaded * kConfig.dispatch_warps);
      return true;
    }
    const u32 blocks = b.p.tokens.blocks;
    const u32 pool = (b.p.tokens.per_block - fixed) * blocks;
    while (pool_left) {
      const u32 i = ptx::shuffle(kFullMask, claimed, 0);
      if (i >= pool) break;
      const u32 of_block = i % blocks;
      const u32 token = fixed + i / blocks;
      if (token < b.p.tokens.count(of_block)) return load_pooled(of_block, token);
      claimed = claim();  // the last blocks have fewer tokens
    }
    pool_left = false;
    return true;
  }
  // The load first: the route is needed only when the row is here.
  CROSSDOCK_DEVICE bool load_pooled(u32 of_block, u32 token) {
    load(b.p.tokens.first(of_block) + token);
    bool routed = true;
    if (lane == 0) {
      const u32* word = &b.p.state->routed[of_block];
      routed = wait_until(b.p.common, {Phase::kGridSync, kNoPeer, b.epoch}, AcquireGpu{word},
                          UpperIs<0>{b.epoch});
    }
    if (ptx::any(kFullMask, !routed)) return false;
    ptx::sync_warp(kFullMask);  // a vote orders no memory: what lane 0 has acquired is for all
    u32 target = kNoRow;
    if (lane < b.world() && output != nullptr) {
      const EpRoute* route = b.global_route(of_block, token / kWarpSize) + destination();
      const U32x2 word = ptx::ld_weak(reinterpret_cast<const U32x2*>(route));
      target = EpRoute{word.x, word.y}.row_of(token % kWarpSize);
    }
    stage_row((loaded - 1) % kConfig.stages) = target;
    return true;
  }

  // ---- the pipe ---------------------------------------------------------------------------------

  CROSSDOCK_DEVICE void load(u32 token) {
    // All lanes' stores but the last few have read their stages; lane 0 may fill the next one.
    if constexpr (!kConfig.cast) ptx::bulk_wait_read<kConfig.stages - kAhead>();
    ptx::sync_warp(kFullMask);
    const u32 stage = loaded++ % kConfig.stages;
    if (lane != 0) return;
    const u32 bytes = b.p.input.row_bytes;
    ptx::mbarrier_arrive_expect_tx(full(stage), bytes);
    ptx::bulk_load(row(stage), b.p.input.rows + token * b.p.input.row_stride, bytes, full(stage));
  }
  CROSSDOCK_DEVICE u32 row_to_store(u32 stage) const {
    if (stored >= own_tokens()) return stage_row(stage);
    if (output == nullptr) return kNoRow;  // no destination of the lane, or a masked one
    const u32 token = warp + stored * kConfig.dispatch_warps;
    const u32 relative = b.route(token / kWarpSize, destination()).row_of(token % kWarpSize);
    return relative == kNoRow ? kNoRow : base + relative;
  }
  CROSSDOCK_DEVICE bool await() {
    const bool came = wait_stage(b.p.common, full(stored % kConfig.stages), parity(stored));
    return !ptx::any(kFullMask, !came);
  }
  // The row that has come to its destinations, and the next one into a stage.
  CROSSDOCK_DEVICE bool move(u32 claimed) {
    const u32 stage = stored % kConfig.stages;
    const u32 target = row_to_store(stage);
    ++stored;
    if constexpr (kConfig.cast) {
      u8* place = b.template at<u8>(b.shared.casts + warp * b.shared.cast_bytes);
      const bool ok = EpCast(row(stage), place, b.p.output.row_bytes, b.p.output.cast_ue8m0)
                          .run(
                              [] {  // the stores of the row before have read it
                                ptx::bulk_wait_read<0>();
                                ptx::sync_warp(kFullMask);
                              },
                              [&] { return load_next(claimed); });
      ptx::fence_proxy_async_shared();
      ptx::sync_warp(kFullMask);
      store(place, target);
      return note(target) && ok;
    } else {
      store(row(stage), target);
      return load_next(claimed) && note(target);
    }
  }
  // For the flag of the row that has been stored. False when the rank aborts.
  CROSSDOCK_DEVICE bool note(u32 target) {
    if constexpr (kConfig.flag_warps != 0) return notes.put(target);
    return true;
  }
  CROSSDOCK_DEVICE void store(const u8* from, u32 target) const {
    const EpOutputLayout& out = b.p.output;
    if (target != kNoRow) {
      ptx::bulk_store(output + out.rows + u64{target} * out.row_bytes, from, out.row_bytes);
      if (kConfig.cast && out.scale_columns == 0)
        ptx::bulk_store(output + out.scales + u64{target} * out.scale_bytes, from + out.row_bytes,
                        out.scale_bytes);
    }
    ptx::sync_warp(kFullMask);  // one group for all lanes' stores
    ptx::bulk_commit();
    if (kConfig.cast && out.scale_columns != 0) store_scale_columns(from, target);
  }
  // Scales by column lie apart: one word each, by all lanes for one destination after the other.
  CROSSDOCK_DEVICE void store_scale_columns(const u8* from, u32 target) const {
    const EpOutputLayout& out = b.p.output;
    const auto* scales = reinterpret_cast<const u32*>(from + out.row_bytes);
    for (u32 left = ptx::ballot(kFullMask, target != kNoRow); left != 0; left &= left - 1) {
      const u32 owner = lowest_bit(left);
      const u64 block = ptx::shuffle(kFullMask, reinterpret_cast<u64>(output), owner);
      auto* plane =
          reinterpret_cast<u32*>(block + out.scales) + ptx::shuffle(kFullMask, target, owner);
      CROSSDOCK_NO_UNROLL
      for (u32 i = lane; i < out.scale_bytes / 4; i += kWarpSize)
        ptx::st_weak(plane + u64{i} * out.scale_columns, ptx::ld_shared(scales + i));
    }
  }
};

}  // namespace crossdock::device
