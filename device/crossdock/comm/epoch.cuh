// Epochs: the number of a launch, kept by the device so that a captured graph can be replayed, and
// words that carry the epoch in which they were written.
//
//   epoch word:  | epoch (high 32) | value (low 32) |   one 8-byte store, valid by itself
//
//   rank a, epoch e                             rank b, epoch e
//     word[e & 1][a] of b = {e, value}  ---->     polls word[e & 1][a] until its epoch is e
//     ... the same from everyone to everyone
//
// Words are never zeroed. Two slots by parity suffice where every rank gets a word from every other
// rank in every epoch: a rank reaches e + 2 only after all others have sent e + 1, that is after
// they have read everything of epoch e. A value needs no release: it arrives with its epoch. Data
// elsewhere that the word announces does need one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/layout/sync.cuh>

namespace crossdock::device {

// The epoch of this launch, from 1 on (mod 2^32). By one thread of every block, once; the same
// thread calls pass_epoch later in the launch, at a time when nobody waits for it.
CROSSDOCK_DEVICE u32 read_epoch(const EpochState* state CROSSDOCK_SITE) {
  return ptx::ld_relaxed_gpu(&state->finished CROSSDOCK_PASS_SITE) + 1;
}
// The last block that has read the epoch advances the state for the next launch.
CROSSDOCK_DEVICE void pass_epoch(EpochState* state, u32 epoch CROSSDOCK_SITE) {
  const u32 before = ptx::atom_add_acq_rel_gpu(&state->readers, 1u CROSSDOCK_PASS_SITE);
  if (before != grid_size() - 1) return;
  ptx::st_relaxed_gpu(&state->readers, 0u CROSSDOCK_PASS_SITE);
  ptx::st_relaxed_gpu(&state->finished, epoch CROSSDOCK_PASS_SITE);
}
// Both at once, before anything that can fail.
CROSSDOCK_DEVICE u32 enter_epoch(EpochState* state CROSSDOCK_SITE) {
  const u32 epoch = read_epoch(state CROSSDOCK_PASS_SITE);
  pass_epoch(state, epoch CROSSDOCK_PASS_SITE);
  return epoch;
}

// A flag is an epoch alone: what was written for it is there. Stored relaxed after a fence at
// system scope, which may serve many flags at once.
CROSSDOCK_DEVICE bool look_at_flag(const u32* flag, u32 epoch CROSSDOCK_SITE) {
  return ptx::ld_acquire_sys(flag CROSSDOCK_PASS_SITE) == epoch;
}
CROSSDOCK_DEVICE bool wait_flag(const LaunchCommon& c, const u32* flag, u32 epoch,
                                u32 peer CROSSDOCK_SITE) {
  return wait_until(
      c, Expected{Phase::kRowFlag, peer, epoch},
      [&] { return u64{ptx::ld_acquire_sys(flag CROSSDOCK_PASS_SITE)}; },
      [&](u64 seen) { return static_cast<u32>(seen) == epoch; } CROSSDOCK_PASS_SITE);
}

CROSSDOCK_HOST_DEVICE constexpr u64 epoch_word(u32 epoch, u32 value) {
  return u64{epoch} << 32 | value;
}
CROSSDOCK_HOST_DEVICE constexpr u32 word_epoch(u64 word) {
  return static_cast<u32>(word >> 32);
}
CROSSDOCK_HOST_DEVICE constexpr u32 word_value(u64 word) {
  return static_cast<u32>(word);
}

CROSSDOCK_DEVICE void put_epoch_word(u64* word, u32 epoch, u32 value CROSSDOCK_SITE) {
  ptx::st_relaxed_sys(word, epoch_word(epoch, value) CROSSDOCK_PASS_SITE);
}

// Waits for `peer`'s word of this epoch. A later epoch in its place means that the ranks have run
// apart, which the protocol excludes: it ends the wait as a fault that shows both epochs.
CROSSDOCK_DEVICE bool wait_epoch_word(const LaunchCommon& c, const u64* word, u32 epoch, u32 peer,
                                      u32& value CROSSDOCK_SITE) {
  const Expected expected{Phase::kEpochWord, peer, epoch};
  u64 seen = 0;
  const WaitOutcome outcome = poll_until(
      c, expected.phase, seen, [&] { return ptx::ld_relaxed_sys(word CROSSDOCK_PASS_SITE); },
      [&](u64 w) { return static_cast<i32>(word_epoch(w) - epoch) >= 0; } CROSSDOCK_PASS_SITE);
  value = word_value(seen);
  if (outcome == WaitOutcome::kDone && word_epoch(seen) == epoch) return true;
  if (outcome != WaitOutcome::kAborted)
    raise_fault(c, expected, word_epoch(seen), c.deadline_ns CROSSDOCK_PASS_SITE);
  return false;
}

}  // namespace crossdock::device
