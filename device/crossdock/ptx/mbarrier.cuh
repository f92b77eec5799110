// mbarriers: counters in shared memory on which threads and bulk copies meet. A phase completes
// when `count` arrivals and all expected bytes have come; its parity then flips. A waiter passes
// the parity of the phase it waits for and must see every phase, or it passes one turn too early.
// `mbarrier_try_wait` does not block: comm/wait.cuh has the wait with a deadline.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/memory.cuh>

namespace crossdock::device::ptx {

struct alignas(8) MBarrier {
  u64 state;
};

#if CROSSDOCK_ON_GPU
CROSSDOCK_DEVICE void mbarrier_init(MBarrier* b, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count)
               : "memory");
}
CROSSDOCK_DEVICE void mbarrier_invalidate(MBarrier* b) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
CROSSDOCK_DEVICE void mbarrier_arrive(MBarrier* b) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(b))
               : "memory");
}
CROSSDOCK_DEVICE void mbarrier_arrive(MBarrier* b, u32 count) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
               "r"(count)
               : "memory");
}
// Arrives where `condition` holds. The address is computed by all lanes alike.
CROSSDOCK_DEVICE void mbarrier_arrive_if(MBarrier* b, bool condition) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n}" ::"r"(shared_address(b)),
      "r"(static_cast<u32>(condition))
      : "memory");
}
CROSSDOCK_DEVICE void mbarrier_expect_tx(MBarrier* b, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)),
               "r"(bytes)
               : "memory");
}
CROSSDOCK_DEVICE void mbarrier_arrive_expect_tx(MBarrier* b, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
      "r"(bytes)
      : "memory");
}
// True when the phase with this parity has completed (acquire); false after at most a short,
// hardware-chosen sleep.
CROSSDOCK_DEVICE bool mbarrier_try_wait(MBarrier* b, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(b)), "r"(parity)
      : "memory");
  return done != 0;
}
// The same with a sleep of up to `ns`, which the phase's end cuts short.
CROSSDOCK_DEVICE bool mbarrier_try_wait_for(MBarrier* b, u32 parity, u32 ns) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2, %3;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(b)), "r"(parity), "r"(ns)
      : "memory");
  return done != 0;
}
// Without any sleep: to look, not to wait.
CROSSDOCK_DEVICE bool mbarrier_test_wait(MBarrier* b, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(b)), "r"(parity)
      : "memory");
  return done != 0;
}
#else
CROSSDOCK_DEVICE void mbarrier_init(MBarrier* b, u32 count CROSSDOCK_SITE) {
  twin::hooks::mbarrier_init(b, count, site);
}
CROSSDOCK_DEVICE void mbarrier_invalidate(MBarrier* b CROSSDOCK_SITE) {
  twin::hooks::mbarrier_invalidate(b, site);
}
CROSSDOCK_DEVICE void mbarrier_arrive(MBarrier* b CROSSDOCK_SITE) {
  twin::hooks::mbarrier_arrive(b, 1, site);
}
CROSSDOCK_DEVICE void mbarrier_arrive(MBarrier* b, u32 count CROSSDOCK_SITE) {
  twin::hooks::mbarrier_arrive(b, count, site);
}
CROSSDOCK_DEVICE void mbarrier_arrive_if(MBarrier* b, bool condition CROSSDOCK_SITE) {
  if (condition) twin::hooks::mbarrier_arrive(b, 1, site);
}
CROSSDOCK_DEVICE void mbarrier_expect_tx(MBarrier* b, u32 bytes CROSSDOCK_SITE) {
  twin::hooks::mbarrier_expect_tx(b, bytes, site);
}
CROSSDOCK_DEVICE void mbarrier_arrive_expect_tx(MBarrier* b, u32 bytes CROSSDOCK_SITE) {
  twin::hooks::mbarrier_arrive_expect_tx(b, bytes, site);
}
CROSSDOCK_DEVICE bool mbarrier_try_wait(MBarrier* b, u32 parity CROSSDOCK_SITE) {
  return twin::hooks::mbarrier_try_wait(b, parity, site);
}
CROSSDOCK_DEVICE bool mbarrier_try_wait_for(MBarrier* b, u32 parity, u32 CROSSDOCK_SITE) {
  return twin::hooks::mbarrier_try_wait(b, parity, site);
}
CROSSDOCK_DEVICE bool mbarrier_test_wait(MBarrier* b, u32 parity CROSSDOCK_SITE) {
  return twin::hooks::mbarrier_try_wait(b, parity, site);
}
#endif

}  // namespace crossdock::device::ptx
