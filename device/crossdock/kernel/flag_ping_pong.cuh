// flag_ping_pong: `rounds` round trips of one flag between two ranks, timed by the first.
// Launch on both ranks (other ranks return at once): one block of 32 threads, no shared memory.
// Symmetric memory: one 128-byte line at `flag`. Flags only grow; `start` is the sum of the rounds
// of all earlier launches since the last reset.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/layout/probe.cuh>

namespace crossdock::device::kernel {

template <FlagPingPongConfig kConfig>
struct FlagPingPong {
  CROSSDOCK_DEVICE static void put(const FlagPingPongParams& p, u32 peer, u32 value) {
    u32* flag = p.view.at<u32>(p.flag, peer);
    if constexpr (kConfig.release) {
      ptx::st_release_sys(flag, value);
    } else {
      ptx::st_relaxed_sys(flag, value);
    }
  }
  CROSSDOCK_DEVICE static bool wait(const FlagPingPongParams& p, u32 peer, u32 value) {
    const u32* flag = p.view.at<u32>(p.flag);
    return wait_until(
        p.common, Expected{Phase::kFlag, peer, value},
        [&] {
          return u64{kConfig.release ? ptx::ld_acquire_sys(flag) : ptx::ld_relaxed_sys(flag)};
        },
        [&](u64 seen) { return static_cast<i32>(static_cast<u32>(seen) - value) >= 0; });
  }
};

template <FlagPingPongConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(32, 1)
    flag_ping_pong(CROSSDOCK_PARAMS(FlagPingPongParams, p)) {
  using Flag = FlagPingPong<kConfig>;
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  const bool serves = p.view.rank == p.first;
  if (thread_index() != 0 || (!serves && p.view.rank != p.second)) return;
  const u32 peer = serves ? p.second : p.first;
  const u64 begin = ptx::global_timer();
  for (u32 round = 1; round <= p.rounds; ++round) {
    if (serves) Flag::put(p, peer, p.start + round);
    if (!Flag::wait(p, peer, p.start + round)) return;
    if (!serves) Flag::put(p, peer, p.start + round);
  }
  if (serves) ptx::st_weak(p.elapsed_ns, ptx::global_timer() - begin);
}

}  // namespace crossdock::device::kernel
