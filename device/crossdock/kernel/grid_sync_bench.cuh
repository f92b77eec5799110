// grid_sync_bench: `rounds` grid syncs in a row, timed. One rank.
// Launch: any grid whose blocks are all resident at once, block = kConfig.threads (a multiple of
// 32), no shared memory. `elapsed_ns[block]` gets the time of all rounds; with `verify`,
// `mismatches` counts reads that came too early or too late.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/grid_sync.cuh>
#include <crossdock/layout/probe.cuh>

namespace crossdock::device::kernel {

template <GridSyncBenchConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    grid_sync_bench(CROSSDOCK_PARAMS(GridSyncBenchParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  const ThreadGroup group = ThreadGroup::block();
  const bool writer = thread_index() == block_size() - 1;  // not the thread that syncs
  const u64 start = ptx::global_timer();
  for (u32 round = 0; round < p.rounds; ++round) {
    u32* words = p.words + u64{round & 1u} * grid_size();
    if (kConfig.verify && writer) ptx::st_weak(words + block_index(), mix(round) + block_index());
    if (!grid_sync(p.common, p.counter, group)) return;
    if (!kConfig.verify) continue;
    const u32 neighbour = (block_index() + 1) % grid_size();
    if (ptx::ld_weak(words + neighbour) != mix(round) + neighbour)
      ptx::red_add_relaxed_gpu(p.mismatches, 1u);
  }
  if (group.leader()) ptx::st_weak(p.elapsed_ns + block_index(), ptx::global_timer() - start);
}

}  // namespace crossdock::device::kernel
