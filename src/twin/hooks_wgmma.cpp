// The hooks for wgmma: 128 threads issue an operation, the engine executes it once, waits release
// it.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <limits>
#include <utility>

#include "twin/hook.hpp"
#include "twin/wgmma_math.hpp"

namespace crossdock::twin {

namespace {

struct MmaCall {
  float* accumulators;
  const std::uint32_t* a_registers;  // nullptr: A is in shared memory
  std::uint64_t a;
  std::uint64_t b;
  const hooks::Wgmma& op;
};

bool same_operation(const MmaOp& mma, const MmaCall& call) {
  const hooks::Wgmma& x = mma.op;
  const hooks::Wgmma& y = call.op;
  return (mma.a == call.a || mma.a_in_registers) && mma.b == call.b && x.n == y.n && x.a == y.a &&
         x.b == y.b && x.accumulate == y.accumulate && x.negate_a == y.negate_a &&
         x.negate_b == y.negate_b && x.transpose_a == y.transpose_a &&
         x.transpose_b == y.transpose_b && mma.a_in_registers == (call.a_registers != nullptr);
}

// The operands are read until all four warps have waited: whoever overwrites them before is caught.
void guard_operands(Here& here, MmaOp& mma) {
  SharedShadow& shadow = here.cta.shadow;
  const OperandRanges operands = operand_ranges(mma);
  for (std::uint32_t i = 0; i < operands.count; ++i) {
    const auto [offset, bytes] = operands.range[i];
    if (offset + std::size_t{bytes} > here.cta.shared_bytes)
      here.violation("out-of-bounds",
                     fmt::format("wgmma reads shared+{:#x}..{:#x}; the CTA has {:#x} bytes", offset,
                                 offset + bytes, here.cta.shared_bytes));
    if (!shadow.enabled()) continue;
    if (const auto finding = shadow.unfenced(offset, bytes))
      here.violation("proxy",
                     fmt::format("wgmma reads shared+{:#x}, which thread {} wrote by a generic "
                                 "store without fence.proxy.async since",
                                 finding->offset, finding->writer));
    mma.shadow_reads.push_back(shadow.add_read({offset, bytes, "wgmma", here.site}));
  }
}

void take_accumulators(MmaOp& mma, Warpgroup& group, std::uint32_t index, std::uint32_t thread,
                       float* accumulators) {
  const std::uint32_t registers = mma.op.n / 2;
  mma.accumulators[thread] = accumulators;
  // The nearest earlier operation on the same accumulators that has not run yet, if any.
  for (std::uint32_t i = index; i-- > group.completed - group.first;)
    if (group.ops[i].accumulators[thread] == accumulators) {
      mma.chained[thread] = true;
      return;
    }
  if (mma.inputs.empty()) mma.inputs.resize(std::size_t{128} * registers);
  raw_copy(&mma.inputs[thread * registers], accumulators, registers * sizeof(float));
  for (std::uint32_t i = 0; i < registers; ++i)
    accumulators[i] = std::numeric_limits<float>::quiet_NaN();
}

void issue(Here& here, const MmaCall& call) {
  here.preempt();
  const std::uint32_t group_index = here.fiber.thread.thread_index / 128;
  const std::uint32_t thread = here.fiber.thread.thread_index % 128;
  if (group_index * 128 + 128 > here.cta.size)
    here.violation("wgmma", "the warpgroup of this thread has fewer than 128 threads");
  Runtime::Internal internal(here.runtime);
  FiberExtra& extra = here.extra();
  if (!extra.wgmma_fenced)
    here.violation("wgmma", "the first wgmma of a thread needs wgmma.fence before it");
  if (std::string wrong = check_mma(call.op, call.a, call.b, call.a_registers != nullptr);
      !wrong.empty())
    here.violation("wgmma", std::move(wrong));
  Warpgroup& group = here.cta.warpgroups[group_index];
  const std::uint32_t index = extra.wgmma_issued++ - group.first;
  while (group.ops.size() <= index)
    group.ops.emplace_back();
  MmaOp& mma = group.ops[index];
  if (mma.arrived == 0) {
    mma.op = call.op;
    mma.a = call.a;
    mma.b = call.b;
    mma.a_in_registers = call.a_registers != nullptr;
    if (mma.a_in_registers) mma.a_registers.resize(std::size_t{128} * 4);
    guard_operands(here, mma);
  } else if (!same_operation(mma, call)) {
    here.violation("wgmma", "threads of one warpgroup issue different operations or descriptors");
  }
  if (mma.a_in_registers) raw_copy(&mma.a_registers[thread * 4], call.a_registers, 16);
  take_accumulators(mma, group, index, thread, call.accumulators);
  if constexpr (kTsan) {
    AsTsanFiber caller(here.fiber.tsan_fiber);
    tsan::release(&mma.tokens[0]);
  }
  mma.unordered |= here.fiber.unordered;
  if (++mma.arrived < 128) return;
  AsyncOp op;
  op.kind = AsyncOp::Kind::kMma;
  op.cta = &here.cta;
  op.issuer = &here.fiber;
  op.warpgroup = group_index;
  if constexpr (kTsan) mma.tsan_agent = tsan::create("wgmma");
  here.runtime.async().submit(std::move(op));
}

// All four warps have waited for the oldest operations: their operands are free.
void retire(Here& here, Warpgroup& group) {
  std::uint32_t waited = group.waited[0];
  for (std::uint32_t w : group.waited)
    if (static_cast<std::int32_t>(w - waited) < 0) waited = w;
  while (!group.ops.empty() && static_cast<std::int32_t>(waited - group.first) > 0) {
    // Other threads of the warps may still have to acquire; keep until all 128 cannot miss it.
    for (std::uint64_t handle : group.ops.front().shadow_reads)
      here.cta.shadow.end_read(handle);
    group.ops.pop_front();
    ++group.first;
  }
}

}  // namespace

namespace hooks {

void wgmma_ss(float* accumulators, std::uint64_t a, std::uint64_t b, const Wgmma& op, Site site) {
  Here here(site);
  issue(here, {accumulators, nullptr, a, b, op});
}

void wgmma_rs(float* accumulators, const std::uint32_t* a, std::uint64_t b, const Wgmma& op,
              Site site) {
  Here here(site);
  issue(here, {accumulators, a, 0, b, op});
}

void wgmma_fence(Site site) {
  Here here(site);
  here.preempt();
  Runtime::Internal internal(here.runtime);
  here.extra().wgmma_fenced = true;
}

void wgmma_commit(Site site) {
  Here here(site);
  here.preempt();
  Runtime::Internal internal(here.runtime);
  here.extra().wgmma_groups.push_back(here.extra().wgmma_issued);
}

void wgmma_wait(std::uint32_t pending, Site site) {
  Here here(site);
  here.preempt();
  FiberExtra& extra = here.extra();
  std::vector<std::uint32_t>& groups = extra.wgmma_groups;
  if (groups.size() <= pending) return;
  const std::size_t waited = groups.size() - pending;
  const std::uint32_t need = groups[waited - 1];
  Warpgroup& group = here.cta.warpgroups[here.fiber.thread.thread_index / 128];
  here.fiber.waits_for_async = true;
  while (static_cast<std::int32_t>(group.completed - need) < 0)
    here.runtime.block(here.fiber, {"wgmma.wait_group", site, need, 0});
  here.fiber.waits_for_async = false;
  if constexpr (kTsan) tsan::acquire(&group.completed);
  Runtime::Internal internal(here.runtime);
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(waited));
  std::uint32_t& mine = group.waited[here.fiber.thread.thread_index % 128 / 32];
  if (static_cast<std::int32_t>(need - mine) > 0) mine = need;
  retire(here, group);
}

}  // namespace hooks
}  // namespace crossdock::twin
