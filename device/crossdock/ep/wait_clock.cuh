// The clock of what a call waits for, rank by rank.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>

namespace crossdock::device {

// How long a thread has waited for its rank, into the statistics of the caller: `waits` [world] or
// null. The time is taken where the word is seen, since a warp leaves its loop together.
struct EpWaitClock {
  u64* waits;
  u64 start;
  u64 seen = 0;

  CROSSDOCK_DEVICE explicit EpWaitClock(u64* of_ranks)
      : waits(of_ranks), start(of_ranks != nullptr ? ptx::global_timer() : 0) {}
  // Returns `came`.
  CROSSDOCK_DEVICE bool stamp(bool came) {
    if (came && waits != nullptr) seen = ptx::global_timer();
    return came;
  }
  CROSSDOCK_DEVICE void add(u32 rank) const {
    if (waits == nullptr) return;
    ptx::red_add_relaxed_gpu(waits + rank, (seen != 0 ? seen : ptx::global_timer()) - start);
  }
};

}  // namespace crossdock::device
