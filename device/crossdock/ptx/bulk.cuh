// Bulk copies between shared and global memory, done by the copy hardware (async proxy). Sizes and
// both addresses are multiples of 16 bytes. Loads complete on an mbarrier; stores and reductions
// belong to the bulk groups of the issuing thread, so one thread issues, commits and waits.
//
//   load:  mbarrier_arrive_expect_tx(b, n); bulk_load(shared, global, n, b); ... wait on b
//   store: fence_proxy_async_shared() if ordinary stores wrote `shared`;
//          bulk_store(global, shared, n); bulk_commit();
//          bulk_wait_read<0>()  the source may be overwritten
//          bulk_wait<0>()       the destination is written: needed before a flag is released
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/mbarrier.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
CROSSDOCK_DEVICE void bulk_load(void* shared, const void* global, u32 bytes, MBarrier* b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(b))
      : "memory");
}
CROSSDOCK_DEVICE void bulk_load_hint(void* shared, const void* global, u32 bytes, MBarrier* b,
                                     CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(b)), "l"(policy.bits)
      : "memory");
}
CROSSDOCK_DEVICE void bulk_store(void* global, const void* shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
CROSSDOCK_DEVICE void bulk_store_hint(void* global, const void* shared, u32 bytes,
                                      CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          global),
      "r"(shared_address(shared)), "r"(bytes), "l"(policy.bits)
      : "memory");
}
#define CROSSDOCK_PTX_BULK_REDUCE(name, text, op)                           \
  CROSSDOCK_DEVICE void name(void* global, const void* shared, u32 bytes) { \
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." text \
                 " [%0], [%1], %2;" ::"l"(global),                          \
                 "r"(shared_address(shared)), "r"(bytes)                    \
                 : "memory");                                               \
  }
CROSSDOCK_DEVICE void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <u32 kPending>
CROSSDOCK_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <u32 kPending>
CROSSDOCK_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
#else
CROSSDOCK_DEVICE void bulk_load(void* shared, const void* global, u32 bytes,
                                MBarrier* b CROSSDOCK_SITE) {
  twin::hooks::bulk_load(shared, global, bytes, b, site);
}
CROSSDOCK_DEVICE void bulk_load_hint(void* shared, const void* global, u32 bytes, MBarrier* b,
                                     CachePolicy CROSSDOCK_SITE) {
  twin::hooks::bulk_load(shared, global, bytes, b, site);
}
CROSSDOCK_DEVICE void bulk_store(void* global, const void* shared, u32 bytes CROSSDOCK_SITE) {
  twin::hooks::bulk_store(global, shared, bytes, site);
}
CROSSDOCK_DEVICE void bulk_store_hint(void* global, const void* shared, u32 bytes,
                                      CachePolicy CROSSDOCK_SITE) {
  twin::hooks::bulk_store(global, shared, bytes, site);
}
#define CROSSDOCK_PTX_BULK_REDUCE(name, text, op)                                          \
  CROSSDOCK_DEVICE void name(void* global, const void* shared, u32 bytes CROSSDOCK_SITE) { \
    twin::hooks::bulk_reduce(global, shared, bytes, twin::hooks::BulkReduce::op, site);    \
  }
CROSSDOCK_DEVICE void bulk_commit(CROSSDOCK_SITE_ONLY) {
  twin::hooks::bulk_commit(site);
}
template <u32 kPending>
CROSSDOCK_DEVICE void bulk_wait_read(CROSSDOCK_SITE_ONLY) {
  twin::hooks::bulk_wait(kPending, true, site);
}
template <u32 kPending>
CROSSDOCK_DEVICE void bulk_wait(CROSSDOCK_SITE_ONLY) {
  twin::hooks::bulk_wait(kPending, false, site);
}
#endif

// Adds shared memory to global memory, element by element.
CROSSDOCK_PTX_BULK_REDUCE(bulk_reduce_add_f32, "add.f32", kAddF32)
CROSSDOCK_PTX_BULK_REDUCE(bulk_reduce_add_bf16, "add.noftz.bf16", kAddBf16)
CROSSDOCK_PTX_BULK_REDUCE(bulk_reduce_add_u32, "add.u32", kAddU32)
CROSSDOCK_PTX_BULK_REDUCE(bulk_reduce_add_u64, "add.u64", kAddU64)
#undef CROSSDOCK_PTX_BULK_REDUCE

}  // namespace crossdock::device::ptx
