// Waits. Every wait of a kernel goes through `wait_until`: it polls, it has a deadline, it looks at
// the abort flag of its rank, and it returns false instead of trapping.
//
//   waiting thread                     control block (device)          host (pinned memory)
//     poll ... deadline passes
//     cas abort 0 -> n  ------------->  abort = n     first writer wins; n tells the peer
//     write FaultRecord, release sys  ------------------------------->  state = written
//     return false
//   all other waits of this rank
//     poll, see abort != 0, return false
//
// A wait for another part of the same rank (grid sync, stage), or for a row that a peer sends when
// others let it, has kInnerDeadlines times the deadline: what it waits for may itself be waiting
// for a peer, and that wait should end first and be recorded.
//
// The outcome of a wait belongs to the thread that waited. Threads that go on together first agree
// on it (`ThreadGroup::any`, `ptx::any`), so that all of them leave or none: nobody is left at a
// barrier. A failed kernel leaves counters as they are; the host resets the group.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/fault.cuh>
#include <crossdock/ptx/atomic.cuh>
#include <crossdock/ptx/control.cuh>
#include <crossdock/ptx/fence.cuh>
#include <crossdock/ptx/mbarrier.cuh>
#include <crossdock/ptx/warp.cuh>

namespace crossdock::device {

// What is waited for, for the fault record.
struct Expected {
  Phase phase;
  u32 peer;
  u64 value;
};

CROSSDOCK_DEVICE bool aborted(const LaunchCommon& c CROSSDOCK_SITE) {
  return ptx::ld_relaxed_gpu(&c.control->abort.value CROSSDOCK_PASS_SITE) != 0;
}

// Raises the abort flag; the thread that raises it first writes the record. `peer` of `expected`
// may have been found out only now.
CROSSDOCK_COLD void raise_fault(const LaunchCommon& c, Expected expected, u64 seen,
                                u64 waited_ns CROSSDOCK_SITE) {
  const u32 raised = abort_word(expected.peer);
  if (ptx::cas_relaxed_gpu(&c.control->abort.value, 0u, raised CROSSDOCK_PASS_SITE) != 0) return;
  if (c.fault == nullptr) return;
  FaultRecord* f = c.fault;
  ptx::st_relaxed_sys(reinterpret_cast<u32*>(&f->kernel), static_cast<u32>(c.kernel));
  ptx::st_relaxed_sys(reinterpret_cast<u32*>(&f->phase), static_cast<u32>(expected.phase));
  ptx::st_relaxed_sys(&f->rank, c.rank);
  ptx::st_relaxed_sys(&f->peer, expected.peer);
  ptx::st_relaxed_sys(&f->block, block_index());
  ptx::st_relaxed_sys(&f->expected, expected.value);
  ptx::st_relaxed_sys(&f->seen, seen);
  ptx::st_relaxed_sys(&f->waited_ns, waited_ns);
  ptx::st_release_sys(&f->state, FaultRecord::kWritten);
}

enum class WaitOutcome : u32 {
  kDone,
  kAborted,
  kExpired,
  kGone,  // others have found that nothing will come
};

// Loads and tests of polled words that are values (polled_word.cuh), not lambdas with references:
// what such a wait does after its first look is a function that all places of a kernel share.
template <class T>
concept PlainPoll = requires { T::kPlainPoll; };

// The abort flag and the clock are looked at once in this many turns: they cost more than the poll
// on the GPU. The twin's threads sleep between turns, so there every turn counts.
inline constexpr u32 kTurnsPerCheck = CROSSDOCK_ON_GPU ? 32 : 1;

// What else than the abort flag ends a wait before its deadline, looked at as seldom: nothing.
struct NeverGone {
  static constexpr bool kPlainPoll = true;
  CROSSDOCK_DEVICE bool operator()() const { return false; }
};

inline constexpr u32 kInnerDeadlines = 4;
CROSSDOCK_DEVICE u64 deadline_of(const LaunchCommon& c, Phase phase) {
  const bool inner =
      phase == Phase::kGridSync || phase == Phase::kStage || phase == Phase::kRowFlag;
  // What has been promised comes, or its sender names whom it waits for: half a deadline more.
  if (phase == Phase::kSourceFlag) return c.deadline_ns + c.deadline_ns / 2;
  return inner ? c.deadline_ns * kInnerDeadlines : c.deadline_ns;
}

namespace detail {
template <class Load>
CROSSDOCK_DEVICE u64 look(const Load& load CROSSDOCK_SITE) {
  if constexpr (PlainPoll<Load>) {
    return load(CROSSDOCK_PASS_SITE_ONLY);
  } else {
    return load();
  }
}
// After a first look.
template <class Load, class Done, class Gone>
CROSSDOCK_DEVICE WaitOutcome poll_on(const LaunchCommon& c, Phase phase, u64& seen,
                                     const Load& load, const Done& done,
                                     const Gone& gone CROSSDOCK_SITE) {
  const u64 start = ptx::global_timer();
  const u64 deadline = deadline_of(c, phase);
  for (u32 turn = 1;; ++turn) {
    ptx::spin("wait_until" CROSSDOCK_PASS_SITE);
    seen = look(load CROSSDOCK_PASS_SITE);
    if (done(seen)) return WaitOutcome::kDone;
    if (turn % kTurnsPerCheck != 0) continue;
    if (aborted(c CROSSDOCK_PASS_SITE)) return WaitOutcome::kAborted;
    if (gone()) return WaitOutcome::kGone;
    if (ptx::global_timer() - start <= deadline) continue;
    // The value may have come while this thread was kept from running: look once more, then judge.
    seen = look(load CROSSDOCK_PASS_SITE);
    return done(seen) ? WaitOutcome::kDone : WaitOutcome::kExpired;
  }
}
struct Polled {
  u64 seen;
  WaitOutcome outcome;
};
template <class Load, class Done, class Gone>
CROSSDOCK_COLD Polled poll_apart(const LaunchCommon& c, Phase phase, Load load, Done done,
                                 Gone gone CROSSDOCK_SITE) {
  u64 seen = 0;
  const WaitOutcome outcome = poll_on(c, phase, seen, load, done, gone CROSSDOCK_PASS_SITE);
  return {seen, outcome};
}
}  // namespace detail

// Polls `load()` until `done(value)`; `seen` is the last value. Ends before its deadline, too, when
// `gone()`. One thread. Does not raise a fault.
template <class Load, class Done, class Gone>
CROSSDOCK_DEVICE WaitOutcome poll_unless(const LaunchCommon& c, Phase phase, u64& seen,
                                         const Load& load, const Done& done,
                                         const Gone& gone CROSSDOCK_SITE) {
  seen = detail::look(load CROSSDOCK_PASS_SITE);
  if (done(seen)) return WaitOutcome::kDone;
  if constexpr (PlainPoll<Load> && PlainPoll<Done>) {
    const detail::Polled last = detail::poll_apart(c, phase, load, done, gone CROSSDOCK_PASS_SITE);
    seen = last.seen;
    return last.outcome;
  } else {
    return detail::poll_on(c, phase, seen, load, done, gone CROSSDOCK_PASS_SITE);
  }
}
template <class Load, class Done>
CROSSDOCK_DEVICE WaitOutcome poll_until(const LaunchCommon& c, Phase phase, u64& seen,
                                        const Load& load, const Done& done CROSSDOCK_SITE) {
  return poll_unless(c, phase, seen, load, done, NeverGone {} CROSSDOCK_PASS_SITE);
}

// The usual wait: true when done; false when the rank aborts, after a fault has been raised by
// somebody. `seen` is the last value.
template <class Load, class Done>
CROSSDOCK_DEVICE bool wait_until(const LaunchCommon& c, const Expected& expected, u64& seen,
                                 const Load& load, const Done& done CROSSDOCK_SITE) {
  const WaitOutcome outcome = poll_until(c, expected.phase, seen, load, done CROSSDOCK_PASS_SITE);
  if (outcome == WaitOutcome::kExpired)
    raise_fault(c, expected, seen, deadline_of(c, expected.phase) CROSSDOCK_PASS_SITE);
  return outcome == WaitOutcome::kDone;
}
template <class Load, class Done>
CROSSDOCK_DEVICE bool wait_until(const LaunchCommon& c, const Expected& expected, const Load& load,
                                 const Done& done CROSSDOCK_SITE) {
  u64 seen = 0;
  return wait_until(c, expected, seen, load, done CROSSDOCK_PASS_SITE);
}

namespace detail {
CROSSDOCK_COLD bool wait_stage_on(const LaunchCommon& c, ptx::MBarrier* barrier,
                                  u32 parity CROSSDOCK_SITE) {
  return wait_until(
      c, Expected{Phase::kStage, kNoPeer, parity},
      [&] { return u64{ptx::mbarrier_try_wait(barrier, parity CROSSDOCK_PASS_SITE)}; },
      [](u64 passed) { return passed != 0; } CROSSDOCK_PASS_SITE);
}
}  // namespace detail

// Waits for the phase of an mbarrier with this parity. One thread, or all lanes of a warp: each
// returns its own outcome.
CROSSDOCK_DEVICE bool wait_stage(const LaunchCommon& c, ptx::MBarrier* barrier,
                                 u32 parity CROSSDOCK_SITE) {
  if (ptx::mbarrier_try_wait(barrier, parity CROSSDOCK_PASS_SITE)) return true;
  return detail::wait_stage_on(c, barrier, parity CROSSDOCK_PASS_SITE);
}

// For a role that leaves early: waits for a load to land even though the rank aborts, because a
// copy still on its way would write into the shared memory of the next block. Gives up at the
// deadline.
CROSSDOCK_COLD void settle_stage(const LaunchCommon& c, ptx::MBarrier* barrier,
                                 u32 parity CROSSDOCK_SITE) {
  const u64 start = ptx::global_timer();
  while (!ptx::mbarrier_try_wait(barrier, parity CROSSDOCK_PASS_SITE)) {
    if (ptx::global_timer() - start > deadline_of(c, Phase::kStage)) return;
    ptx::spin("settle_stage" CROSSDOCK_PASS_SITE);
  }
}

// Threads of a block that act together: whole warps, contiguous, with a named barrier of their own.
struct ThreadGroup {
  u32 barrier_id;
  u32 first_thread;
  u32 threads;

  CROSSDOCK_DEVICE static ThreadGroup block() { return {0, 0, block_size()}; }
  CROSSDOCK_DEVICE u32 index() const { return thread_index() - first_thread; }
  CROSSDOCK_DEVICE bool leader() const { return index() == 0; }
  CROSSDOCK_DEVICE void sync(CROSSDOCK_SITE_ONLY) const {
    ptx::sync_warp(kFullMask CROSSDOCK_PASS_SITE);  // the aligned barrier wants converged warps
    ptx::barrier_sync(barrier_id, threads CROSSDOCK_PASS_SITE);
  }
  // A sync that tells all of them whether any came with `predicate`.
  CROSSDOCK_DEVICE bool any(bool predicate CROSSDOCK_SITE) const {
    ptx::sync_warp(kFullMask CROSSDOCK_PASS_SITE);
    return ptx::barrier_any(barrier_id, threads, predicate CROSSDOCK_PASS_SITE);
  }
};

// At the start of a kernel, by all threads of the block: false if an earlier launch has failed and
// the group was not reset since. All threads get the same answer.
CROSSDOCK_DEVICE bool may_start(const LaunchCommon& c CROSSDOCK_SITE) {
  const ThreadGroup group = ThreadGroup::block();
  const bool stop = group.leader() && aborted(c CROSSDOCK_PASS_SITE);
  return !group.any(stop CROSSDOCK_PASS_SITE);
}

}  // namespace crossdock::device
