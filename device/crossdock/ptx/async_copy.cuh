// Copies of 4 or 16 bytes from global to shared memory by single threads, without registers in
// between. Unlike bulk copies they are ordinary accesses (generic proxy) and belong to the groups
// of the thread that issued them:
//
//   copy_async_16(shared, global, 16); ... copy_async_commit();
//   copy_async_wait<1>();          all but the newest group of this thread have arrived
//   fence_proxy_async_shared();    before wgmma or a bulk store reads them; then a barrier
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/memory.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
// `bytes` 16, or 0: zeros, and `global` is not read.
CROSSDOCK_DEVICE void copy_async_16(void* shared, const void* global, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
// `bytes` 4, or 0: zeros.
CROSSDOCK_DEVICE void copy_async_4(void* shared, const void* global, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
CROSSDOCK_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <u32 kPending>
CROSSDOCK_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#else
CROSSDOCK_DEVICE void copy_async_16(void* shared, const void* global, u32 bytes CROSSDOCK_SITE) {
  twin::hooks::copy_async(shared, bytes == 0 ? nullptr : global, 16, site);
}
CROSSDOCK_DEVICE void copy_async_4(void* shared, const void* global, u32 bytes CROSSDOCK_SITE) {
  twin::hooks::copy_async(shared, bytes == 0 ? nullptr : global, 4, site);
}
CROSSDOCK_DEVICE void copy_async_commit(CROSSDOCK_SITE_ONLY) {
  twin::hooks::copy_async_commit(site);
}
template <u32 kPending>
CROSSDOCK_DEVICE void copy_async_wait(CROSSDOCK_SITE_ONLY) {
  twin::hooks::copy_async_wait(kPending, site);
}
#endif

}  // namespace crossdock::device::ptx
