// barrier: `rounds` barriers across all ranks in a row, timed. With kConfig.grid_sync all blocks of
// all ranks meet (grid sync, peer barrier by block 0, grid sync), else one block of each rank.
// Launch on every rank: with grid sync any resident grid, the same everywhere if `verify`; without,
// one block. Block = kConfig.threads (a multiple of 32), no shared memory. Symmetric memory:
// `add_peer_barrier`; verify: [2][world][grid * threads] words at `words`, which every thread of
// every rank fills for every peer before each round and checks after it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/peer_barrier.cuh>
#include <crossdock/layout/probe.cuh>

namespace crossdock::device::kernel {

// The words of one round: what rank `from` writes to a peer as its thread `thread`.
struct BarrierWords {
  const BarrierParams& p;
  u32 threads;  // of the grid
  u32 first;    // barriers passed before this launch: values and parity go on from there

  CROSSDOCK_DEVICE u32 value(u32 round, u32 from, u32 thread) const {
    return mix((first + round) * 0x9e3779b9u + from) + thread;
  }
  CROSSDOCK_DEVICE u32* word(u32 round, u32 from, u32 thread) const {
    const u64 index = (u64{(first + round) & 1u} * p.view.world + from) * threads + thread;
    return p.view.at<u32>(p.words) + index;
  }
  CROSSDOCK_DEVICE void write(u32 round, u32 thread) const {
    for (u32 peer = 0; peer < p.view.world; ++peer)
      ptx::st_weak(p.view.map(word(round, p.view.rank, thread), peer),
                   value(round, p.view.rank, thread));
  }
  // Checks another thread's words, so that the barrier has to carry them across threads and blocks.
  CROSSDOCK_DEVICE void check(u32 round, u32 thread) const {
    const u32 other = (thread + 37) % threads;
    for (u32 from = 0; from < p.view.world; ++from)
      if (ptx::ld_weak(word(round, from, other)) != value(round, from, other))
        ptx::red_add_relaxed_gpu(p.mismatches, 1u);
  }
};

template <BarrierConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    barrier(CROSSDOCK_PARAMS(BarrierParams, p)) {
  ptx::grid_dependency_wait();
  const u32 first = ptx::ld_relaxed_gpu(&p.common.control->barrier_turn.value);
  if (!may_start(p.common)) return;
  const ThreadGroup group = ThreadGroup::block();
  const PeerBarrier barrier{p.common, p.view, p.barrier};
  const BarrierWords words{p, grid_size() * block_size(), first};
  const u32 thread = block_index() * block_size() + thread_index();
  // Every block has read `first` before block 0 can advance it.
  if (kConfig.grid_sync && !grid_sync(p.common, 0, group)) return;
  const u64 start = ptx::global_timer();
  for (u32 round = 0; round < p.rounds; ++round) {
    if (kConfig.verify) words.write(round, thread);
    const bool passed = kConfig.grid_sync ? grid_and_peer_barrier(barrier, 0, group)
                                          : barrier.arrive_and_wait(group);
    if (!passed) return;
    if (kConfig.verify) words.check(round, thread);
  }
  if (thread == 0) ptx::st_weak(p.elapsed_ns, ptx::global_timer() - start);
}

}  // namespace crossdock::device::kernel
