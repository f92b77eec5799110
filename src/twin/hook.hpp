// What the files that implement the hooks share: the current fiber, checked translation of shared
// addresses, and typed access to memory in the eyes of TSan.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "twin/runtime.hpp"

namespace crossdock::twin {

struct Here {
  Fiber& fiber;
  Cta& cta;
  Runtime& runtime;
  Site site;

  explicit Here(Site place)
      : fiber(*t_current), cta(*fiber.cta), runtime(*cta.runtime), site(place) {}

  void preempt() { runtime.preempt(fiber); }
  [[noreturn]] void violation(const char* kind, std::string message) {
    runtime.violation(fiber, kind, std::move(message), site);
  }
  [[nodiscard]] bool is_shared(const void* p) const { return runtime.space().is_shared(p); }
  // Offset of [p, p + bytes) in this CTA's shared memory, or a violation.
  std::uint32_t shared_offset(const void* p, std::size_t bytes, const char* what);
  // [p, p + bytes) is allocated global memory, or a violation.
  void check_global(const void* p, std::size_t bytes, const char* what);
  void check_aligned(const void* p, std::size_t alignment, const char* what);
  // A generic store to shared memory: in-flight hazards and the proxy shadow.
  void generic_shared_write(std::uint32_t offset, std::uint32_t bytes, const char* what);

  FiberExtra& extra() {
    if (!fiber.extra) fiber.extra = std::make_unique<FiberExtra>();
    return *fiber.extra;
  }
};

}  // namespace crossdock::twin
