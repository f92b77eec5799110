// Address checks and the hooks that tell a thread who and where it is.
// SPDX-License-Identifier: Apache-2.0
#include "twin/hook.hpp"

#include <fmt/format.h>
#include <utility>

namespace crossdock::twin {

namespace {
// Shared addresses begin behind what the system keeps for itself, as on the GPU: zero is never
// valid.
constexpr std::uint32_t kSharedWindow = 1024;
}  // namespace

std::uint32_t Here::shared_offset(const void* p, std::size_t bytes, const char* what) {
  const auto offset =
      reinterpret_cast<std::uintptr_t>(p) - reinterpret_cast<std::uintptr_t>(cta.shared);
  if (offset > cta.shared_bytes || cta.shared_bytes - offset < bytes)
    violation("out-of-bounds",
              fmt::format("{} of {} bytes at {} is outside of this CTA's {} bytes of "
                          "shared memory at {}",
                          what, bytes, p, cta.shared_bytes, static_cast<const void*>(cta.shared)));
  return static_cast<std::uint32_t>(offset);
}

void Here::check_global(const void* p, std::size_t bytes, const char* what) {
  if (!fiber.may_touch_global)
    violation("dependency",
              fmt::format("{} of {} bytes at {} before grid_dependency_wait: on the GPU the kernel "
                          "before this one may still run",
                          what, bytes, p));
  if (runtime.space().owner(p, bytes) >= 0) return;
  const AddressSpace& space = runtime.space();
  if (space.in_heaps(p)) {
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(p) - space.heap_base();
    const auto rank = static_cast<int>(offset / space.stride());
    violation("out-of-bounds",
              fmt::format("{} of {} bytes at offset {} of rank {}'s heap, of which {} bytes "
                          "are allocated",
                          what, bytes, offset % space.stride(), rank, space.used(rank)));
  }
  violation("out-of-bounds",
            fmt::format("{} of {} bytes at {}, which is no memory of any rank (a host "
                        "pointer, or an address that was not mapped to its rank)",
                        what, bytes, p));
}

void Here::check_aligned(const void* p, std::size_t alignment, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(p) % alignment != 0)
    violation("misaligned",
              fmt::format("{} at {} needs an alignment of {} bytes", what, p, alignment));
}

void Here::generic_shared_write(std::uint32_t offset, std::uint32_t bytes, const char* what) {
  SharedShadow& shadow = cta.shadow;
  if (!shadow.enabled()) return;
  if (const auto finding = shadow.in_flight(offset, bytes)) {
    // Built first: a violation does not return, and temporaries beside it would leak.
    std::string message =
        fmt::format("{} to shared+{:#x}, which the {} issued at {} still reads (a missing wait)",
                    what, offset, finding->read->what, describe(finding->read->site));
    violation("smem-reuse", std::move(message));
  }
  shadow.generic_write(offset, bytes, fiber.thread.thread_index);
}

namespace hooks {

const Thread& self() {
  return t_current->thread;
}

unsigned char* dynamic_shared() {
  return t_current->cta->shared;
}

std::uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - t_current->cta->shared;
  return static_cast<std::uint32_t>(offset) + kSharedWindow;
}

void* shared_pointer(std::uint32_t address) {
  return t_current->cta->shared + address - kSharedWindow;
}

std::uint64_t global_timer() {
  Fiber& fiber = *t_current;
  return fiber.cta->runtime->now_ns(fiber);
}

std::uint64_t clock() {
  return global_timer() * 2;
}

void nanosleep(std::uint32_t, Site site) {
  Here here(site);
  here.runtime.scheduler().yield(here.fiber);
}

void spin(const char* what, Site site) {
  Here here(site);
  if (here.fiber.reads.mbarrier)
    here.fiber.note.site = site;
  else
    here.fiber.note = {what, site, 0, 0};
  here.runtime.park_or_yield(here.fiber);
}

void unordered_from_here(Site site) {
  Fiber& fiber = Here(site).fiber;
  if (!std::exchange(fiber.unordered, true)) tsan::ignore_begin();
}

// Kernels of a stream start when the one before has ended, so what a dependent kernel waits for has
// always happened; check_global finds those that would not have waited.
void grid_dependency_wait(Site site) {
  Here here(site);
  here.fiber.may_touch_global = true;
  here.preempt();
}
void grid_dependency_launch(Site site) {
  Here(site).preempt();
}

void trap(const char* what, Site site) {
  Here(site).violation("trap", what);
}

}  // namespace hooks
}  // namespace crossdock::twin
