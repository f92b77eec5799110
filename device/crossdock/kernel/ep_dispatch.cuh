// ep_dispatch: every token of every rank once to each rank that owns an expert it chose, straight
// into its final row; with ids, weights, token numbers, scales and counts. Counts first: no ring,
// no copy afterwards, and no barrier between ranks.
//
// Launch on every rank, the same number of times: grid = the rank's source_blocks, all resident,
// block = kConfig.threads(), shared memory `ep_dispatch_shared`. Symmetric memory: `add_ep`, and
// output blocks of `ep_output_layout`. Ranks may differ in tokens and blocks, and in nothing else.
//
//   epoch e at rank r                                  a peer
//     outputs[r] = {e, offset} (release)   ------->    may store into r's block (acquire)
//     counts of each block                 ------->    bases of its rows (ep/plan.cuh)
//     rows, metadata                       ------->    the peer's output block
//     arrivals[r] += 1 per block (release) ------->    its block 0 waits for all blocks of all
//     with masks: flags[r][block] = e                  ranks
//
// A rank is at most one epoch ahead of any other, since its launch ends after it has got something
// from everyone; two parities of every word are therefore enough. The launch of e ends when all
// rows of e are here: what follows in the stream may read them.
//
// With masks (`stride`) places are fixed by source, as in ep_small_dispatch, so that ranks need not
// agree who is masked; a block then waits for counts of this rank only, and each has a flag and
// selections of its own, which carry the epoch instead of growing: so what was not sent to a masked
// rank is not missed when it is let in again. With `masking.late` a rank that does not come is
// masked; its rows and selections are left out, and it is not told that rows are there.
//
// A fault (an id out of range, a peer that does not come) ends the launch at every rank, with the
// record at the rank that found it; rows may have been stored by then, but none has been delivered.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/dispatch_run.cuh>

namespace crossdock::device::kernel {

template <EpDispatchConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_dispatch(CROSSDOCK_PARAMS(EpDispatchParams, p)) {
  EpDispatchBlock<kConfig> block(p);
  ep_run_dispatch(block);
}

}  // namespace crossdock::device::kernel
