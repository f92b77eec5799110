// The loop of a warp that raises flags of what other warps of its block have stored: each lane
// looks
// after one of them. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>

namespace crossdock::device {

// Until every lane's `done()`: `look()` says how many things the lane's warp has handed over, and
// `raise(n)` raises their flags, by all lanes together. False when the rank aborts, or nothing
// comes for the deadline of a stage, which is a fault; all lanes agree.
template <class Done, class Look, class Raise>
CROSSDOCK_DEVICE bool ep_raise_flags(const LaunchCommon& c, const Done& done, const Look& look,
                                     const Raise& raise) {
  const u64 deadline = deadline_of(c, Phase::kStage);
  u64 since = ptx::global_timer();
  for (u32 turn = 1; ptx::any(kFullMask, !done()); ++turn) {
    const u32 sent = look();
    if (ptx::any(kFullMask, sent != 0)) {
      raise(sent);
      since = ptx::global_timer();
      continue;
    }
    ptx::spin("flags of sent rows");
    ptx::nanosleep(100);  // the senders share this warp's scheduler
    if (turn % kTurnsPerCheck != 0) continue;
    const bool late = ptx::global_timer() - since > deadline;
    if (late && lane_index() == 0) raise_fault(c, {Phase::kStage, kNoPeer, 0}, 0, deadline);
    if (ptx::any(kFullMask, late || aborted(c))) return false;
  }
  return true;
}

}  // namespace crossdock::device
