// ep_small_dispatch: dispatch of few tokens, in one launch without a barrier between ranks and
// without waiting for anybody's counts: the rows of source s go to places s * stride and on.
//
// Launch on every rank, the same number of times for each slot: grid = send_blocks, one more that
// tells what comes, and one that receives; block = kConfig.threads(), shared memory
// `ep_small_shared`. Symmetric memory: `add_ep_small` and a block of `ep_output_layout` for each
// slot. Ranks differ in tokens and blocks only. Sending and receiving may be launches of their own,
// so that no SM waits in between.
//
//   use e of the slot, rank r                          a peer
//     free[r] = e - 1, if combine has not told  ---->  may store into the slot (acquire), and
//                                                      its words
//     headers[r] = {e, rows, blocks}            ---->  how much comes from r
//     counts of experts (epoch words)           ---->  summed up
//     rows, ids, weights, scales                ---->  places r * stride ...
//     flags[r][block] = e (one fence a block)   ---->  its receiving block waits for all of them
//
// `e` counts the uses of the slot, on all ranks alike, and is kept by the device. Words are never
// zeroed: nobody stores for use e before every word of e - 1 has been read, since the slot is told
// to be free only by launches that come after the one that received.
//
// A rank that is masked is sent nothing and not waited for; its places stay empty. With
// `masking.late` a rank whose wait expires is masked instead of being a fault. Ranks need not agree
// who is masked: nobody's places depend on it.
//
// A source that gives up says so, and because of whom, in its header: the others leave at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/small_run.cuh>

namespace crossdock::device::kernel {

template <EpSmallConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_small_dispatch(CROSSDOCK_PARAMS(EpSmallParams, p)) {
  EpSmallBlock<kConfig> block(p);
  (void)ep_small_run(block);
}

}  // namespace crossdock::device::kernel
