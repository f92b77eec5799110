// The run loop: starting and ending of kernels, background events, quiescence and deadlines.
// SPDX-License-Identifier: Apache-2.0
#include "twin/runtime.hpp"

#include <algorithm>
#include <utility>

namespace crossdock::twin {

constinit thread_local Fiber* t_current = nullptr;

namespace {

constexpr std::uint64_t kStepNs = 4;  // virtual time of one switch
constexpr std::uint64_t kFirstJumpNs = 1'000;
constexpr std::uint64_t kLastJumpNs = std::uint64_t{1} << 50;

// The entry of every fiber.
void fiber_main() {
  Fiber& fiber = *t_current;
  Scheduler::arrive_on_fiber(fiber);
  fiber.cta->kernel->body();
  fiber.cta->runtime->finish_thread(fiber);
}

}  // namespace

Policy policy_of(const Schedule& schedule) {
  if (schedule.policy != Policy::kBySeed) return schedule.policy;
  // kThreads costs two to four times as much as the others, so it is one seed of six.
  constexpr Policy kMix[] = {Policy::kWarps,    Policy::kStarve, Policy::kThreads,
                             Policy::kPriority, Policy::kWarps,  Policy::kInOrder};
  return kMix[schedule.seed % 6];
}

AsyncMode async_mode_of(const Schedule& schedule) {
  if (schedule.async_mode != AsyncMode::kBySeed) return schedule.async_mode;
  constexpr AsyncMode kMix[] = {AsyncMode::kLate, AsyncMode::kRandom, AsyncMode::kLateReads,
                                AsyncMode::kRandom, AsyncMode::kEarly};
  return kMix[schedule.seed % 5];
}

Runtime::Runtime(AddressSpace& space, const WorldOptions& options)
    : space_(space),
      options_(options),
      random_(1),
      scheduler_(random_),
      watch_(space, scheduler_),
      memory_(space, watch_, random_, options.ranks),
      async_(*this) {}

// ---- kernels --------------------------------------------------------------------------------

void Runtime::begin(const Schedule& schedule, std::vector<Stream>& streams) {
  schedule_ = schedule;
  if (kTsan)
    schedule_.weak = schedule_.stale = false;  // TSan takes the orders from the hooks instead
  random_ = Random(schedule.seed);
  report_ = Report{};
  report_.seed = schedule.seed;
  streams_ = &streams;
  stopped_ = kernel_ended_ = false;
  may_preempt_ = schedule.preempt_log2 < 32;
  preempt_mask_ = may_preempt_ ? (1u << schedule.preempt_log2) - 1 : 0;
  constexpr std::uint32_t kRates[] = {64, 8, 192, 1};
  event_rate_ = kRates[schedule.seed / 2 % 4];
  live_ = hooks_ = progress_ = events_ = clock_ns_ = 0;
  checked_progress_ = ~std::uint64_t{0};
  jump_ns_ = kFirstJumpNs;
  scheduler_.begin(schedule_, options_.stack_bytes);
  watch_.begin();
  memory_.begin({schedule_.weak, schedule_.stale});
  async_.begin(async_mode_of(schedule_));
}

void Runtime::start_thread(Stream& stream, Cta& cta, std::uint32_t index) {
  const std::size_t slot = static_cast<std::size_t>(cta.index) * cta.size + index;
  Fiber& fiber = stream.fibers[slot];
  fiber = Fiber{};
  fiber.cta = &cta;
  fiber.warp = &cta.warps[index / 32];
  fiber.lane = index % 32;
  fiber.thread = {index, cta.index, cta.size, cta.kernel->config.grid,
                  static_cast<std::uint32_t>(cta.rank)};
  fiber.stack = stream.stacks + slot * options_.stack_bytes;
  fiber.state = FiberState::kReady;
  fiber.may_touch_global = !cta.kernel->config.overlap;
  memory_.start_thread(fiber);
  asan::unpoison(fiber.stack, options_.stack_bytes);
  // Stacks that all end at one offset in a page would share cache sets: spread them by cache lines.
  constexpr std::size_t kColours = 32;
  constexpr std::size_t kLine = 64;
  make_context(fiber.context, fiber.stack, options_.stack_bytes - slot % kColours * kLine,
               fiber_main);
  if constexpr (kTsan) fiber.tsan_fiber = tsan::create(describe(fiber).c_str());
}

void Runtime::start_cta(Stream& stream, Kernel& kernel, std::uint32_t index) {
  constexpr unsigned char kPoison = 0xA5;
  const LaunchConfig& config = kernel.config;
  Cta& cta = kernel.ctas.emplace_back();
  cta.runtime = this;
  cta.kernel = &kernel;
  cta.rank = config.rank;
  cta.index = index;
  cta.size = cta.alive = config.block;
  cta.shared_bytes = config.shared_bytes;
  const std::size_t pitch = (config.shared_bytes + 2047) / 1024 * 1024;
  cta.shared = stream.shared + index * pitch;
  cta.fibers = &stream.fibers[static_cast<std::size_t>(index) * config.block];
  cta.warps.resize((config.block + 31) / 32);
  cta.warpgroups.resize((config.block + 127) / 128);
  cta.shadow.begin(config.shared_bytes, config.block, schedule_.proxy_check);
  raw_fill(cta.shared, kPoison, config.shared_bytes);
  for (std::uint32_t w = 0; w < cta.warps.size(); ++w) {
    Warp& warp = cta.warps[w];
    warp.cta = &cta;
    warp.fibers = cta.fibers + w * 32;
    warp.size = std::min(32u, config.block - w * 32);
  }
  for (std::uint32_t t = 0; t < config.block; ++t)
    start_thread(stream, cta, t);
}

void Runtime::start_next(Stream& stream) {
  if (stream.next == stream.kernels.size()) return;
  Kernel& kernel = stream.kernels[stream.next++];
  kernel.alive = kernel.config.grid * kernel.config.block;
  live_ += kernel.alive;
  stream.active = &kernel;
  for (std::uint32_t i = 0; i < kernel.config.grid; ++i)
    start_cta(stream, kernel, i);
  for (Cta& cta : kernel.ctas)
    for (Warp& warp : cta.warps)
      scheduler_.add(warp);
}

void Runtime::finish_thread(Fiber& fiber) {
  Cta& cta = *fiber.cta;
  if (fiber.extra) {
    for (const auto& group : fiber.extra->bulk.committed)
      if (group->pending_reads != 0 && !group->reads_waited)
        violation(fiber, "exit", "the thread ends while a bulk store still reads its shared memory",
                  fiber.note.site);
    const auto& open = fiber.extra->bulk.open;
    if (open && open->pending_reads != 0)
      violation(fiber, "exit", "the thread ends with bulk stores that were never committed",
                fiber.note.site);
  }
  if (cta.alive == 1 && async_.loads_into(cta))
    violation(fiber, "exit", "the block ends while a bulk load still writes its shared memory",
              fiber.note.site);
  {
    Internal internal(*this);
    memory_.finish_thread(fiber);
    if (--cta.alive == 0) memory_.finish_cta(cta);
    if (--cta.kernel->alive == 0) kernel_ended_ = true;
    --live_;
    note_progress();
  }
  scheduler_.leave(fiber);
}

// All that the threads did happens before what the host or the next kernel does; also for threads
// that a failed run has left in the middle.
void Runtime::retire_tsan_fibers(Stream& stream) {
  for (Fiber& fiber : stream.fibers) {
    if (fiber.tsan_fiber == nullptr) continue;
    {
      AsTsanFiber thread(fiber.tsan_fiber);
      if (fiber.unordered) tsan::ignore_end();
      tsan::release(&kernel_ended_);
    }
    tsan::acquire(&kernel_ended_);
    tsan::destroy(std::exchange(fiber.tsan_fiber, nullptr));
  }
}

void Runtime::end_kernels() {
  kernel_ended_ = false;
  for (Stream& stream : *streams_) {
    if (stream.active == nullptr || stream.active->alive != 0) continue;
    // Bulk stores that were only waited for as far as their reads may still be on their way; the
    // kernel boundary completes them.
    while (async_.touches(*stream.active))
      async_.advance(true);
    tsan::acquire(&async_);
    if constexpr (kTsan) retire_tsan_fibers(stream);
    for (Cta& cta : stream.active->ctas)
      memory_.finish_cta(cta);
    stream.active->ctas.clear();
    stream.active = nullptr;
    start_next(stream);
  }
}

// ---- the loop -------------------------------------------------------------------------------

bool Runtime::background_event(bool quiescent) {
  const bool stores = memory_.drainable() != 0;
  const bool copies = quiescent ? !async_.idle() : async_.eager();
  if (!stores && !copies) return false;
  clock_ns_ += kStepNs;
  ++events_;
  if (stores && (!copies || random_.one_in(4)) && memory_.drain_one()) return true;
  return copies && async_.advance(quiescent);
}

template <class Visit>
void Runtime::for_each_live(Visit&& visit) {
  for (Stream& stream : *streams_) {
    if (stream.active == nullptr) continue;
    for (Cta& cta : stream.active->ctas)
      for (std::uint32_t i = 0; i < cta.size; ++i)
        visit(cta.fibers[i]);
  }
}

bool Runtime::wake_parked(bool only_clock) {
  bool any = false;
  for_each_live([&](Fiber& fiber) {
    if (fiber.state != FiberState::kParked || (only_clock && !fiber.reads.clock)) return;
    watch_.wake(fiber);
    any = true;
  });
  return any;
}

// No fiber can run and nothing is in flight. True when something was found to go on with.
bool Runtime::at_quiescence() {
  const std::uint64_t progress = progress_ + watch_.writes();
  if (progress != checked_progress_) {
    // Let every poller look once more before anything is called a deadlock.
    checked_progress_ = progress;
    jump_ns_ = kFirstJumpNs;
    if (wake_parked(false)) return true;
  }
  if (schedule_.fire_deadlines && jump_ns_ < kLastJumpNs) {
    clock_ns_ += jump_ns_;
    jump_ns_ *= 2;
    if (wake_parked(true)) return true;
  }
  fail(Outcome::kDeadlock, "deadlock", describe_waiting(*streams_));
  return false;
}

void Runtime::loop() {
  while (!stopped_) {
    if (kernel_ended_) end_kernels();
    if (scheduler_.has_ready()) {
      if (random_.below(256) < event_rate_) background_event(false);
      scheduler_.run_some();
      if (scheduler_.steps() > schedule_.max_steps)
        fail(Outcome::kStepLimit, "step limit",
             "no end after " + std::to_string(schedule_.max_steps) + " steps: a livelock, or " +
                 "max_steps is too small\n" + describe_waiting(*streams_));
      continue;
    }
    if (background_event(true)) continue;
    if (live_ == 0 || !at_quiescence()) break;
  }
}

void Runtime::end() {
  for (Stream& stream : *streams_) {
    if constexpr (kTsan) retire_tsan_fibers(stream);
    if (stream.active != nullptr) stream.active->ctas.clear();
    stream.active = nullptr;
    stream.next = 0;
  }
  async_.begin(AsyncMode::kRandom);  // drops what an aborted run left in flight
  report_.steps = scheduler_.steps();
  report_.hooks = hooks_;
  report_.async_events = events_;
  report_.virtual_ns = clock_ns_ + kStepNs * scheduler_.steps();
  report_.schedule_hash = scheduler_.hash();
}

Report Runtime::run(const Schedule& schedule, std::vector<Stream>& streams) {
  begin(schedule, streams);
  for (Stream& stream : streams)
    start_next(stream);
  loop();
  end();
  return std::move(report_);
}

// ---- waiting and failing --------------------------------------------------------------------

void Runtime::block(Fiber& fiber, const WaitNote& note) {
  fiber.note = note;
  fiber.state = FiberState::kBlocked;
  scheduler_.suspend(fiber);
}

void Runtime::park_or_yield(Fiber& fiber) {
  ReadSet& reads = fiber.reads;
  bool parked = false;
  {
    Internal internal(*this);
    // A stale value, or a loop that reads nothing that is watched: look again later.
    if (!reads.stale && (reads.count != 0 || reads.overflow)) parked = watch_.park(fiber);
  }
  if (parked) {
    fiber.state = FiberState::kParked;
    scheduler_.suspend(fiber);
  } else {
    if (reads.clock && reads.count == 0) clock_ns_ += 64;  // a pure delay loop
    scheduler_.yield(fiber);
  }
  reads.clear();
}

std::uint64_t Runtime::now_ns(Fiber& fiber) {
  fiber.reads.clock = true;
  clock_ns_ += 1;  // time never stands still between two readings
  return clock_ns_ + kStepNs * scheduler_.steps();
}

void Runtime::fail(Outcome outcome, std::string kind, std::string message) {
  stopped_ = true;
  scheduler_.stop();
  if (!report_.ok()) return;  // the first failure is the cause
  report_.outcome = outcome;
  report_.kind = std::move(kind);
  report_.message = std::move(message);
}

void Runtime::violation(Fiber& fiber, const char* kind, std::string message, Site site) {
  {
    // The caller's frames are left for good, so nothing there may own memory.
    const std::string text = std::move(message);
    fail(Outcome::kViolation, kind, describe(fiber) + ": " + text + " at " + describe(site));
  }
  scheduler_.leave(fiber);
}

}  // namespace crossdock::twin
