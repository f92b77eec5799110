// What AddressSanitizer and ThreadSanitizer have to be told about fibers; nothing in other builds.
// With TSan each CUDA thread is a TSan fiber: device code is instrumented, this folder is not (see
// CMakeLists.txt), and the hooks report the accesses and the synchronisation they stand for. While
// the twin works for itself (queues, allocations) it does so as the scheduler's fiber: AsScheduler.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(CROSSDOCK_SANITIZE_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(CROSSDOCK_SANITIZE_THREAD)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* addr);
void __tsan_release(void* addr);
void __tsan_read_range(void* addr, unsigned long size);
void __tsan_write_range(void* addr, unsigned long size);
void __tsan_ignore_thread_begin(void);
void __tsan_ignore_thread_end(void);
}
#endif

namespace crossdock::twin {

#if defined(CROSSDOCK_SANITIZE_THREAD)
inline constexpr bool kTsan = true;
#else
inline constexpr bool kTsan = false;
#endif

#if defined(CROSSDOCK_SANITIZE_ADDRESS) || defined(CROSSDOCK_SANITIZE_THREAD)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// ---- ThreadSanitizer ----
namespace tsan {
#if defined(CROSSDOCK_SANITIZE_THREAD)
inline constexpr unsigned kNoSync = 1;  // a switch by itself orders nothing
inline void* current() {
  return __tsan_get_current_fiber();
}
inline void* create(const char* name) {
  void* fiber = __tsan_create_fiber(0);
  __tsan_set_fiber_name(fiber, name);
  return fiber;
}
inline void destroy(void* fiber) {
  __tsan_destroy_fiber(fiber);
}
inline void switch_to(void* fiber) {
  __tsan_switch_to_fiber(fiber, kNoSync);
}
inline void acquire(const void* token) {
  __tsan_acquire(const_cast<void*>(token));
}
inline void release(const void* token) {
  __tsan_release(const_cast<void*>(token));
}
inline void read(const void* p, std::size_t n) {
  __tsan_read_range(const_cast<void*>(p), n);
}
inline void write(const void* p, std::size_t n) {
  __tsan_write_range(const_cast<void*>(p), n);
}
// Accesses of the current fiber are not looked at in between; a fiber must not end in between.
inline void ignore_begin() {
  __tsan_ignore_thread_begin();
}
inline void ignore_end() {
  __tsan_ignore_thread_end();
}
#else
inline void* current() {
  return nullptr;
}
inline void* create(const char*) {
  return nullptr;
}
inline void destroy(void*) {}
inline void switch_to(void*) {}
inline void acquire(const void*) {}
inline void release(const void*) {}
inline void read(const void*, std::size_t) {}
inline void write(const void*, std::size_t) {}
inline void ignore_begin() {}
inline void ignore_end() {}
#endif
}  // namespace tsan

// Runs a scope as another TSan fiber and goes back. No happens-before comes from it.
class AsTsanFiber {
 public:
#if defined(CROSSDOCK_SANITIZE_THREAD)
  explicit AsTsanFiber(void* fiber) : back_(tsan::current()) { tsan::switch_to(fiber); }
  ~AsTsanFiber() { tsan::switch_to(back_); }
#else
  explicit AsTsanFiber(void*) {}
  ~AsTsanFiber() {}
#endif
  AsTsanFiber(const AsTsanFiber&) = delete;
  AsTsanFiber& operator=(const AsTsanFiber&) = delete;

 private:
#if defined(CROSSDOCK_SANITIZE_THREAD)
  void* back_;
#endif
};

// ---- AddressSanitizer ----
namespace asan {
struct Stack {
  const void* bottom = nullptr;
  std::size_t bytes = 0;
};
#if defined(CROSSDOCK_SANITIZE_ADDRESS)
// Before a switch; `keep` receives the fake stack of the leaving side, nullptr when it never
// returns.
inline void leave(void** keep, const Stack& to) {
  __sanitizer_start_switch_fiber(keep, to.bottom, to.bytes);
}
// First thing after a switch; `from`, when given, learns the stack that was left.
inline void arrive(void* kept, Stack* from) {
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(kept, &bottom, &bytes);
  if (from != nullptr) *from = Stack{bottom, bytes};
}
inline void unpoison(void* p, std::size_t n) {
  ASAN_UNPOISON_MEMORY_REGION(p, n);
}
#else
inline void leave(void**, const Stack&) {}
inline void arrive(void*, Stack*) {}
inline void unpoison(void*, std::size_t) {}
#endif
}  // namespace asan

// Copies device memory without telling any sanitizer: the hooks report accesses themselves, and
// libc's memcpy would be reported in the name of whoever happens to run. Sizes of one access are
// single moves.
inline void raw_copy(void* to, const void* from, std::size_t bytes) {
  asm("" : "+r"(to), "+r"(from));  // else GCC warns of the cases that `bytes` rules out
  switch (bytes) {
    case 1:
      __builtin_memcpy(to, from, 1);
      return;
    case 2:
      __builtin_memcpy(to, from, 2);
      return;
    case 4:
      __builtin_memcpy(to, from, 4);
      return;
    case 8:
      __builtin_memcpy(to, from, 8);
      return;
    case 16:
      __builtin_memcpy(to, from, 16);
      return;
    default:
      break;
  }
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
  auto* d = static_cast<volatile unsigned char*>(to);
  const auto* s = static_cast<const volatile unsigned char*>(from);
  for (std::size_t i = 0; i < bytes; ++i)
    d[i] = s[i];
#endif
}
inline void raw_fill(void* to, unsigned char value, std::size_t bytes) {
#if defined(__x86_64__)
  asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
#else
  auto* d = static_cast<volatile unsigned char*>(to);
  for (std::size_t i = 0; i < bytes; ++i)
    d[i] = value;
#endif
}

}  // namespace crossdock::twin
