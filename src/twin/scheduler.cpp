// Scheduling policies and the switches between the scheduler and fibers.
// SPDX-License-Identifier: Apache-2.0
#include "twin/scheduler.hpp"

#include <bit>

#include "twin/runtime.hpp"
#include "twin/state.hpp"

namespace crossdock::twin {

namespace {
constexpr std::uint32_t kVictimPeriod = 4096;    // picks between changes of the starved victim
constexpr std::uint32_t kPriorityPeriod = 1024;  // picks between priority changes
constexpr std::uint64_t kHashPrime = 0x100000001B3ull;
}  // namespace

void Scheduler::begin(const Schedule& schedule, std::size_t stack_bytes) {
  policy_ = policy_of(schedule);
  stack_bytes_ = stack_bytes;
  ready_.clear();
  stopped_ = false;
  cursor_ = 0;
  victim_kind_ = VictimKind::kNone;
  steps_ = 0;
  hash_ = 0xCBF29CE484222325ull;
  tsan_fiber_ = tsan::current();
}

void Scheduler::add(Warp& warp) {
  warp.ready = warp.size == 32 ? ~0u : (1u << warp.size) - 1;
  warp.priority = static_cast<std::uint32_t>(random_.next() >> 32);
  warp.queued = true;
  ready_.push_back(&warp);
}

void Scheduler::make_ready(Fiber& fiber) {
  fiber.state = FiberState::kReady;
  Warp& warp = *fiber.warp;
  warp.ready |= 1u << fiber.lane;
  if (warp.queued) return;
  warp.queued = true;
  ready_.push_back(&warp);
}

// ---- policies -------------------------------------------------------------------------------

bool Scheduler::starved(const Warp& warp) const {
  switch (victim_kind_) {
    case VictimKind::kNone:
      return false;
    case VictimKind::kRank:
      return warp.cta->rank == victim_rank_;
    case VictimKind::kCta:
      return warp.cta == victim_cta_;
    case VictimKind::kWarp:
      return &warp == victim_;
  }
  return false;
}

void Scheduler::choose_victim() {
  const Warp& warp = *ready_[random_.below(static_cast<std::uint32_t>(ready_.size()))];
  victim_kind_ = static_cast<VictimKind>(1 + random_.below(3));
  victim_ = &warp;
  victim_cta_ = warp.cta;
  victim_rank_ = warp.cta->rank;
}

std::uint32_t Scheduler::pick() {
  const auto n = static_cast<std::uint32_t>(ready_.size());
  std::uint32_t i = random_.below(n);
  switch (policy_) {
    case Policy::kStarve:
      if (victim_kind_ == VictimKind::kNone || random_.one_in(kVictimPeriod)) choose_victim();
      // A victim that is all that is left runs: this is starvation, not a deadlock.
      for (int attempt = 0; attempt < 8 && starved(*ready_[i]); ++attempt)
        i = random_.below(n);
      return i;
    case Policy::kPriority:
      if (random_.one_in(kPriorityPeriod)) ready_[i]->priority = 0;
      for (int attempt = 0; attempt < 4; ++attempt) {
        const std::uint32_t other = random_.below(n);
        if (ready_[other]->priority > ready_[i]->priority) i = other;
      }
      return i;
    case Policy::kInOrder:
      return cursor_++ % n;
    case Policy::kBySeed:
    case Policy::kWarps:
    case Policy::kThreads:
      return i;
  }
  return i;
}

void Scheduler::run_lanes(Warp& warp) {
  if (policy_ == Policy::kThreads) {
    std::uint32_t mask = warp.ready;
    for (std::uint32_t k = random_.below(static_cast<std::uint32_t>(std::popcount(mask))); k > 0;
         --k)
      mask &= mask - 1;
    run(warp.fibers[std::countr_zero(mask)]);
    return;
  }
  const int start = static_cast<int>(random_.below(32));
  for (std::uint32_t todo = std::rotr(warp.ready, start); todo != 0 && !stopped_;
       todo &= todo - 1) {
    const int lane = (std::countr_zero(todo) + start) & 31;
    if ((warp.ready >> lane & 1) != 0) run(warp.fibers[lane]);
  }
}

void Scheduler::run_some() {
  const std::uint32_t i = pick();
  Warp& warp = *ready_[i];
  run_lanes(warp);
  if (warp.ready != 0) return;
  // The list may have grown meanwhile, but `i` still names this warp: entries only move on removal.
  warp.queued = false;
  ready_[i] = ready_.back();
  ready_.pop_back();
}

// ---- switching ------------------------------------------------------------------------------

void Scheduler::run(Fiber& fiber) {
  fiber.warp->ready &= ~(1u << fiber.lane);
  ++steps_;
  hash_ = (hash_ ^
           (fiber.thread.rank << 24 ^ fiber.thread.block_index << 12 ^ fiber.thread.thread_index)) *
          kHashPrime;
  set_current(&fiber);
  tsan::switch_to(fiber.tsan_fiber);
  asan::leave(&asan_fake_stack_, asan::Stack{fiber.stack, stack_bytes_});
  switch_context(context_, fiber.context);
  asan::arrive(asan_fake_stack_, nullptr);
  set_current(nullptr);
}

void Scheduler::arrive_on_fiber(Fiber& fiber) {
  asan::arrive(fiber.asan_fake_stack, &fiber.cta->runtime->scheduler().own_stack_);
}

void Scheduler::switch_out(Fiber& fiber) {
  tsan::switch_to(tsan_fiber_);
  asan::leave(&fiber.asan_fake_stack, own_stack_);
  switch_context(fiber.context, context_);
  arrive_on_fiber(fiber);
}

void Scheduler::yield(Fiber& fiber) {
  make_ready(fiber);
  switch_out(fiber);
}

void Scheduler::suspend(Fiber& fiber) {
  switch_out(fiber);
}

void Scheduler::leave(Fiber& fiber) {
  fiber.state = FiberState::kDone;
  tsan::switch_to(tsan_fiber_);
  asan::leave(nullptr, own_stack_);
  switch_context(fiber.context, context_);
  __builtin_unreachable();
}

}  // namespace crossdock::twin
