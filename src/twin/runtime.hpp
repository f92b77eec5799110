// One run: the scheduler, the memory model, the asynchronous engine and virtual time, and the loop
// that drives them until all kernels have ended or nothing can. Hooks find it through the current
// fiber. Belongs to the OS thread that calls World::run.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "twin/address_space.hpp"
#include "twin/async.hpp"
#include "twin/options.hpp"
#include "twin/random.hpp"
#include "twin/scheduler.hpp"
#include "twin/state.hpp"
#include "twin/watch.hpp"
#include "twin/weak_memory.hpp"

namespace crossdock::twin {

// The fiber that runs on this OS thread, nullptr on the scheduler's stack. Fibers never change OS
// threads, so a cached address of the variable stays right across a switch.
extern constinit thread_local Fiber* t_current;
inline void set_current(Fiber* fiber) {
  t_current = fiber;
}

// The kernels of one rank and stream, and the memory that they use one after the other.
struct Stream {
  int rank = 0;
  int id = 0;
  std::vector<Kernel> kernels;
  std::size_t next = 0;
  Kernel* active = nullptr;
  std::vector<Fiber> fibers;
  unsigned char* stacks = nullptr;
  unsigned char* shared = nullptr;
};

class Runtime {
 public:
  Runtime(AddressSpace& space, const WorldOptions& options);

  // Runs all kernels of `streams`.
  Report run(const Schedule& schedule, std::vector<Stream>& streams);

  Scheduler& scheduler() { return scheduler_; }
  WeakMemory& memory() { return memory_; }
  Watch& watch() { return watch_; }
  AsyncEngine& async() { return async_; }
  Random& random() { return random_; }
  const AddressSpace& space() const { return space_; }
  const Schedule& schedule() const { return schedule_; }

  // Called by every hook: now and then another fiber goes first.
  void preempt(Fiber& fiber) {
    ++hooks_;
    if ((static_cast<std::uint32_t>(random_.next() >> 33) & preempt_mask_) == 0 && may_preempt_)
      scheduler_.yield(fiber);
  }
  // Something happened that may let a waiting fiber go on.
  void note_progress() { ++progress_; }
  // Blocks the fiber until make_ready; the note goes into reports.
  void block(Fiber& fiber, const WaitNote& note);
  void park_or_yield(Fiber& fiber);

  // Breaking a rule of the device ends the run; on a fiber this does not return.
  [[noreturn]] void violation(Fiber& fiber, const char* kind, std::string message, Site site);
  void fail(Outcome outcome, std::string kind, std::string message);

  std::uint64_t now_ns(Fiber& fiber);
  // The body of a fiber has returned.
  [[noreturn]] void finish_thread(Fiber& fiber);

  // Work of the twin itself, in the eyes of TSan.
  class Internal : public AsTsanFiber {
   public:
    explicit Internal(Runtime& runtime) : AsTsanFiber(runtime.scheduler_.tsan_fiber()) {}
  };

 private:
  void begin(const Schedule& schedule, std::vector<Stream>& streams);
  void end();
  void loop();
  void start_next(Stream& stream);
  void start_cta(Stream& stream, Kernel& kernel, std::uint32_t index);
  void start_thread(Stream& stream, Cta& cta, std::uint32_t index);
  void end_kernels();
  void retire_tsan_fibers(Stream& stream);
  bool background_event(bool quiescent);
  bool wake_parked(bool only_clock);
  bool at_quiescence();
  template <class Visit>
  void for_each_live(Visit&& visit);

  AddressSpace& space_;
  WorldOptions options_;
  Schedule schedule_;
  Random random_;
  Scheduler scheduler_;
  Watch watch_;
  WeakMemory memory_;
  AsyncEngine async_;
  Report report_;
  std::vector<Stream>* streams_ = nullptr;
  bool stopped_ = false;
  bool kernel_ended_ = false;
  bool may_preempt_ = true;
  std::uint32_t preempt_mask_ = 15;
  std::uint32_t event_rate_ = 64;  // of 256: how often an event goes before a fiber
  std::uint64_t live_ = 0;
  std::uint64_t hooks_ = 0;
  std::uint64_t progress_ = 0;
  std::uint64_t checked_progress_ = ~std::uint64_t{0};
  std::uint64_t events_ = 0;
  std::uint64_t clock_ns_ = 0;
  std::uint64_t jump_ns_ = 0;
};

// Who waits for what, grouped: "32 threads of rank 0 cta 1 (t0-31): named barrier 3 (64 of 96) at
// f:l".
std::string describe_waiting(const std::vector<Stream>& streams);
std::string describe(const Fiber& fiber);  // "rank 0 cta 1 thread 34 (warp 1 lane 2)"
std::string describe(Site site);           // "dispatch.cuh:120"

}  // namespace crossdock::twin
