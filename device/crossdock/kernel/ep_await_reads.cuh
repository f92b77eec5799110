// ep_await_reads: until the peers have read what this rank's combines of a small slot have
// announced so far, so that the slot's input may be written once more for the same dispatch. Launch
// between such combines, in the place of the rank's next one among the calls of all ranks: grid =
// 1, block = 32 threads, no shared memory.
//
//   rank r, epoch e of its last combine                 a peer, which has begun e too or will
//     fence; reads[r] = e                       ---->     the same, if it writes its input again
//     reads[s] >= e (acquire), or               <----     reads[s] = e
//     inputs[s] of epoch e + 1 (acquire)        <----     or its next combine, which has fenced
//
// Nobody tells at the end of a combine that it has read: a release for the system takes more than a
// microsecond there, of every combine, and the next use of the slot says as much. So a rank tells
// by what it calls next: this, or the next combine, which can only follow in its stream. Whoever
// waits has told before, so two that wait for each other both go on. Peers that are masked are
// neither told nor waited for; words carry their epoch, so that one that comes back has missed
// nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/masking.cuh>
#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/layout/ep_small.cuh>

namespace crossdock::device {

// By the lane of `source`: whether it has read what combine `epoch` has announced; its count.
CROSSDOCK_DEVICE u32 ep_reads_of(const EpAwaitReadsParams& p, u32 source, u32 epoch) {
  // Pairs with the store below, at that rank.
  const u32 reads = ptx::ld_acquire_sys(p.view.at<u32>(p.areas.reads) + source);
  if (static_cast<i32>(reads - epoch) >= 0) return reads;
  // Pairs with open_combine in ep_combine, which has fenced.
  const u64 index = u64{(epoch + 1) & 1u} * p.view.world + source;
  const u64 word = ptx::ld_acquire_sys(p.view.at<u64>(p.areas.inputs) + index);
  return tagged_with(word, epoch + 1) ? epoch : reads;
}

namespace kernel {

template <EpAwaitReadsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    ep_await_reads(CROSSDOCK_PARAMS(EpAwaitReadsParams, p)) {
  ptx::grid_dependency_wait();
  const u32 peer = lane_index();
  const u32 masked = masked_ranks(p.masking);
  const u32 epoch = ptx::ld_relaxed_gpu(&p.state->combine.finished);
  if (!may_start(p.common)) return;
  if (peer >= p.view.world || peer == p.view.rank || is_masked(masked, peer)) return;
  // What this rank has read came before in its stream.
  ptx::st_release_sys(p.view.map(p.view.at<u32>(p.areas.reads) + p.view.rank, peer), epoch);
  // When it ends otherwise a fault has been raised, and what comes next in the stream leaves.
  (void)wait_or_mask(
      p.common, p.masking, {Phase::kSlotFree, peer, epoch},
      [&] { return u64{ep_reads_of(p, peer, epoch)}; },
      [&](u64 seen) { return static_cast<i32>(static_cast<u32>(seen) - epoch) >= 0; });
}

}  // namespace kernel
}  // namespace crossdock::device
