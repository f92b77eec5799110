// Tagged words: 64 bits that are valid by themselves, with more room for the value than an epoch
// word has (epoch.cuh).
//
//   | low 16 bits of the epoch | value, 48 bits |   one 8-byte store
//
// Words are never zeroed. Whoever uses them keeps two by parity and makes sure that a rank is at
// most one epoch ahead of what its peers still read; then 16 bits cannot be mistaken. A value that
// announces nothing else needs no release; `announce` and `wait_announced` order what came before.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/polled_word.cuh>

namespace crossdock::device {

inline constexpr u64 kTaggedValueMask = (u64{1} << 48) - 1;

CROSSDOCK_HOST_DEVICE constexpr u64 tagged_word(u32 epoch, u64 value) {
  return u64{epoch & 0xffffu} << 48 | (value & kTaggedValueMask);
}
CROSSDOCK_HOST_DEVICE constexpr bool tagged_with(u64 word, u32 epoch) {
  return word >> 48 == (epoch & 0xffffu);
}
// The same as a test of what a wait polls.
CROSSDOCK_DEVICE UpperIs<48> tagged_with(u32 epoch) {
  return {epoch & 0xffffu};
}

CROSSDOCK_DEVICE void put_tagged_word(u64* word, u32 epoch, u64 value CROSSDOCK_SITE) {
  ptx::st_relaxed_sys(word, tagged_word(epoch, value) CROSSDOCK_PASS_SITE);
}
// As put_tagged_word, and publishes everything ordered before it.
CROSSDOCK_DEVICE void announce(u64* word, u32 epoch, u64 value CROSSDOCK_SITE) {
  ptx::st_release_sys(word, tagged_word(epoch, value) CROSSDOCK_PASS_SITE);
}

namespace detail {
template <class Load>
CROSSDOCK_DEVICE bool wait_tagged(const LaunchCommon& c, u32 epoch, u32 peer, u64& value,
                                  const Load& load CROSSDOCK_SITE) {
  // A word of this rank itself: another of its blocks is late, perhaps because of a peer.
  const Phase phase = peer == c.rank ? Phase::kGridSync : Phase::kEpochWord;
  u64 seen = 0;
  const WaitOutcome outcome =
      poll_until(c, phase, seen, load, tagged_with(epoch) CROSSDOCK_PASS_SITE);
  value = seen & kTaggedValueMask;
  if (outcome == WaitOutcome::kExpired)
    raise_fault(c, {phase, peer, epoch & 0xffffu}, seen >> 48,
                deadline_of(c, phase) CROSSDOCK_PASS_SITE);
  return outcome == WaitOutcome::kDone;
}
}  // namespace detail

// Waits for `peer`'s word of this epoch. One thread.
CROSSDOCK_DEVICE bool wait_tagged_word(const LaunchCommon& c, const u64* word, u32 epoch, u32 peer,
                                       u64& value CROSSDOCK_SITE) {
  return detail::wait_tagged(c, epoch, peer, value, RelaxedSys{word} CROSSDOCK_PASS_SITE);
}
// The same for a word stored by `announce`: what came before it is visible afterwards.
CROSSDOCK_DEVICE bool wait_announced(const LaunchCommon& c, const u64* word, u32 epoch, u32 peer,
                                     u64& value CROSSDOCK_SITE) {
  return detail::wait_tagged(c, epoch, peer, value, AcquireSys{word} CROSSDOCK_PASS_SITE);
}

}  // namespace crossdock::device
