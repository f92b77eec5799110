// The hooks of a CTA: named barriers, mbarriers, register reallocation.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "twin/hook.hpp"
#include "twin/mbarrier.hpp"

namespace crossdock::twin {

namespace {

constexpr std::uint32_t kMaxCount = (1u << 20) - 1;  // of arrivals, and of transaction bytes

struct BarrierUse {
  std::uint32_t id;
  std::uint32_t count;
  bool waits;
  const char* name;
  bool predicate = false;
};

void release_barrier(Here& here, NamedBarrier& barrier) {
  const std::uint64_t clock = here.cta.shadow.clock();
  for (Fiber* waiter : barrier.waiters) {
    here.runtime.memory().acquire_from_cta(*waiter, barrier.view);
    waiter->smem.warp = waiter->smem.cta = clock;
    waiter->exchange_out = barrier.any ? 1 : 0;
    here.runtime.scheduler().make_ready(*waiter);
  }
  barrier.waiters.clear();
  barrier.arrived = 0;
  barrier.any = false;
  barrier.view = View{};
  ++barrier.generation;
  here.runtime.note_progress();
}

void use_barrier(Here& here, const BarrierUse& use) {
  here.preempt();
  if (use.id > 15)
    here.violation("barrier", fmt::format("{}: id {} must be 0..15", use.name, use.id));
  NamedBarrier& barrier = here.cta.barriers[use.id];
  if (barrier.arrived != 0 && barrier.count != use.count)
    here.violation("barrier",
                   fmt::format("{} {}: count {} differs from the {} of the threads already there",
                               use.name, use.id, use.count, barrier.count));
  const char* token = &barrier.tokens[barrier.generation & 1];
  tsan::release(token);
  bool last = false;
  {
    Runtime::Internal internal(here.runtime);
    barrier.view.join(here.runtime.memory().release_to_cta(here.fiber));
    barrier.count = use.count;
    barrier.any |= use.predicate;
    last = ++barrier.arrived == use.count;
    if (use.waits) barrier.waiters.push_back(&here.fiber);
    // The last thread becomes ready with the others, so it is not always the first to go on.
    if (last) release_barrier(here, barrier);
  }
  if (!use.waits) return;
  if (last) {
    here.runtime.scheduler().suspend(here.fiber);
  } else {
    here.runtime.block(here.fiber, {use.name, here.site, use.id, use.count});
  }
  tsan::acquire(token);
}

void check_named(Here& here, std::uint32_t count, const char* name) {
  if (count == 0 || count % 32 != 0 || count > here.cta.size)
    here.violation("barrier",
                   fmt::format("{}: count {} must be a multiple of 32 and at most the {} threads "
                               "of the CTA",
                               name, count, here.cta.size));
}

// ---- mbarriers ------------------------------------------------------------------------------
// The word in shared memory is a magic number and an index into Cta::mbarriers.

constexpr std::uint32_t kMagic = 0x6d626172;

struct Word {
  std::uint32_t index;
  std::uint32_t magic;
};

Mbarrier* find(Cta& cta, const void* barrier) {
  Word word;
  raw_copy(&word, barrier, sizeof word);
  if (word.magic != kMagic || word.index >= cta.mbarriers.size()) return nullptr;
  Mbarrier& found = cta.mbarriers[word.index];
  const auto offset = static_cast<const unsigned char*>(barrier) - cta.shared;
  return found.valid && found.offset == offset ? &found : nullptr;
}

Mbarrier& get(Here& here, const void* barrier, const char* what) {
  here.check_aligned(barrier, 8, what);
  here.shared_offset(barrier, 8, what);
  if (Mbarrier* found = find(here.cta, barrier)) return *found;
  here.violation("mbarrier", fmt::format("{} on a word that holds no mbarrier (not initialised, "
                                         "invalidated, or overwritten)",
                                         what));
}

void arrive(Here& here, void* word, std::uint32_t count, std::uint32_t bytes) {
  here.preempt();
  Mbarrier& barrier = get(here, word, "mbarrier.arrive");
  tsan::read(word, 8);
  tsan::release(word);
  Runtime::Internal internal(here.runtime);
  barrier.arriving.join(here.runtime.memory().release_to_cta(here.fiber));
  barrier.smem_arriving = here.cta.shadow.clock();
  barrier.transactions += bytes;
  if (count > barrier.pending)
    here.violation("mbarrier",
                   fmt::format("{} arrivals, but only {} of {} are expected in this phase", count,
                               barrier.pending, barrier.expected));
  if (bytes > kMaxCount || barrier.transactions > static_cast<std::int64_t>(kMaxCount))
    here.violation("mbarrier", fmt::format("{} transaction bytes expected; the most is {}",
                                           barrier.transactions, kMaxCount));
  barrier.pending -= count;
  complete_phase_if_due(here.runtime, barrier, word);
}

}  // namespace

Mbarrier* find_mbarrier(Cta& cta, const void* word) {
  return find(cta, word);
}

void complete_phase_if_due(Runtime& runtime, Mbarrier& barrier, const void* word) {
  if (barrier.pending != 0 || barrier.transactions != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
  barrier.complete.join(barrier.arriving);
  barrier.smem_complete = std::max(barrier.smem_complete, barrier.smem_arriving);
  barrier.arriving = View{};
  runtime.note_progress();
  runtime.watch().notify(word);
}

namespace hooks {

void sync_threads(Site site) {
  Here here(site);
  use_barrier(here, {0, here.cta.size, true, "__syncthreads"});
}

void barrier_sync(std::uint32_t id, std::uint32_t count, Site site) {
  Here here(site);
  check_named(here, count, "bar.sync");
  use_barrier(here, {id, count, true, "bar.sync"});
}

bool barrier_any(std::uint32_t id, std::uint32_t count, bool predicate, Site site) {
  Here here(site);
  check_named(here, count, "bar.red.or");
  use_barrier(here, {id, count, true, "bar.red.or", predicate});
  return here.fiber.exchange_out != 0;
}

void barrier_arrive(std::uint32_t id, std::uint32_t count, Site site) {
  Here here(site);
  check_named(here, count, "bar.arrive");
  use_barrier(here, {id, count, false, "bar.arrive"});
}

void set_max_registers(bool increase, std::uint32_t count, Site site) {
  Here here(site);
  here.preempt();
  if (count < 24 || count > 256 || count % 8 != 0)
    here.violation("setmaxnreg", fmt::format("{} registers must be 24..256 in steps of 8", count));
  Runtime::Internal internal(here.runtime);
  auto& registers = here.cta.registers;
  const std::size_t groups = here.cta.warpgroups.size();
  const std::uint32_t group = here.fiber.thread.thread_index / 128;
  const std::uint32_t at_launch = 65536 / (static_cast<std::uint32_t>(groups) * 128) & ~7u;
  const std::uint32_t before = here.extra().registers != 0 ? here.extra().registers : at_launch;
  if (increase ? count < before : count > before)
    here.violation("setmaxnreg", fmt::format("{} from {} to {} registers",
                                             increase ? ".inc" : ".dec", before, count));
  here.extra().registers = count;
  registers[group] = count;
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < groups; ++i) {
    if (registers[i] == 0) return;  // a warpgroup has still to say
    sum += registers[i];
  }
  // No more than the block was launched with.
  const std::uint32_t most = at_launch * static_cast<std::uint32_t>(groups);
  if (sum > most)
    here.violation("setmaxnreg",
                   fmt::format("the warpgroups ask for {} registers in sum; at most {} are "
                               "there",
                               sum, most));
}

void mbarrier_init(void* barrier, std::uint32_t count, Site site) {
  Here here(site);
  here.preempt();
  here.check_aligned(barrier, 8, "mbarrier.init");
  const std::uint32_t offset = here.shared_offset(barrier, 8, "mbarrier.init");
  if (count == 0 || count > kMaxCount)
    here.violation("mbarrier",
                   fmt::format("init with a count of {}; it must be 1..{}", count, kMaxCount));
  tsan::write(barrier, 8);
  Runtime::Internal internal(here.runtime);
  Mbarrier* state = find(here.cta, barrier);
  if (state == nullptr) state = &here.cta.mbarriers.emplace_back();
  *state = Mbarrier{};
  state->offset = offset;
  state->expected = state->pending = count;
  state->valid = true;
  std::uint32_t index = 0;
  while (&here.cta.mbarriers[index] != state)
    ++index;
  const Word word{index, kMagic};
  raw_copy(barrier, &word, sizeof word);
  here.runtime.watch().notify(barrier);
}

void mbarrier_invalidate(void* barrier, Site site) {
  Here here(site);
  here.preempt();
  get(here, barrier, "mbarrier.inval").valid = false;
  tsan::write(barrier, 8);
}

void mbarrier_arrive(void* barrier, std::uint32_t count, Site site) {
  Here here(site);
  arrive(here, barrier, count, 0);
}

void mbarrier_expect_tx(void* barrier, std::uint32_t bytes, Site site) {
  Here here(site);
  here.preempt();
  Mbarrier& state = get(here, barrier, "mbarrier.expect_tx");
  tsan::read(barrier, 8);
  state.transactions += bytes;
}

void mbarrier_arrive_expect_tx(void* barrier, std::uint32_t bytes, Site site) {
  Here here(site);
  arrive(here, barrier, 1, bytes);
}

bool mbarrier_try_wait(void* barrier, std::uint32_t parity, Site site) {
  Here here(site);
  here.preempt();
  Mbarrier& state = get(here, barrier, "mbarrier.try_wait");
  tsan::read(barrier, 8);
  here.runtime.watch().record(here.fiber, barrier);
  if (state.phase == (parity & 1)) {
    here.fiber.note = {"mbarrier.try_wait", site, state.offset, parity};
    here.fiber.reads.mbarrier = true;
    return false;
  }
  tsan::acquire(barrier);
  here.runtime.memory().acquire_from_cta(here.fiber, state.complete);
  here.fiber.smem.cta = std::max(here.fiber.smem.cta, state.smem_complete);
  return true;
}

}  // namespace hooks
}  // namespace crossdock::twin
