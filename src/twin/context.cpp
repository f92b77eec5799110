// The context switch: assembly for x86-64, ucontext elsewhere.
// SPDX-License-Identifier: Apache-2.0
#include "twin/context.hpp"

#include <cstdint>

#if CROSSDOCK_TWIN_ASM_CONTEXT

// rdi: where to save the stack pointer, rsi: the stack pointer to resume. The saved frame is, from
// the stack pointer up: r15 r14 r13 r12 rbx rbp, return address.
extern "C" void crossdock_twin_switch(void** save, void* resume);
asm(R"(
  .text
  .p2align 4
  .globl crossdock_twin_switch
  .hidden crossdock_twin_switch
  .type crossdock_twin_switch, @function
crossdock_twin_switch:
  .cfi_startproc
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .cfi_endproc
  .size crossdock_twin_switch, . - crossdock_twin_switch
)");

namespace crossdock::twin {

void make_context(Context& context, unsigned char* stack, std::size_t bytes, ContextEntry entry) {
  constexpr std::uintptr_t kAlign = 16;
  const std::uintptr_t top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~(kAlign - 1);
  auto* frame = reinterpret_cast<std::uintptr_t*>(top);
  *--frame = 0;  // where `entry` would return to: a zero ends every backtrace
  *--frame = reinterpret_cast<std::uintptr_t>(entry);
  for (int i = 0; i < 6; ++i)
    *--frame = 0;
  context.stack_pointer = frame;
}

void switch_context(Context& from, Context& to) {
  crossdock_twin_switch(&from.stack_pointer, to.stack_pointer);
}

}  // namespace crossdock::twin

#else

namespace crossdock::twin {

void make_context(Context& context, unsigned char* stack, std::size_t bytes, ContextEntry entry) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

void switch_context(Context& from, Context& to) {
  swapcontext(&from.state, &to.state);
}

}  // namespace crossdock::twin

#endif
