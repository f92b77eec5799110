// The state of a run: fibers (one per CUDA thread), warps, CTAs and kernels. Owned by the Runtime,
// touched only by the OS thread that runs it; no function here switches fibers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include <crossdock/twin/hooks.hpp>

#include "twin/async.hpp"
#include "twin/context.hpp"
#include "twin/options.hpp"
#include "twin/sanitizer.hpp"
#include "twin/shared_shadow.hpp"
#include "twin/weak_memory.hpp"

namespace crossdock::twin {

using hooks::Access;
using hooks::Order;
using hooks::Scope;

class Runtime;
struct Cta;
struct Fiber;
struct Kernel;

enum class FiberState : std::uint8_t {
  kReady,
  kParked,   // polling: woken by a write to what it read
  kBlocked,  // in a rendezvous or waiting for its own asynchronous operations
  kDone,
};

// What a waiting fiber waits for, in words for the report.
struct WaitNote {
  const char* what = "start";
  Site site;
  std::uint64_t object = 0;  // barrier id, mbarrier offset or address
  std::uint64_t detail = 0;
};

// Global words read since the last spin, with the version of their bucket at that time.
struct ReadSet {
  static constexpr unsigned kCapacity = 8;
  struct Mark {
    std::uint32_t bucket;
    std::uint32_t version;
  };
  std::array<Mark, kCapacity> marks;
  std::uint8_t count = 0;
  bool overflow = false;
  bool clock = false;     // virtual time was read
  bool stale = false;     // an overwritten value was returned: polling again may see another one
  bool mbarrier = false;  // the note names an mbarrier that was polled
  void clear() {
    count = 0;
    overflow = clock = stale = mbarrier = false;
  }
};

// The rarely used part of a fiber, made on first use.
// A cp.async that its thread has not waited for. `global` null: zeros.
struct PendingCopy {
  void* shared = nullptr;
  const void* global = nullptr;
  unsigned bytes = 0;
};

struct FiberExtra {
  BulkState bulk;
  std::vector<std::uint32_t> wgmma_groups;  // issue counts at each commit not yet waited for
  std::uint32_t wgmma_issued = 0;
  bool wgmma_fenced = false;
  std::uint32_t registers = 0;
  std::vector<PendingCopy> open_copies;  // since the last commit
  std::vector<std::vector<PendingCopy>> copies;
};

struct alignas(64) Fiber {
  Context context;
  Cta* cta = nullptr;
  struct Warp* warp = nullptr;
  hooks::Thread thread{};
  std::uint32_t lane = 0;
  FiberState state = FiberState::kDone;
  bool waits_for_async = false;
  bool may_touch_global = true;  // false: launched to overlap, and has not waited yet
  bool has_fence_views = false;
  std::uint32_t ticket = 0;  // a parked fiber's current park; 0: not parked
  std::uint32_t next_ticket = 0;
  ReadSet reads;
  WaitNote note;
  std::uint64_t exchange_in = 0;  // warp collectives: what this lane brings
  std::uint64_t exchange_aux = 0;
  std::uint64_t exchange_out = 0;  // and takes away
  ThreadView memory;               // weak-memory state
  SmemView smem;                   // what this thread has synchronised with, for the proxy check
  std::unique_ptr<FiberExtra> extra;
  unsigned char* stack = nullptr;
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
  std::array<const void*, 6> tsan_relaxed{};  // words read relaxed since the last fence
  std::uint32_t tsan_relaxed_next = 0;
  bool tsan_release_fence = false;
  bool unordered = false;  // goes on after a wait that it has given up: TSan looks away
};

// One rendezvous of lanes. Lanes with disjoint masks may meet at the same time, so a warp has as
// many as it has lanes; the lowest lane of the mask names the slot.
struct Collective {
  std::uint32_t mask = 0;
  std::uint32_t arrived = 0;
  std::uint8_t operation = 0;
  std::uint8_t generation = 0;
  std::array<char, 2> tokens{};
};

struct Warp {
  std::uint32_t ready = 0;  // lanes that can run
  bool queued = false;      // in the scheduler's list
  std::uint32_t priority = 0;
  Fiber* fibers = nullptr;
  std::uint32_t size = 32;
  Cta* cta = nullptr;
  std::array<Collective, 32> collectives{};
};

struct NamedBarrier {
  std::uint32_t count = 0;
  std::uint32_t arrived = 0;
  std::uint32_t generation = 0;
  bool any = false;  // some thread of this round came with a true predicate
  std::array<char, 2> tokens{};
  View view;
  std::vector<Fiber*> waiters;
};

// The state behind an mbarrier; the 8 bytes in shared memory only name it.
struct Mbarrier {
  std::uint32_t offset = 0;
  std::uint32_t phase = 0;
  std::uint32_t expected = 0;
  std::uint32_t pending = 0;
  std::int64_t transactions = 0;  // expected minus completed bytes; may be negative for a while
  bool valid = false;
  View arriving;  // of the phase under way
  View complete;  // of the phases that completed
  std::uint64_t smem_arriving = 0;
  std::uint64_t smem_complete = 0;
};

struct Cta {
  Runtime* runtime = nullptr;
  Kernel* kernel = nullptr;
  int rank = 0;
  std::uint32_t index = 0;
  unsigned char* shared = nullptr;
  std::size_t shared_bytes = 0;
  Fiber* fibers = nullptr;
  std::uint32_t size = 0;
  std::uint32_t alive = 0;
  std::vector<Warp> warps;
  std::array<NamedBarrier, 16> barriers;
  std::deque<Mbarrier> mbarriers;
  std::vector<Warpgroup> warpgroups;
  std::array<std::uint32_t, 8> registers{};  // per warpgroup, after setmaxnreg
  PendingList pending;                       // stores released at CTA scope only
  std::uint64_t last_drain = 0;
  SharedShadow shadow;
};

// A launched kernel, running or not yet.
struct Kernel {
  LaunchConfig config;
  std::function<void()> body;
  std::deque<Cta> ctas;
  std::uint32_t alive = 0;
};

}  // namespace crossdock::twin
