// Who runs next. The scheduler owns the list of ready warps and switches between its own stack and
// the fibers'; every choice comes from the run's generator, so a seed replays. One OS thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "twin/context.hpp"
#include "twin/options.hpp"
#include "twin/random.hpp"
#include "twin/sanitizer.hpp"

namespace crossdock::twin {

struct Cta;
struct Fiber;
struct Warp;

class Scheduler {
 public:
  explicit Scheduler(Random& random) : random_(random) {}

  void begin(const Schedule& schedule, std::size_t stack_bytes);

  // Called by the runtime on the scheduler's stack.
  void add(Warp& warp);  // all its lanes are ready
  [[nodiscard]] bool has_ready() const { return !ready_.empty(); }
  void run_some();  // one step of the policy
  void* tsan_fiber() const { return tsan_fiber_; }

  // Called on a fiber's stack.
  void yield(Fiber& fiber);
  void suspend(Fiber& fiber);  // the state is set by the caller; somebody else makes it ready
  [[noreturn]] void leave(Fiber& fiber);  // never resumed

  void make_ready(Fiber& fiber);
  // Entry of every fiber: the first thing on its stack.
  static void arrive_on_fiber(Fiber& fiber);

  void stop() { stopped_ = true; }
  [[nodiscard]] std::uint64_t steps() const { return steps_; }
  [[nodiscard]] std::uint64_t hash() const { return hash_; }

 private:
  enum class VictimKind : std::uint8_t { kNone, kRank, kCta, kWarp };
  std::uint32_t pick();
  [[nodiscard]] bool starved(const Warp& warp) const;
  void choose_victim();
  void run_lanes(Warp& warp);
  void run(Fiber& fiber);
  void switch_out(Fiber& fiber);

  Random& random_;
  Context context_;
  std::vector<Warp*> ready_;
  Policy policy_ = Policy::kWarps;
  bool stopped_ = false;
  std::uint32_t cursor_ = 0;
  VictimKind victim_kind_ = VictimKind::kNone;
  const Warp* victim_ = nullptr;
  int victim_rank_ = -1;
  const Cta* victim_cta_ = nullptr;
  std::uint64_t steps_ = 0;
  std::uint64_t hash_ = 0;
  std::size_t stack_bytes_ = 0;
  void* tsan_fiber_ = nullptr;
  void* asan_fake_stack_ = nullptr;
  asan::Stack own_stack_;
};

}  // namespace crossdock::twin
