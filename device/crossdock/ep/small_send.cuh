// The blocks of ep_small_dispatch that send.
//
//   warp: first row -> shared memory; is the slot free at the destinations?
//   all: ids -> masks of destinations -> barrier
//   warp: row -> (cast) -> bulk stores; ids, weights, token number, scales
//   bulk_wait -> barrier; one fence for the system
//   flags[rank][block] = epoch at every destination
//
//   lane i of a warp owns destination (rank + i) % world
//
// A warp that has to give up first lets its loads land: a copy still on its way must not meet the
// next block's shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/cast.cuh>
#include <crossdock/ep/small_tell.cuh>
#include <crossdock/ptx/bulk.cuh>

namespace crossdock::device {

template <class Block>
struct EpSmallWarp {
  static constexpr EpSmallConfig kConfig = Block::kVariant;

  // What goes with a row: a lane a choice.
  struct Choice {
    i64 id = -1;
    float weight = 0;
  };
  const Block& b;
  u32 warp;
  u32 lane;
  u32 loaded = 0;  // rows of this warp
  u32 stored = 0;
  EpSmallCredit<Block> credit;
  u8* output = nullptr;
  Choice next;

  CROSSDOCK_DEVICE EpSmallWarp(const Block& block, u32 index)
      : b(block), warp(index), lane(lane_index()), credit{block, owned(block)} {}

  // Shared memory only.
  CROSSDOCK_DEVICE void prepare() const {
    if (lane == 0) {
      ptx::mbarrier_init(full(), 1);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_warp(kFullMask);
  }
  // Before the plan: the first load, and whether the slot is free.
  CROSSDOCK_DEVICE void begin() {
    load();
    credit.look();
    if (lane < b.world()) output = b.output(destination());
  }
  // Instead of run() when the plan has failed.
  CROSSDOCK_DEVICE void give_up() {
    for (; stored < loaded; ++stored)
      settle_stage(b.p.common, full(), stored & 1u);
  }
  // After the plan. False when the rank aborts. All lanes agree.
  CROSSDOCK_DEVICE bool run() {
    if (loaded == 0) return true;
    bool ready = credit.wait([] {});
    while (ready && stored < loaded)
      ready = await() && move();
    if (!ready) give_up();
    ptx::bulk_wait<0>();
    return ready;
  }

 private:
  CROSSDOCK_DEVICE static u32 owned(const Block& block) {
    const u32 lane = lane_index();
    if (lane >= block.world()) return kNoPeer;
    const u32 d = block.rank() + lane;
    return d < block.world() ? d : d - block.world();
  }
  CROSSDOCK_DEVICE u32 destination() const { return credit.destination; }
  CROSSDOCK_DEVICE ptx::MBarrier* full() const {
    return b.template at<ptx::MBarrier>(b.shared.barriers) + warp;
  }
  CROSSDOCK_DEVICE u8* stage() const { return b.template at<u8>(warp * b.shared.stage_bytes); }
  // Neighbours in number are in different blocks.
  CROSSDOCK_DEVICE u32 token(u32 n) const {
    return (n * kConfig.warps + warp) * b.p.send_blocks + block_index();
  }

  CROSSDOCK_DEVICE void load() {
    const u32 mine = token(loaded);
    if (mine >= b.p.tokens) return;
    ++loaded;
    if (lane == 0) {
      const u32 bytes = b.p.input.row_bytes;
      ptx::mbarrier_arrive_expect_tx(full(), bytes);
      ptx::bulk_load(stage(), b.p.input.rows + mine * b.p.input.row_stride, bytes, full());
    }
    if (lane >= b.p.input.top_k) return;
    const u64 at = u64{mine} * b.p.input.top_k + lane;
    next.id = b.id(at);
    if (b.p.input.weights != nullptr) next.weight = ptx::ld_weak(b.p.input.weights + at);
  }
  CROSSDOCK_DEVICE bool await() const {
    const bool came = wait_stage(b.p.common, full(), stored & 1u);
    return !ptx::any(kFullMask, !came);
  }
  CROSSDOCK_DEVICE bool move() {
    const u32 mine = token(stored++);
    const u32 target = credit.open ? b.place(mine, destination()) : kNoRow;
    const Choice choice = next;
    if constexpr (kConfig.cast) {
      u8* place = b.template at<u8>(b.shared.casts + warp * b.shared.cast_bytes);
      (void)EpCast(stage(), place, b.p.output.row_bytes, b.p.output.cast_ue8m0)
          .run(
              [] {  // the stores of the row before have read it
                ptx::bulk_wait_read<0>();
                ptx::sync_warp(kFullMask);
              },
              [&] {
                load();
                return true;
              });
      ptx::fence_proxy_async_shared();
      ptx::sync_warp(kFullMask);
      store(place, target);
      store_cast_scales(place, target);
    } else {
      store(stage(), target);
      store_scales(mine, target);
    }
    store_choices(mine, target, choice);
    if constexpr (!kConfig.cast) {
      ptx::bulk_wait_read<0>();
      ptx::sync_warp(kFullMask);
      load();
    }
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
  }

  // ---- what goes with a row: by all lanes, for one destination after the other ------------------

  template <class Body>
  CROSSDOCK_DEVICE void for_each_target(u32 target, const Body& body) const {
    for (u32 left = ptx::ballot(kFullMask, target != kNoRow); left != 0; left &= left - 1) {
      const u32 owner = lowest_bit(left);
      const u64 block = ptx::shuffle(kFullMask, reinterpret_cast<u64>(output), owner);
      const u32 to = b.rank() + owner;
      body(to < b.world() ? to : to - b.world(), reinterpret_cast<u8*>(block),
           ptx::shuffle(kFullMask, target, owner));
    }
  }
  CROSSDOCK_DEVICE void store_choices(u32 token, u32 target, const Choice& choice) const {
    const EpOutputLayout& out = b.p.output;
    for_each_target(target, [&](u32 to, u8* block, u32 row) {
      const u32 local = static_cast<u32>(choice.id) - b.p.experts.first(to);
      const bool here = choice.id >= 0 && local < b.p.experts.count(to);
      const u64 at = u64{row} * b.p.input.top_k + lane;
      if (lane < b.p.input.top_k) {
        ptx::st_weak(reinterpret_cast<i32*>(block + out.ids) + at,
                     here ? static_cast<i32>(local) : -1);
        if (b.p.input.weights != nullptr)
          ptx::st_weak(reinterpret_cast<float*>(block + out.weights) + at,
                       here ? choice.weight : 0.0f);
      }
      if (lane == 0) ptx::st_weak(reinterpret_cast<u32*>(block + out.sources) + row, token);
    });
  }
  // Scales by column lie apart: one word each.
  CROSSDOCK_DEVICE void store_cast_scales(const u8* place, u32 target) const {
    const EpOutputLayout& out = b.p.output;
    if (out.scale_columns == 0) return;
    const auto* scales = reinterpret_cast<const u32*>(place + out.row_bytes);
    for_each_target(target, [&](u32, u8* block, u32 row) {
      auto* plane = reinterpret_cast<u32*>(block + out.scales) + row;
      for (u32 i = lane; i < out.scale_bytes / 4; i += kWarpSize)
        ptx::st_weak(plane + u64{i} * out.scale_columns, ptx::ld_shared(scales + i));
    });
  }
  CROSSDOCK_DEVICE void store_scales(u32 token, u32 target) const {
    const EpOutputLayout& out = b.p.output;
    const auto* scales =
        reinterpret_cast<const u32*>(b.p.input.scales + token * b.p.input.scale_stride);
    for (u32 first = 0; first < out.scale_bytes / 4; first += kWarpSize) {
      const u32 i = first + lane;
      const bool inside = i < out.scale_bytes / 4;
      const u32 word = inside ? ptx::ld_weak(scales + i) : 0;
      for_each_target(target, [&](u32, u8* block, u32 row) {
        const u64 at = out.scale_columns != 0 ? u64{i} * out.scale_columns + row
                                              : u64{row} * (out.scale_bytes / 4) + i;
        if (inside) ptx::st_weak(reinterpret_cast<u32*>(block + out.scales) + at, word);
      });
    }
  }
};

}  // namespace crossdock::device
