// A suspended flow of control on its own stack. On x86-64 a switch saves the six callee-saved
// registers and the stack pointer (about 10 ns); elsewhere, or with CROSSDOCK_TWIN_UCONTEXT,
// ucontext does it. A context is resumed only by the OS thread that made it. Knows nothing of
// fibers or sanitizers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#if defined(__x86_64__) && !defined(CROSSDOCK_TWIN_UCONTEXT)
#define CROSSDOCK_TWIN_ASM_CONTEXT 1
#else
#define CROSSDOCK_TWIN_ASM_CONTEXT 0
#include <ucontext.h>
#endif

namespace crossdock::twin {

#if CROSSDOCK_TWIN_ASM_CONTEXT
struct Context {
  void* stack_pointer = nullptr;
};
#else
struct Context {
  ucontext_t state;
};
#endif

using ContextEntry = void (*)();

// Prepares `context` so that the first switch to it calls `entry` on the stack; `entry` never
// returns.
void make_context(Context& context, unsigned char* stack, std::size_t bytes, ContextEntry entry);
// Suspends the caller into `from` and resumes `to`.
void switch_context(Context& from, Context& to);

}  // namespace crossdock::twin
