// Operations that go on while their issuer does something else: bulk and tensor copies and wgmma.
// The engine holds them until the scheduler lets one make progress; when that is decides AsyncMode.
// Pieces complete in any order that the ISA allows. Runs on the scheduler's OS thread, on the
// scheduler's stack or (early mode) on the issuer's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <crossdock/twin/hooks.hpp>

#include "twin/options.hpp"
#include "twin/random.hpp"
#include "twin/weak_memory.hpp"

namespace crossdock::twin {

class Runtime;
struct Cta;
struct Fiber;
struct Kernel;
struct Mbarrier;

// A group of bulk stores between two commits.
struct BulkGroup {
  std::uint32_t pending_reads = 0;
  std::uint32_t pending_writes = 0;
  bool reads_waited = false;
  std::vector<std::uint64_t> shadow_reads;  // handles of SharedShadow
  std::array<char, 2> tokens{};             // TSan: reads done, writes done
};
struct BulkState {
  std::shared_ptr<BulkGroup> open;
  std::deque<std::shared_ptr<BulkGroup>> committed;
};

// A contiguous piece of a copy. `global` is nullptr outside of the tensor: zeros are loaded,
// nothing is stored.
struct CopySegment {
  unsigned char* shared = nullptr;
  unsigned char* global = nullptr;
  std::uint32_t bytes = 0;
};

// One wgmma of a warpgroup: issued by 128 threads, executed once.
struct MmaOp {
  hooks::Wgmma op{};
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  bool a_in_registers = false;
  std::uint32_t arrived = 0;
  std::array<float*, 128> accumulators{};
  std::array<bool, 128> chained{};         // accumulates onto an operation still pending
  std::vector<float> inputs;               // else: the accumulators at issue
  std::vector<std::uint32_t> a_registers;  // 4 a thread
  std::vector<std::uint64_t> shadow_reads;
  std::array<char, 2> tokens{};  // TSan: issue, completion
  bool unordered = false;        // a thread that issued it is
  void* tsan_agent = nullptr;
};
struct Warpgroup {
  std::deque<MmaOp> ops;                  // issued, not yet waited for by all four warps
  std::uint32_t first = 0;                // index of ops.front() since the kernel began
  std::uint32_t completed = 0;            // operations executed so far
  std::array<std::uint32_t, 4> waited{};  // per warp
};

struct AsyncOp {
  enum class Kind : std::uint8_t { kLoad, kStore, kReduce, kMma };
  Kind kind = Kind::kLoad;
  Cta* cta = nullptr;
  Fiber* issuer = nullptr;
  std::vector<CopySegment> segments;
  std::size_t segment = 0;
  std::uint32_t offset = 0;  // in the segment
  bool reading = true;       // stores: first shared -> buffer, then buffer -> global
  std::uint32_t total = 0;
  std::shared_ptr<std::vector<unsigned char>> buffer;
  std::uint32_t buffered = 0;
  Mbarrier* barrier = nullptr;
  void* barrier_word = nullptr;
  std::shared_ptr<BulkGroup> group;
  hooks::BulkReduce reduce{};
  View view;
  std::uint32_t warpgroup = 0;
  void* tsan_agent = nullptr;
};

class AsyncEngine {
 public:
  explicit AsyncEngine(Runtime& runtime) : runtime_(runtime) {}

  void begin(AsyncMode mode);
  void submit(AsyncOp op);
  // Lets one operation make progress. `quiescent`: nothing else can run.
  bool advance(bool quiescent);
  // Operations of this kernel are in flight.
  [[nodiscard]] bool touches(const Kernel& kernel) const;
  // Loads into shared memory of this block are in flight.
  [[nodiscard]] bool loads_into(const Cta& cta) const;
  [[nodiscard]] bool idle() const { return loads_.empty() && readers_.empty(); }
  // True when `advance(false)` may do something.
  [[nodiscard]] bool eager() const {
    return (mode_ != AsyncMode::kLate && !loads_.empty()) ||
           (mode_ == AsyncMode::kRandom && !readers_.empty());
  }
  [[nodiscard]] std::uint64_t events() const { return events_; }

 private:
  bool step(AsyncOp& op);  // true when it is finished
  bool step_load(AsyncOp& op);
  bool step_read(AsyncOp& op);
  bool step_write(AsyncOp& op);
  void reduce_piece(AsyncOp& op, unsigned char* global, const unsigned char* data,
                    std::uint32_t bytes);
  bool step_mma(AsyncOp& op);
  void finish_load(AsyncOp& op);
  std::uint32_t piece(const AsyncOp& op);
  bool advance_in(std::vector<AsyncOp>& queue);

  Runtime& runtime_;
  AsyncMode mode_ = AsyncMode::kRandom;
  std::uint64_t events_ = 0;
  std::vector<AsyncOp> loads_;
  std::vector<AsyncOp> readers_;  // stores and wgmma: they read shared memory
};

}  // namespace crossdock::twin
