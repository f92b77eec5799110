// Masks in kernels, and waits that end with a masked peer instead of a fault.
//
//   wait for a peer expires, `late`:   mask.ranks |= peer (relaxed, gpu)    the launch goes on
//   every later launch of the rank:    reads mask.ranks when it begins      skips the peer
//
// A launch reads the mask once a thread when it begins. With `late` its waits look at it again: a
// rank that is masked after that is not waited for any longer, in this launch or in one beside it:
//
//   a thread's wait expires, or ep_mask runs beside      mask.ranks |= peer
//   all other waits for the peer    see its bit, as seldom as the abort flag, and end as if expired
//
// So a rank that is gone costs one wait, however many waits for it a launch has one after the
// other. One that is there and is masked by ep_mask may still read what such a wait protects.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/layout/ep_mask.cuh>

namespace crossdock::device {

// The ranks that this launch goes on without; after grid_dependency_wait.
CROSSDOCK_DEVICE u32 masked_ranks(const EpMasking& masking CROSSDOCK_SITE) {
  return masking.mask == nullptr ? 0
                                 : ptx::ld_relaxed_gpu(&masking.mask->ranks CROSSDOCK_PASS_SITE);
}
CROSSDOCK_HOST_DEVICE constexpr bool is_masked(u32 ranks, u32 rank) {
  return (ranks >> rank & 1u) != 0;
}

// Whether `peer` is masked by now: another wait for it has expired, or the host has masked it
// (ep_mask). Without late masks nobody looks.
struct MaskedMeanwhile {
  static constexpr bool kPlainPoll = true;
  const u32* ranks;  // null: no late masks
  u32 peer;
  CROSSDOCK_DEVICE bool operator()() const {
    return ranks != nullptr && is_masked(ptx::ld_relaxed_gpu(ranks), peer);
  }
};
CROSSDOCK_DEVICE MaskedMeanwhile masked_meanwhile(const EpMasking& masking, u32 peer) {
  return {masking.late ? &masking.mask->ranks : nullptr, peer};
}

// How a wait for a peer has ended.
enum class Came : u32 {
  kYes,
  kMasked,  // it did not come, and is masked from now on
  kAbort,   // leave: a fault has been raised by somebody
};

namespace detail {
// Nothing has come of `expected.peer` in time.
CROSSDOCK_COLD Came mask_or_raise(const LaunchCommon& c, const EpMasking& masking,
                                  Expected expected, u64 seen CROSSDOCK_SITE) {
  if (masking.late && expected.peer != c.rank) {
    ptx::atom_or_relaxed_gpu(&masking.mask->late, 1u << expected.peer CROSSDOCK_PASS_SITE);
    ptx::atom_or_relaxed_gpu(&masking.mask->ranks, 1u << expected.peer CROSSDOCK_PASS_SITE);
    return Came::kMasked;
  }
  raise_fault(c, expected, seen, deadline_of(c, expected.phase) CROSSDOCK_PASS_SITE);
  return Came::kAbort;
}
}  // namespace detail

// How a poll for `expected.peer`, never for the rank itself, has ended, when the peer may be
// masked.
CROSSDOCK_DEVICE Came came_of(WaitOutcome outcome, const LaunchCommon& c, const EpMasking& masking,
                              const Expected& expected, u64 seen CROSSDOCK_SITE) {
  if (outcome == WaitOutcome::kDone) return Came::kYes;
  if (outcome == WaitOutcome::kAborted) return Came::kAbort;
  if (outcome == WaitOutcome::kGone) return Came::kMasked;
  return detail::mask_or_raise(c, masking, expected, seen CROSSDOCK_PASS_SITE);
}

// The wait of one thread for `expected.peer`, never for the rank itself.
template <class Load, class Done>
CROSSDOCK_DEVICE Came wait_or_mask(const LaunchCommon& c, const EpMasking& masking,
                                   const Expected& expected, const Load& load,
                                   const Done& done CROSSDOCK_SITE) {
  u64 seen = 0;
  const WaitOutcome outcome =
      poll_unless(c, expected.phase, seen, load, done,
                  masked_meanwhile(masking, expected.peer) CROSSDOCK_PASS_SITE);
  return came_of(outcome, c, masking, expected, seen CROSSDOCK_PASS_SITE);
}

}  // namespace crossdock::device
