// Fences. A fence orders everything its thread did before it with everything the thread does after
// it; it becomes useful only together with a strong access on each side. A proxy fence orders the
// two paths to memory: ordinary accesses (generic proxy) and what bulk copies, tensor maps and
// wgmma do (async proxy). Runs in any thread, each thread for its own accesses.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
#define CROSSDOCK_PTX_FENCE(name, text, order, scope) \
  CROSSDOCK_DEVICE void name() {                      \
    asm volatile(text ";" ::: "memory");              \
  }
#else
#define CROSSDOCK_PTX_FENCE(name, text, order, scope)                               \
  CROSSDOCK_DEVICE void name(CROSSDOCK_SITE_ONLY) {                                 \
    twin::hooks::fence(twin::hooks::Order::order, twin::hooks::Scope::scope, site); \
  }
#endif

CROSSDOCK_PTX_FENCE(fence_acq_rel_cta, "fence.acq_rel.cta", kAcqRel, kCta)
CROSSDOCK_PTX_FENCE(fence_acq_rel_gpu, "fence.acq_rel.gpu", kAcqRel, kGpu)
CROSSDOCK_PTX_FENCE(fence_acq_rel_sys, "fence.acq_rel.sys", kAcqRel, kSys)
CROSSDOCK_PTX_FENCE(fence_sc_gpu, "fence.sc.gpu", kSc, kGpu)
CROSSDOCK_PTX_FENCE(fence_sc_sys, "fence.sc.sys", kSc, kSys)
#undef CROSSDOCK_PTX_FENCE

#if CROSSDOCK_ON_GPU
// Needed (1) after an acquire and before async-proxy access to data that ordinary stores, of this
// rank or a peer, wrote, and (2) after ordinary stores to shared memory and before a bulk store,
// tensor store or wgmma reads them: by the storing thread, ahead of the barrier that hands over.
CROSSDOCK_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
// As (2), restricted to shared memory, which is cheaper.
CROSSDOCK_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Makes mbarrier initialisation visible to the async proxy; once, by the initialising thread,
// before the barrier that lets the others use the mbarriers.
CROSSDOCK_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
#else
CROSSDOCK_DEVICE void fence_proxy_async(CROSSDOCK_SITE_ONLY) {
  twin::hooks::fence_proxy_async(site);
}
CROSSDOCK_DEVICE void fence_proxy_async_shared(CROSSDOCK_SITE_ONLY) {
  twin::hooks::fence_proxy_async(site);
}
CROSSDOCK_DEVICE void fence_mbarrier_init(CROSSDOCK_SITE_ONLY) {
  twin::hooks::fence_mbarrier_init(site);
}
#endif

}  // namespace crossdock::device::ptx
