// TSan's view of loads, stores, atomics and fences. TSan has no fences, so they are built from its
// release and acquire: after a release fence every strong store of the thread releases; an acquire
// fence acquires the words that the thread has read relaxed since the last one (the six latest).
// SPDX-License-Identifier: Apache-2.0
#include "twin/tsan_access.hpp"

#include <cstring>

#if defined(CROSSDOCK_SANITIZE_THREAD)

extern "C" {
std::uint8_t __tsan_atomic8_load(const volatile std::uint8_t*, int);
std::uint16_t __tsan_atomic16_load(const volatile std::uint16_t*, int);
std::uint32_t __tsan_atomic32_load(const volatile std::uint32_t*, int);
std::uint64_t __tsan_atomic64_load(const volatile std::uint64_t*, int);
void __tsan_atomic8_store(volatile std::uint8_t*, std::uint8_t, int);
void __tsan_atomic16_store(volatile std::uint16_t*, std::uint16_t, int);
void __tsan_atomic32_store(volatile std::uint32_t*, std::uint32_t, int);
void __tsan_atomic64_store(volatile std::uint64_t*, std::uint64_t, int);
std::uint32_t __tsan_atomic32_fetch_add(volatile std::uint32_t*, std::uint32_t, int);
std::uint64_t __tsan_atomic64_fetch_add(volatile std::uint64_t*, std::uint64_t, int);
}

namespace crossdock::twin::tsan {

namespace {

bool is_weak(Access access) {
  return access.order == Order::kWeak || access.order == Order::kNonCoherent;
}
bool acquires(Access access) {
  return access.order == Order::kAcquire || access.order == Order::kAcqRel;
}
bool releases(const Fiber& fiber, Access access) {
  return access.order == Order::kRelease || access.order == Order::kAcqRel ||
         fiber.tsan_release_fence;
}
int memory_order(bool acquire, bool release) {
  if (acquire && release) return __ATOMIC_ACQ_REL;
  if (acquire) return __ATOMIC_ACQUIRE;
  return release ? __ATOMIC_RELEASE : __ATOMIC_RELAXED;
}
void remember_relaxed(Fiber& fiber, const void* p) {
  for (const void* known : fiber.tsan_relaxed)
    if (known == p) return;
  fiber.tsan_relaxed[fiber.tsan_relaxed_next++ % fiber.tsan_relaxed.size()] = p;
}
template <class T>
const volatile T* as(const void* p) {
  return static_cast<const volatile T*>(p);
}
template <class T>
volatile T* as(void* p) {
  return static_cast<volatile T*>(p);
}

}  // namespace

std::uint64_t load(Fiber& fiber, const void* p, unsigned bytes, Access access) {
  if (is_weak(access)) {
    read(p, bytes);
    std::uint64_t value = 0;
    raw_copy(&value, p, bytes);
    return value;
  }
  if (!acquires(access)) remember_relaxed(fiber, p);
  const int order = memory_order(acquires(access), false);
  switch (bytes) {
    case 1:
      return __tsan_atomic8_load(as<std::uint8_t>(p), order);
    case 2:
      return __tsan_atomic16_load(as<std::uint16_t>(p), order);
    case 4:
      return __tsan_atomic32_load(as<std::uint32_t>(p), order);
    default:
      return __tsan_atomic64_load(as<std::uint64_t>(p), order);
  }
}

void store(Fiber& fiber, void* p, std::uint64_t value, unsigned bytes, Access access) {
  if (is_weak(access)) {
    write(p, bytes);
    raw_copy(p, &value, bytes);
    return;
  }
  const int order = memory_order(false, releases(fiber, access));
  switch (bytes) {
    case 1:
      return __tsan_atomic8_store(as<std::uint8_t>(p), static_cast<std::uint8_t>(value), order);
    case 2:
      return __tsan_atomic16_store(as<std::uint16_t>(p), static_cast<std::uint16_t>(value), order);
    case 4:
      return __tsan_atomic32_store(as<std::uint32_t>(p), static_cast<std::uint32_t>(value), order);
    default:
      return __tsan_atomic64_store(as<std::uint64_t>(p), value, order);
  }
}

// Adding zero has the order of the operation and leaves the value to the caller.
void before_rmw(Fiber& fiber, void* p, unsigned bytes, Access access) {
  const int order = memory_order(acquires(access), releases(fiber, access));
  if (bytes == 4)
    __tsan_atomic32_fetch_add(as<std::uint32_t>(p), 0, order);
  else
    __tsan_atomic64_fetch_add(as<std::uint64_t>(p), 0, order);
  if (!acquires(access)) remember_relaxed(fiber, p);
}

void fence(Fiber& fiber, Order order) {
  if (order != Order::kRelease)
    for (const void* p : fiber.tsan_relaxed)
      if (p != nullptr) acquire(p);
  if (order == Order::kAcquire) return;
  fiber.tsan_release_fence = true;
}

}  // namespace crossdock::twin::tsan

#else

namespace crossdock::twin::tsan {

std::uint64_t load(Fiber&, const void* p, unsigned bytes, Access) {
  std::uint64_t value = 0;
  raw_copy(&value, p, bytes);
  return value;
}
void store(Fiber&, void* p, std::uint64_t value, unsigned bytes, Access) {
  raw_copy(p, &value, bytes);
}
void before_rmw(Fiber&, void*, unsigned, Access) {}
void fence(Fiber&, Order) {}

}  // namespace crossdock::twin::tsan

#endif
