// all_gather_counts: every rank gets the `num_counts` small numbers of every rank, as epoch words:
// one store per number and peer, no barrier, no release, nothing to reset.
// Launch on every rank, the same number of times and with the same num_counts: any resident grid,
// block = kConfig.threads (a multiple of 32), 16 bytes of shared memory. Symmetric memory:
// `add_all_gather_counts`.
//
//   rank a, epoch e                                  rank b, epoch e
//     words[e & 1][a][i] of b = {e, counts[i]} ---->   polls words[e & 1][a][i]
//                                                      gathered[a][i] = its value
//
// With no counts a word is exchanged all the same: it keeps ranks from being two epochs apart,
// which the two slots rest on. So max_counts is at least 1.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/epoch.cuh>
#include <crossdock/layout/exchange.cuh>

namespace crossdock::device::kernel {

template <AllGatherCountsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    all_gather_counts(CROSSDOCK_PARAMS(AllGatherCountsParams, p)) {
  ptx::grid_dependency_wait();
  u32* shared_epoch = reinterpret_cast<u32*>(dynamic_shared());
  if (thread_index() == 0) *shared_epoch = enter_epoch(p.epoch);
  if (!may_start(p.common)) return;  // also the barrier for shared_epoch
  const u32 epoch = *shared_epoch;
  const u32 world = p.view.world;
  const u32 first = block_index() * block_size() + thread_index();
  const u32 step = grid_size() * block_size();
  const u32 exchanged = max_of(p.num_counts, 1u);
  const u32 words = world * exchanged;
  // Both loops start with this rank and go round, so that ranks do not all store to one peer.
  for (u32 i = first; i < words; i += step) {
    const u32 peer = (p.view.rank + i / exchanged) % world;
    const u32 count = i % exchanged;
    const u64 index = (u64{epoch & 1u} * world + p.view.rank) * p.layout.max_counts + count;
    put_epoch_word(p.view.at<u64>(p.layout.words + index * sizeof(u64), peer), epoch,
                   count < p.num_counts ? ptx::ld_weak(p.counts + count) : 0);
  }
  for (u32 i = first; i < words; i += step) {
    const u32 from = (p.view.rank + i / exchanged) % world;
    const u32 count = i % exchanged;
    const u64 index = (u64{epoch & 1u} * world + from) * p.layout.max_counts + count;
    u32 value = 0;
    const u64* word = p.view.at<u64>(p.layout.words + index * sizeof(u64));
    if (!wait_epoch_word(p.common, word, epoch, from, value)) return;
    if (count < p.num_counts) ptx::st_weak(p.gathered + u64{from} * p.num_counts + count, value);
  }
}

}  // namespace crossdock::device::kernel
