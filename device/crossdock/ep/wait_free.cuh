// Whether an input block may be written: what a combine before has put there has been read by all
// peers that are not masked. By all threads of a block, at least a warp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/masking.cuh>
#include <crossdock/comm/polled_word.cuh>
#include <crossdock/layout/ep.cuh>

namespace crossdock::device {

// Every source has combined as often as the block's last use asks (EpState::free_at). The threads
// agree. pulled[source] (acquire) pairs with signal_counter at the end of ep_combine.
CROSSDOCK_DEVICE bool ep_wait_free(const LaunchCommon& common, const SymmetricView& view,
                                   const EpFree& free) {
  if (free.at == nullptr) return true;
  bool done = true;
  const u32 source = thread_index();
  if (source < view.world && !is_masked(masked_ranks(free.masking), source)) {
    const u32 target = ptx::ld_weak(free.at + source);
    const u32* pulled = view.at<u32>(free.pulled + source * sizeof(PaddedWord));
    done = wait_or_mask(common, free.masking, {Phase::kSlotFree, source, target},
                        AcquireSys{pulled}, Reached{target}) != Came::kAbort;
  }
  return !ThreadGroup::block().any(!done);
}

}  // namespace crossdock::device
