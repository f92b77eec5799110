// Kernels with a bug to choose at launch. They hold, in small, every synchronisation that the
// library's kernels use; each `Bug` removes or breaks one. mutation_test.cpp and race_test.cpp
// check that the twin finds every one and accepts the kernels without.
//
//   exchange: notify warps -> named barrier -> ready flag -> sending warps: bulk load, generic
//   trailer,
//             proxy fence, bulk store to the peers, weak meta words, tail += n (release sys)
//             -> receiving warps: tail (acquire sys), check -> barrier over all CTAs of all ranks
//   multiply: a producer warp fills a ring of tiles, a warpgroup multiplies them (wgmma) and frees
//   them
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/atomic.cuh>
#include <crossdock/ptx/bulk.cuh>
#include <crossdock/ptx/control.cuh>
#include <crossdock/ptx/descriptor.cuh>
#include <crossdock/ptx/fence.cuh>
#include <crossdock/ptx/mbarrier.cuh>
#include <crossdock/ptx/memory.cuh>
#include <crossdock/ptx/warp.cuh>
#include <crossdock/ptx/wgmma.cuh>

namespace crossdock::testing {

using namespace crossdock::device;

enum class Bug : u32 {
  kNone,
  kNoRelease,
  kNoAcquire,
  kGpuScope,
  kNoBulkWait,      // before a stage is loaded again
  kNoSyncWarp,      // before the tail is updated for the whole warp
  kNoProxyFence,    // between a generic store and the bulk store that reads it
  kNoNamedBarrier,  // before the ready flag
  kBarrierEarly,    // target of the barrier - 1
  kBarrierDead,     // + 1
  kEarlyFree,       // a tile is freed before the wgmma that reads it was waited for
  kNoFullWait,      // a tile is read before it has arrived
};

struct ExchangeParams {
  u32 rank;
  u32 world;
  u32 rows;  // a round
  u32 rounds;
  Bug bug;
  u8* heap;  // this rank's; the peers' are at `stride`
  u64 stride;
  const u8* input;  // [rounds][rows][kRowBytes]
  u32* slots;       // [rows], local
  u32* ready;       // local
  u32* errors;      // local
};

inline constexpr u32 kRowBytes = 128;
inline constexpr u32 kWireBytes = kRowBytes + 16;
inline constexpr u32 kStages = 2;
inline constexpr u32 kSenders = 2;  // warps of a CTA
inline constexpr u32 kNotifiers = 2;
inline constexpr u32 kExchangeThreads = (kSenders + kNotifiers) * kWarpSize;
inline constexpr u32 kExchangeShared = 128 + kSenders * kStages * kWireBytes;
inline constexpr u32 kMaxRows = 64;
inline constexpr u32 kMaxWorld = 8;

// The symmetric part of each rank's heap.
struct ExchangeWindow {
  u32 arrived;  // barrier
  u32 pad[31];
  u32 tails[kMaxWorld];
  u32 meta[kMaxWorld][kMaxRows];
  alignas(16) u8 rows[kMaxWorld][kMaxRows][kWireBytes];
};

inline u32 row_word(u32 rank, u32 round, u32 row, u32 i) {
  return rank << 24 | round << 16 | row << 8 | i;
}

struct Exchange {
  const ExchangeParams& p;

  ExchangeWindow* window(u32 rank) const {
    return reinterpret_cast<ExchangeWindow*>(p.heap + (u64{rank} - p.rank) * p.stride);
  }
  u32 slot_of(u32 round, u32 row) const { return (row * 5 + round) % p.rows; }

  void notify(u32 round) const {
    for (u32 row = thread_index(); row < p.rows; row += kNotifiers * kWarpSize)
      ptx::st_weak(p.slots + row, slot_of(round, row));
    if (p.bug != Bug::kNoNamedBarrier) ptx::barrier_sync(1, kNotifiers * kWarpSize);
    if (thread_index() == 0) ptx::st_release_gpu(p.ready, round + 1);
  }

  ptx::MBarrier* full(u32 warp, u32 stage) const {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared()) + warp * kStages + stage;
  }
  u8* stage_of(u32 warp, u32 stage) const {
    return dynamic_shared() + 128 + (warp * kStages + stage) * kWireBytes;
  }

  void send_row(u32 round, u32 row, u32 warp, u32 n) const {
    const u32 lane = lane_index();
    const u32 stage = n % kStages;
    u8* buffer = stage_of(warp, stage);
    if (p.bug != Bug::kNoBulkWait) {
      if (lane == 0) ptx::bulk_wait_read<kStages - 1>();
      ptx::sync_warp(kFullMask);
    }
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(full(warp, stage), kRowBytes);
      ptx::bulk_load(buffer, p.input + (u64{round} * p.rows + row) * kRowBytes, kRowBytes,
                     full(warp, stage));
    }
    while (!ptx::mbarrier_try_wait(full(warp, stage), n / kStages & 1))
      ptx::spin("row");
    if (lane < 4)
      ptx::st_shared(reinterpret_cast<u32*>(buffer + kRowBytes) + lane,
                     row_word(p.rank, round, row, 64 + lane));
    if (p.bug != Bug::kNoProxyFence) ptx::fence_proxy_async();
    ptx::sync_warp(kFullMask);
    const u32 slot = ptx::ld_weak(p.slots + row);
    if (lane == 0) {
      for (u32 peer = 0; peer < p.world; ++peer)
        ptx::bulk_store(window(peer)->rows[p.rank][slot], buffer, kWireBytes);
      ptx::bulk_commit();
    }
    if (lane < p.world)
      ptx::st_weak(&window(lane)->meta[p.rank][slot], row_word(p.rank, round, row, 99));
  }

  void send(u32 round, u32 warp, u32& n) const {
    const u32 lane = lane_index();
    if (lane == 0)
      while (ptx::ld_acquire_gpu(p.ready) < round + 1)
        ptx::spin("ready");
    ptx::sync_warp(kFullMask);
    u32 sent = 0;
    for (u32 row = block_index() * kSenders + warp; row < p.rows; row += grid_size() * kSenders) {
      send_row(round, row, warp, n++);
      ++sent;
    }
    if (lane == 0) ptx::bulk_wait<0>();
    if (p.bug != Bug::kNoSyncWarp) ptx::sync_warp(kFullMask);
    // One lane for all peers: the meta words of the other lanes are covered by the sync before.
    if (lane == 0)
      for (u32 peer = 0; peer < p.world; ++peer)
        add_tail(&window(peer)->tails[p.rank], sent);
    ptx::sync_warp(kFullMask);
  }
  void add_tail(u32* tail, u32 sent) const {
    if (p.bug == Bug::kNoRelease)
      ptx::red_add_relaxed_sys(tail, sent);
    else if (p.bug == Bug::kGpuScope)
      ptx::red_add_release_gpu(tail, sent);
    else
      ptx::red_add_release_sys(tail, sent);
  }

  void receive(u32 round, u32 source) const {
    const u32 lane = lane_index();
    const u32* tail = &window(p.rank)->tails[source];
    const u32 target = p.rows * (round + 1);
    if (lane == 0) {
      if (p.bug == Bug::kNoAcquire)
        while (ptx::ld_relaxed_sys(tail) != target)
          ptx::spin("tail");
      else
        while (ptx::ld_acquire_sys(tail) != target)
          ptx::spin("tail");
    }
    ptx::sync_warp(kFullMask);
    u32 wrong = 0;
    for (u32 row = 0; row < p.rows; ++row) {
      const u32 slot = slot_of(round, row);
      const auto* words = reinterpret_cast<const u32*>(window(p.rank)->rows[source][slot]);
      wrong += ptx::ld_weak(words + lane) != row_word(source, round, row, lane);
      if (lane < 4)
        wrong += ptx::ld_weak(words + 32 + lane) != row_word(source, round, row, 64 + lane);
      if (lane == 4)
        wrong +=
            ptx::ld_weak(&window(p.rank)->meta[source][slot]) != row_word(source, round, row, 99);
    }
    if (wrong != 0) ptx::red_add_relaxed_gpu(p.errors, wrong);
  }

  // All CTAs of all ranks; nobody writes the next round's rows before all have read this one's.
  void barrier(u32 round) const {
    ptx::sync_threads();
    if (thread_index() == 0) {
      for (u32 peer = 0; peer < p.world; ++peer)
        ptx::red_add_release_sys(&window(peer)->arrived, 1u);
      u32 target = p.world * grid_size() * (round + 1);
      if (p.bug == Bug::kBarrierEarly) --target;
      if (p.bug == Bug::kBarrierDead) ++target;
      while (ptx::ld_acquire_sys(&window(p.rank)->arrived) < target)
        ptx::spin("rank barrier");
    }
    ptx::sync_threads();
  }
};

CROSSDOCK_KERNEL exchange(CROSSDOCK_PARAMS(ExchangeParams, p)) {
  const Exchange e{p};
  const u32 warp = warp_index();
  if (thread_index() < kSenders * kStages) {
    ptx::mbarrier_init(e.full(thread_index() / kStages, thread_index() % kStages), 1);
    ptx::fence_mbarrier_init();
  }
  ptx::sync_threads();
  u32 n = 0;
  for (u32 round = 0; round < p.rounds; ++round) {
    if (warp < kNotifiers) {
      if (block_index() == 0) e.notify(round);
    } else {
      e.send(round, warp - kNotifiers, n);
    }
    const u32 warps = kSenders + kNotifiers;
    for (u32 source = block_index() * warps + warp; source < p.world; source += grid_size() * warps)
      e.receive(round, source);
    e.barrier(round);
  }
}

// ---- multiply -------------------------------------------------------------------------------

struct MultiplyParams {
  const u8* a;  // [blocks][64 rows][128], e4m3, swizzled by 128 bytes
  const u8* b;  // the same
  float* d;     // [64][64]
  u32 blocks;
  Bug bug;
};
inline constexpr u32 kTileBytes = 64 * 128;
inline constexpr u32 kMultiplyThreads = 2 * kWarpgroupSize;
inline constexpr u32 kMultiplyShared = kStages * 2 * kTileBytes + 128;

struct Multiply {
  const MultiplyParams& p;

  u8* a(u32 stage) const { return dynamic_shared() + stage * 2 * kTileBytes; }
  u8* b(u32 stage) const { return a(stage) + kTileBytes; }
  ptx::MBarrier* full(u32 stage) const {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kStages * 2 * kTileBytes) + stage;
  }
  ptx::MBarrier* empty(u32 stage) const { return full(kStages + stage); }
  static void wait(ptx::MBarrier* barrier, u32 parity) {
    while (!ptx::mbarrier_try_wait(barrier, parity))
      ptx::spin("tile");
  }

  void produce() const {
    for (u32 block = 0; block < p.blocks; ++block) {
      const u32 stage = block % kStages;
      wait(empty(stage), (block / kStages & 1) ^ 1);
      ptx::mbarrier_arrive_expect_tx(full(stage), 2 * kTileBytes);
      ptx::bulk_load(a(stage), p.a + u64{block} * kTileBytes, kTileBytes, full(stage));
      ptx::bulk_load(b(stage), p.b + u64{block} * kTileBytes, kTileBytes, full(stage));
    }
  }
  void consume() const {
    float d[32] = {};
    for (u32 block = 0; block < p.blocks; ++block) {
      const u32 stage = block % kStages;
      if (p.bug != Bug::kNoFullWait) wait(full(stage), block / kStages & 1);
      const ptx::MatrixLayout layout = ptx::k_major(ptx::Swizzle::k128);
      ptx::wgmma_fence();
      for (u32 step = 0; step < 4; ++step)
        ptx::wgmma_e4m3(d, ptx::advanced(ptx::matrix_descriptor(a(stage), layout), step * 32),
                        ptx::advanced(ptx::matrix_descriptor(b(stage), layout), step * 32), true);
      ptx::wgmma_commit();
      if (p.bug != Bug::kEarlyFree) ptx::wgmma_wait<0>(d);
      ptx::sync_warp(kFullMask);
      if (lane_index() == 0) ptx::mbarrier_arrive(empty(stage));
    }
    ptx::wgmma_wait<0>(d);
    const u32 t = thread_index();
    for (u32 i = 0; i < 32; ++i) {
      const u32 row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2);
      ptx::st_weak(p.d + row * 64 + i / 4 * 8 + t % 4 * 2 + i % 2, d[i]);
    }
  }
};

CROSSDOCK_KERNEL multiply(CROSSDOCK_PARAMS(MultiplyParams, p)) {
  const Multiply m{p};
  if (thread_index() == 0) {
    for (u32 stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(m.full(stage), 1);
      ptx::mbarrier_init(m.empty(stage), 4);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::sync_threads();
  if (warpgroup_index() == 0)
    m.consume();
  else if (warp_index() == 4 && lane_index() == 0)
    m.produce();
}

}  // namespace crossdock::testing
