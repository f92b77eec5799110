// The asynchronous engine: when operations make progress, and what a step of each does.
// SPDX-License-Identifier: Apache-2.0
#include "twin/async.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "twin/mbarrier.hpp"
#include "twin/numbers.hpp"
#include "twin/runtime.hpp"
#include "twin/wgmma_math.hpp"

namespace crossdock::twin {

namespace {

constexpr std::uint32_t kPiece = 16;  // copies proceed in multiples of this

void wake_if_waiting(Runtime& runtime, Fiber& fiber) {
  if (fiber.state == FiberState::kBlocked && fiber.waits_for_async)
    runtime.scheduler().make_ready(fiber);
}

void zero_fill(unsigned char* p, std::uint32_t bytes) {
  raw_fill(p, 0, bytes);
}

}  // namespace

void AsyncEngine::begin(AsyncMode mode) {
  mode_ = mode;
  events_ = 0;
  for (std::vector<AsyncOp>* queue : {&loads_, &readers_}) {
    if constexpr (kTsan)
      for (AsyncOp& op : *queue)
        if (op.tsan_agent != nullptr) tsan::destroy(op.tsan_agent);
    queue->clear();
  }
}

bool AsyncEngine::touches(const Kernel& kernel) const {
  const auto of_kernel = [&](const AsyncOp& op) { return op.cta->kernel == &kernel; };
  return std::any_of(loads_.begin(), loads_.end(), of_kernel) ||
         std::any_of(readers_.begin(), readers_.end(), of_kernel);
}

bool AsyncEngine::loads_into(const Cta& cta) const {
  return std::any_of(loads_.begin(), loads_.end(),
                     [&](const AsyncOp& op) { return op.cta == &cta; });
}

void AsyncEngine::submit(AsyncOp op) {
  if (mode_ == AsyncMode::kEarly) {
    while (!step(op)) {
    }
    return;
  }
  (op.kind == AsyncOp::Kind::kLoad ? loads_ : readers_).push_back(std::move(op));
}

bool AsyncEngine::advance_in(std::vector<AsyncOp>& queue) {
  const std::uint32_t i = runtime_.random().below(static_cast<std::uint32_t>(queue.size()));
  AsyncOp op = std::move(queue[i]);
  // The step may wake fibers but never submits, so the queue keeps its shape.
  if (!step(op)) {
    queue[i] = std::move(op);
    return true;
  }
  if (i + 1 != queue.size()) queue[i] = std::move(queue.back());
  queue.pop_back();
  return true;
}

bool AsyncEngine::advance(bool quiescent) {
  const bool loads = !loads_.empty() && (quiescent || mode_ != AsyncMode::kLate);
  const bool readers = !readers_.empty() && (quiescent || mode_ == AsyncMode::kRandom);
  if (!loads && !readers) return false;
  // Loads first in kLateReads even at quiescence: reads are held back as long as anything else can
  // go.
  if (loads && readers && mode_ == AsyncMode::kLateReads) return advance_in(loads_);
  return advance_in(loads && (!readers || runtime_.random().one_in(2)) ? loads_ : readers_);
}

bool AsyncEngine::step(AsyncOp& op) {
  ++events_;
  bool done = false;
  switch (op.kind) {
    case AsyncOp::Kind::kLoad:
      done = step_load(op);
      break;
    case AsyncOp::Kind::kStore:
    case AsyncOp::Kind::kReduce:
      done = op.reading ? step_read(op) : step_write(op);
      break;
    case AsyncOp::Kind::kMma:
      done = step_mma(op);
      break;
  }
  if (kTsan && done && op.tsan_agent != nullptr) {
    {
      AsTsanFiber agent(op.tsan_agent);
      tsan::release(this);  // pairs with the acquire at the end of the kernel
    }
    tsan::destroy(std::exchange(op.tsan_agent, nullptr));
  }
  return done;
}

// Bytes of the current segment to do now: all, or a random part.
std::uint32_t AsyncEngine::piece(const AsyncOp& op) {
  const std::uint32_t left = op.segments[op.segment].bytes - op.offset;
  if (left <= kPiece || mode_ == AsyncMode::kEarly || runtime_.random().one_in(2)) return left;
  return kPiece * (1 + runtime_.random().below(left / kPiece));
}

namespace {
// Moves on by `bytes`; true at the end of the last segment.
bool consume(AsyncOp& op, std::uint32_t bytes) {
  op.offset += bytes;
  if (op.offset == op.segments[op.segment].bytes) {
    op.offset = 0;
    ++op.segment;
  }
  return op.segment == op.segments.size();
}
// Tensor copies have many short segments: several go in one step.
constexpr std::size_t kSegmentsPerStep = 16;
}  // namespace

bool AsyncEngine::step_load(AsyncOp& op) {
  for (std::size_t i = 0; i < kSegmentsPerStep && op.segment < op.segments.size(); ++i) {
    const CopySegment& segment = op.segments[op.segment];
    const std::uint32_t bytes = piece(op);
    unsigned char* to = segment.shared + op.offset;
    if constexpr (kTsan) {
      AsTsanFiber agent(op.tsan_agent);
      if (segment.global != nullptr) tsan::read(segment.global + op.offset, bytes);
      tsan::write(to, bytes);
    }
    if (segment.global != nullptr)
      runtime_.memory().async_read(*op.issuer, op.view, segment.global + op.offset, to, bytes);
    else
      zero_fill(to, bytes);
    if (consume(op, bytes)) break;
  }
  if (op.segment < op.segments.size()) return false;
  finish_load(op);
  return true;
}

void AsyncEngine::finish_load(AsyncOp& op) {
  if constexpr (kTsan) {
    AsTsanFiber agent(op.tsan_agent);
    tsan::release(op.barrier_word);
  }
  // The barrier may have been invalidated meanwhile; then nobody can be waiting for it.
  Mbarrier* barrier = find_mbarrier(*op.cta, op.barrier_word);
  if (barrier == nullptr) return;
  barrier->transactions -= op.total;
  complete_phase_if_due(runtime_, *barrier, op.barrier_word);
}

bool AsyncEngine::step_read(AsyncOp& op) {
  for (std::size_t i = 0; i < kSegmentsPerStep && op.segment < op.segments.size(); ++i) {
    const CopySegment& segment = op.segments[op.segment];
    const std::uint32_t bytes = piece(op);
    if constexpr (kTsan) {
      AsTsanFiber agent(op.tsan_agent);
      tsan::read(segment.shared + op.offset, bytes);
    }
    raw_copy(op.buffer->data() + op.buffered, segment.shared + op.offset, bytes);
    op.buffered += bytes;
    if (consume(op, bytes)) break;
  }
  if (op.segment < op.segments.size()) return false;
  op.reading = false;
  op.segment = 0;
  op.offset = op.buffered = 0;
  if constexpr (kTsan) {
    AsTsanFiber agent(op.tsan_agent);
    tsan::release(&op.group->tokens[0]);
  }
  --op.group->pending_reads;
  wake_if_waiting(runtime_, *op.issuer);
  return false;
}

void AsyncEngine::reduce_piece(AsyncOp& op, unsigned char* global, const unsigned char* data,
                               std::uint32_t bytes) {
  using hooks::BulkReduce;
  const std::uint32_t width =
      op.reduce == BulkReduce::kAddU64                                        ? 8
      : op.reduce == BulkReduce::kAddBf16 || op.reduce == BulkReduce::kAddF16 ? 2
                                                                              : 4;
  constexpr Access kRelaxed{Order::kRelaxed, Scope::kGpu};
  for (std::uint32_t at = 0; at < bytes; at += width) {
    std::uint64_t old = 0;
    std::uint64_t add = 0;
    unsigned char* p = global + at;
    runtime_.memory().begin_rmw(*op.issuer, p, width, kRelaxed);
    raw_copy(&old, p, width);
    raw_copy(&add, data + at, width);
    std::uint64_t sum = old + add;
    const auto as_f32 = [](std::uint64_t bits) {
      float value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    };
    if (op.reduce == BulkReduce::kAddF32) {
      const float value = as_f32(old) + as_f32(add);
      sum = 0;
      std::memcpy(&sum, &value, sizeof value);
    } else if (op.reduce == BulkReduce::kAddBf16) {
      sum = float_to_bf16(bf16_to_float(static_cast<std::uint16_t>(old)) +
                          bf16_to_float(static_cast<std::uint16_t>(add)));
    } else if (op.reduce == BulkReduce::kAddF16) {
      sum = float_to_f16(f16_to_float(static_cast<std::uint16_t>(old)) +
                         f16_to_float(static_cast<std::uint16_t>(add)));
    }
    runtime_.memory().perform_rmw(*op.issuer, p, &sum, width, kRelaxed);
  }
}

bool AsyncEngine::step_write(AsyncOp& op) {
  for (std::size_t i = 0; i < kSegmentsPerStep && op.segment < op.segments.size(); ++i) {
    const CopySegment& segment = op.segments[op.segment];
    const std::uint32_t bytes = piece(op);
    if (segment.global != nullptr) {
      unsigned char* to = segment.global + op.offset;
      if constexpr (kTsan) {
        AsTsanFiber agent(op.tsan_agent);
        // Reductions are atomic among themselves: to TSan they are reads, or two of them would
        // race.
        if (op.kind == AsyncOp::Kind::kReduce)
          tsan::read(to, bytes);
        else
          tsan::write(to, bytes);
      }
      if (op.kind == AsyncOp::Kind::kReduce)
        reduce_piece(op, to, op.buffer->data() + op.buffered, bytes);
      else
        runtime_.memory().async_write(*op.issuer, to, op.buffer, op.buffered, bytes);
    }
    op.buffered += bytes;
    if (consume(op, bytes)) break;
  }
  if (op.segment < op.segments.size()) return false;
  if constexpr (kTsan) {
    AsTsanFiber agent(op.tsan_agent);
    tsan::release(&op.group->tokens[1]);
  }
  --op.group->pending_writes;
  wake_if_waiting(runtime_, *op.issuer);
  return true;
}

bool AsyncEngine::step_mma(AsyncOp& op) {
  Warpgroup& group = op.cta->warpgroups[op.warpgroup];
  MmaOp& mma = group.ops[group.completed - group.first];
  if constexpr (kTsan) {
    AsTsanFiber agent(mma.tsan_agent);
    tsan::acquire(&mma.tokens[0]);
    const OperandRanges operands = operand_ranges(mma);
    for (std::uint32_t i = 0; i < operands.count && !mma.unordered; ++i)
      tsan::read(op.cta->shared + operands.range[i].offset, operands.range[i].bytes);
    tsan::release(&group.completed);
  }
  execute_mma(mma, op.cta->shared, op.cta->shared_bytes);
  if constexpr (kTsan) tsan::destroy(std::exchange(mma.tsan_agent, nullptr));
  ++group.completed;
  Fiber* first = op.cta->fibers + op.warpgroup * 128;
  for (std::uint32_t i = 0; i < 128; ++i)
    wake_if_waiting(runtime_, first[i]);
  runtime_.note_progress();
  return true;
}

}  // namespace crossdock::twin
