// The blocks of ep_small_dispatch that send.
//
//   warps that move rows                         the last warp, of block 0 only
//     first row -> shared memory                   the slot's earlier use is over: told, if combine
//     peers' words: is the slot free there?        has not
//   all: ids -> masks of destinations -> barrier
//     row -> (cast) -> bulk stores                 headers: rows and blocks to come
//     ids, weights, token number, scales           selections of each expert
//     bulk_wait                                    routes, for combine
//   barrier; one fence for the system; flags[rank][block] = epoch at every destination
//
//   lane i of a warp owns destination (rank + i) % world
//
// A warp that has to give up first lets its loads land: a copy still on its way must not meet the
// next block's shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/cast.cuh>
#include <crossdock/ep/small_block.cuh>
#include <crossdock/ptx/bulk.cuh>

namespace crossdock::device {

// What the lane's destination has said of the slot: so many of its uses there are over.
template <class Block>
struct EpSmallCredit {
  const Block& b;
  u32 destination;  // world or more: the lane has none
  u32 seen = 0;

  // Early, so that the load has ended when it is needed.
  CROSSDOCK_DEVICE void look() {
    if (destination < b.world()) seen = ptx::ld_acquire_sys(b.free_word(destination));
  }
  // All that the destinations had in the slot before has been read there. The lanes agree.
  CROSSDOCK_DEVICE bool wait() const {
    bool free = true;
    const u32 uses = b.epoch - 1;
    if (destination < b.world()) {
      if (static_cast<i32>(seen - uses) < 0)
        free = wait_counter(b.p.common, b.free_word(destination),
                            {Phase::kSlotFree, destination, uses});
      ptx::fence_proxy_async();
    }
    return !ptx::any(kFullMask, !free);
  }
};

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
    bool ready = credit.wait();
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
    const u32 target = lane < b.world() ? b.place(mine, destination()) : kNoRow;
    const Choice choice = next;
    if constexpr (kConfig.cast) {
      u8* place = b.template at<u8>(b.shared.casts + warp * b.shared.cast_bytes);
      (void)EpCast(stage(), place, b.p.output.row_bytes)
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

// The last warp of every block; in block 0 it tells everything but the rows.
template <class Block>
struct EpSmallTeller {
  static constexpr EpSmallConfig kConfig = Block::kVariant;
  const Block& b;
  u32 lane;
  u32 released = 0;
  EpSmallCredit<Block> credit;

  CROSSDOCK_DEVICE explicit EpSmallTeller(const Block& block)
      : b(block), lane(lane_index()), credit{block, lane_index()} {}

  CROSSDOCK_DEVICE bool works() const { return block_index() == 0; }
  // Shared memory only.
  CROSSDOCK_DEVICE void prepare() const {
    if (!works()) return;
    for (u32 i = lane; i < b.p.experts.experts; i += kWarpSize)
      b.template at<u32>(b.shared.histogram)[i] = 0;
    ptx::sync_warp(kFullMask);
  }
  CROSSDOCK_DEVICE void begin() {
    if (!works()) return;
    released = ptx::ld_weak(&b.p.state->released.value);
    credit.look();
  }
  // After the plan. False when the rank aborts; the lanes agree.
  CROSSDOCK_DEVICE bool run(bool failed) const {
    if (!works()) return true;
    const u32 uses = b.epoch - 1;
    // Whoever came before in the stream has read the slot.
    if (static_cast<i32>(released - uses) < 0) {
      ptx::fence_acq_rel_sys();
      if (lane < b.world()) ptx::st_relaxed_sys(b.p.view.map(b.free_word(b.rank()), lane), uses);
      if (lane == 0) ptx::st_weak(&b.p.state->released.value, uses);
    }
    if (!failed && !credit.wait()) return false;
    tell_headers(failed);
    if (failed) return false;
    tell_counts();
    write_routes();
    return true;
  }
  // This rank has given up, because of whom its abort flag says.
  CROSSDOCK_DEVICE void tell_headers(bool failed) const {
    if (lane >= b.world()) return;
    EpHeader header = EpHeader::make(b.before(b.groups(), lane), b.p.send_blocks, b.p.output);
    if (failed) {
      // An atomic: a load might still return the value from before another thread raised the flag.
      u32* abort = &b.p.common.control->abort.value;
      header = EpHeader::give_up(abort_peer(ptx::atom_or_relaxed_gpu(abort, 0u)));
    }
    put_epoch_word(b.p.view.map(b.header(b.rank()), lane), b.epoch, header.value);
  }

 private:
  CROSSDOCK_DEVICE void tell_counts() const {
    u32* histogram = b.template at<u32>(b.shared.histogram);
    const u32 total = b.p.tokens * b.p.input.top_k;
    for (u32 first = 0; first < total; first += kWarpSize * Block::kIdsAtOnce) {
      i64 ids[Block::kIdsAtOnce];
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < Block::kIdsAtOnce; ++j) {
        const u32 i = first + j * kWarpSize + lane;
        ids[j] = i < total ? b.id(i) : -1;
      }
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < Block::kIdsAtOnce; ++j)
        if (ids[j] >= 0) ptx::red_add_shared(histogram + ids[j], 1u);
    }
    ptx::sync_warp(kFullMask);
    for (u32 expert = lane; expert < b.p.experts.experts; expert += kWarpSize) {
      const u32 owner = b.p.experts.owner(expert);
      u32* there = b.p.view.map(b.counts(b.rank()), owner);
      ptx::st_weak(there + (expert - b.p.experts.first(owner)), histogram[expert]);
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
