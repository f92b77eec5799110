// Block-level control: barriers of the block and of named groups of warps, register reallocation,
// time, and the order of dependent launches. Named barriers have ids 0 to 15; id 0 is the whole
// block's. Every thread of the group must come, so a wait that failed is first made the group's by
// `barrier_any` and then all of them leave together.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
CROSSDOCK_DEVICE void sync_threads() {
  __syncthreads();
}
CROSSDOCK_DEVICE void barrier_sync(u32 id, u32 threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
CROSSDOCK_DEVICE void barrier_arrive(u32 id, u32 threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// A barrier_sync that also tells every thread whether any of them came with `predicate`.
CROSSDOCK_DEVICE bool barrier_any(u32 id, u32 threads, bool predicate) {
  u32 result;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "barrier.cta.red.or.aligned.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(result)
      : "r"(id), "r"(threads), "r"(static_cast<u32>(predicate))
      : "memory");
  return result != 0;
}

// By all threads of a warpgroup, once, before its role begins. The kernel needs launch bounds, and
// the role of each warpgroup has to be one branch of one if/else, or the compiler ignores it.
template <u32 kRegisters>
CROSSDOCK_DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters>
CROSSDOCK_DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Nanoseconds since some fixed moment, the same clock for all blocks of a device. It moves in steps
// of up to a microsecond: for deadlines and long intervals, not for single instructions.
CROSSDOCK_DEVICE u64 global_timer() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}
// Cycles of this SM.
CROSSDOCK_DEVICE u64 cycle_clock() {
  u64 t;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(t)::"memory");
  return t;
}
CROSSDOCK_DEVICE void nanosleep(u32 ns) {
  asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}
// Called once in every turn of a polling loop. Nothing on the GPU; in the twin the thread sleeps
// until a value it polled changes, and `what` names the wait in reports.
CROSSDOCK_DEVICE void spin(const char*) {}
// Called by a thread that has given up a wait after a fault and yet goes on to its end, on whatever
// the memory holds. Nothing on the GPU; in the twin its races are no longer reported.
CROSSDOCK_DEVICE void unordered_from_here() {}

// Dependent launch: `wait` returns when the kernels before this one in the stream have finished and
// their writes are visible; `launch` lets the next kernel start its prologue.
CROSSDOCK_DEVICE void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
CROSSDOCK_DEVICE void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
CROSSDOCK_DEVICE void sync_threads(CROSSDOCK_SITE_ONLY) {
  twin::hooks::sync_threads(site);
}
CROSSDOCK_DEVICE void barrier_sync(u32 id, u32 threads CROSSDOCK_SITE) {
  twin::hooks::barrier_sync(id, threads, site);
}
CROSSDOCK_DEVICE void barrier_arrive(u32 id, u32 threads CROSSDOCK_SITE) {
  twin::hooks::barrier_arrive(id, threads, site);
}
CROSSDOCK_DEVICE bool barrier_any(u32 id, u32 threads, bool predicate CROSSDOCK_SITE) {
  return twin::hooks::barrier_any(id, threads, predicate, site);
}

template <u32 kRegisters>
CROSSDOCK_DEVICE void registers_increase(CROSSDOCK_SITE_ONLY) {
  twin::hooks::set_max_registers(true, kRegisters, site);
}
template <u32 kRegisters>
CROSSDOCK_DEVICE void registers_decrease(CROSSDOCK_SITE_ONLY) {
  twin::hooks::set_max_registers(false, kRegisters, site);
}

CROSSDOCK_DEVICE u64 global_timer() {
  return twin::hooks::global_timer();
}
CROSSDOCK_DEVICE u64 cycle_clock() {
  return twin::hooks::clock();
}
CROSSDOCK_DEVICE void nanosleep(u32 ns CROSSDOCK_SITE) {
  twin::hooks::nanosleep(ns, site);
}
CROSSDOCK_DEVICE void spin(const char* what CROSSDOCK_SITE) {
  twin::hooks::spin(what, site);
}
CROSSDOCK_DEVICE void unordered_from_here(CROSSDOCK_SITE_ONLY) {
  twin::hooks::unordered_from_here(site);
}

CROSSDOCK_DEVICE void grid_dependency_wait(CROSSDOCK_SITE_ONLY) {
  twin::hooks::grid_dependency_wait(site);
}
CROSSDOCK_DEVICE void grid_dependency_launch(CROSSDOCK_SITE_ONLY) {
  twin::hooks::grid_dependency_launch(site);
}
#endif

}  // namespace crossdock::device::ptx
