// Whether an input block may be written: what a combine before has put there has been read by all
// peers. By all threads of a block, at least a warp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/layout/ep.cuh>

namespace crossdock::device {

// Every source has combined as often as the block's last use asks (EpState::free_at). The threads
// agree. pulled[source] (acquire) pairs with signal_counter at the end of ep_combine.
CROSSDOCK_DEVICE bool ep_wait_free(const LaunchCommon& common, const SymmetricView& view,
                                   const EpFree& free) {
  if (free.at == nullptr) return true;
  bool done = true;
  if (thread_index() < view.world) {
    const u32 source = thread_index();
    const u32 target = ptx::ld_weak(free.at + source);
    done = wait_counter(common, view.at<u32>(free.pulled + source * sizeof(PaddedWord)),
                        {Phase::kSlotFree, source, target});
  }
  return !ThreadGroup::block().any(!done);
}

}  // namespace crossdock::device
