// Counters between two ranks that only grow: arrivals ("so much has been written for you") and
// credits ("so much of what you wrote has been taken out"). Totals count since the last reset and
// wrap at 2^32; they are compared by signed difference, so a peer may be ahead.
//
//   sender                                       receiver (ring of `slots` rows)
//     wait_credit: sent + n - credits <= slots
//     write n rows into the ring        ------>
//     arrivals += n  (release sys)      ------>   wait_arrival: arrivals - received >= n (acquire)
//                                                 fence_proxy_async if bulk copies read the rows
//                                                 take the rows out
//     credits += n                      <------   credits += n  (release sys)
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/polled_word.cuh>

namespace crossdock::device {

// Publishes `n` more rows, or `n` more free slots: everything this thread has written, read or
// acquired before is ordered before it. `counter` is the address in the peer's window.
CROSSDOCK_DEVICE void signal_counter(u32* counter, u32 n CROSSDOCK_SITE) {
  ptx::red_add_release_sys(counter, n CROSSDOCK_PASS_SITE);
}

// Waits until `counter` (in this rank's window) has reached `target` or more.
CROSSDOCK_DEVICE bool wait_counter(const LaunchCommon& c, const u32* counter,
                                   const Expected& target CROSSDOCK_SITE) {
  return wait_until(c, target, AcquireSys{counter},
                    Reached{static_cast<u32>(target.value)} CROSSDOCK_PASS_SITE);
}

CROSSDOCK_DEVICE bool wait_arrival(const LaunchCommon& c, const u32* arrivals, u32 total,
                                   u32 peer CROSSDOCK_SITE) {
  return wait_counter(c, arrivals, {Phase::kArrival, peer, total} CROSSDOCK_PASS_SITE);
}

// The sender's end of a ring of `slots` rows at `peer`.
struct CreditWindow {
  const u32* credits;  // in this rank's window; the peer adds to it
  u32 slots;
  u32 peer;

  // Waits until the ring has room for rows up to the total `total`.
  CROSSDOCK_DEVICE bool wait(const LaunchCommon& c, u32 total CROSSDOCK_SITE) const {
    return wait_counter(
        c, credits, {Phase::kCredit, peer, static_cast<u32>(total - slots)} CROSSDOCK_PASS_SITE);
  }
};

}  // namespace crossdock::device
