// Copies by tensor map: boxes of a 2-D or 3-D tensor, with the swizzle and the zero fill beyond the
// edges that the map says. The map is a `CROSSDOCK_PARAMS` member (64-byte aligned, constant for
// the kernel); coordinates are in elements, innermost first. Completion as in bulk.cuh: loads on an
// mbarrier with the bytes of the whole box, stores in bulk groups. One thread issues.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/bulk.cuh>

namespace crossdock::device::ptx {

struct Coordinates3 {
  i32 x, y, z;
};

#if CROSSDOCK_ON_GPU
// Fetches the descriptor ahead of the first copy.
CROSSDOCK_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
CROSSDOCK_DEVICE void tensor_load_2d(void* shared, const TensorMap* map, i32 x, i32 y,
                                     MBarrier* b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(b))
      : "memory");
}
CROSSDOCK_DEVICE void tensor_load_3d(void* shared, const TensorMap* map, Coordinates3 at,
                                     MBarrier* b) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(b))
      : "memory");
}
CROSSDOCK_DEVICE void tensor_store_2d(const TensorMap* map, i32 x, i32 y, const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(shared_address(shared))
      : "memory");
}
CROSSDOCK_DEVICE void tensor_reduce_add_2d(const TensorMap* map, i32 x, i32 y, const void* shared) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(shared_address(shared))
      : "memory");
}
#else
CROSSDOCK_DEVICE void prefetch_tensor_map(const TensorMap*) {}
CROSSDOCK_DEVICE void tensor_load_2d(void* shared, const TensorMap* map, i32 x, i32 y,
                                     MBarrier* b CROSSDOCK_SITE) {
  const i32 coordinates[2] = {x, y};
  twin::hooks::tensor_load(shared, map, coordinates, b, site);
}
CROSSDOCK_DEVICE void tensor_load_3d(void* shared, const TensorMap* map, Coordinates3 at,
                                     MBarrier* b CROSSDOCK_SITE) {
  const i32 coordinates[3] = {at.x, at.y, at.z};
  twin::hooks::tensor_load(shared, map, coordinates, b, site);
}
CROSSDOCK_DEVICE void tensor_store_2d(const TensorMap* map, i32 x, i32 y,
                                      const void* shared CROSSDOCK_SITE) {
  const i32 coordinates[2] = {x, y};
  twin::hooks::tensor_store(map, coordinates, shared, site);
}
CROSSDOCK_DEVICE void tensor_reduce_add_2d(const TensorMap* map, i32 x, i32 y,
                                           const void* shared CROSSDOCK_SITE) {
  const i32 coordinates[2] = {x, y};
  twin::hooks::tensor_reduce_add(map, coordinates, shared, site);
}
#endif

}  // namespace crossdock::device::ptx
