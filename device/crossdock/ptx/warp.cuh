// Exchange between the lanes of a warp. Every function takes the mask of the lanes that take part;
// all of them must call it with the same mask, and nothing else keeps lanes together: a warp is not
// a unit of progress. `elect_one` may pick any lane of the mask. Runs in any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/memory.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
CROSSDOCK_DEVICE void sync_warp(u32 mask) {
  __syncwarp(mask);
}
template <class T>
CROSSDOCK_DEVICE T shuffle(u32 mask, T value, u32 lane) {
  return __shfl_sync(mask, value, static_cast<int>(lane));
}
template <class T>
CROSSDOCK_DEVICE T shuffle_up(u32 mask, T value, u32 delta) {
  return __shfl_up_sync(mask, value, delta);
}
template <class T>
CROSSDOCK_DEVICE T shuffle_down(u32 mask, T value, u32 delta) {
  return __shfl_down_sync(mask, value, delta);
}
template <class T>
CROSSDOCK_DEVICE T shuffle_xor(u32 mask, T value, u32 lanes) {
  return __shfl_xor_sync(mask, value, static_cast<int>(lanes));
}
// The value of lane 0, in a form the compiler knows to be the same in all lanes of the warp. All
// lanes call it.
CROSSDOCK_DEVICE u32 uniform(u32 value) {
  return __shfl_sync(kFullMask, value, 0);
}
// A value that is the same in all lanes, in one of the registers that a warp has once. Loops
// bounded by it count as uniform, and so does what they advance: descriptors then need no moves
// between the instructions that use them. All lanes call it.
CROSSDOCK_DEVICE u32 warp_constant(u32 value) {
  return __reduce_or_sync(kFullMask, value);
}
// The same for a value of lane 0 while no other lane runs.
CROSSDOCK_DEVICE u32 lane_constant(u32 value) {
  return __reduce_or_sync(1, value);
}
CROSSDOCK_DEVICE u32 ballot(u32 mask, bool predicate) {
  return __ballot_sync(mask, predicate);
}
CROSSDOCK_DEVICE bool any(u32 mask, bool predicate) {
  return __any_sync(mask, predicate) != 0;
}
CROSSDOCK_DEVICE bool all(u32 mask, bool predicate) {
  return __all_sync(mask, predicate) != 0;
}
CROSSDOCK_DEVICE u32 match_any(u32 mask, u32 value) {
  return __match_any_sync(mask, value);
}
CROSSDOCK_DEVICE u32 match_any(u32 mask, u64 value) {
  return __match_any_sync(mask, value);
}
CROSSDOCK_DEVICE u32 reduce_add(u32 mask, u32 value) {
  return __reduce_add_sync(mask, value);
}
CROSSDOCK_DEVICE u32 reduce_min(u32 mask, u32 value) {
  return __reduce_min_sync(mask, value);
}
CROSSDOCK_DEVICE u32 reduce_max(u32 mask, u32 value) {
  return __reduce_max_sync(mask, value);
}
CROSSDOCK_DEVICE u32 reduce_or(u32 mask, u32 value) {
  return __reduce_or_sync(mask, value);
}
CROSSDOCK_DEVICE bool elect_one(u32 mask) {
  u32 elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, %1;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected)
      : "r"(mask));
  return elected != 0;
}

// 8x8 matrices of 16-bit elements: lane 8*i + j holds the address of row j of matrix i.
CROSSDOCK_DEVICE void load_matrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
CROSSDOCK_DEVICE void load_matrix_x4_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
CROSSDOCK_DEVICE void store_matrix_x2(void* row, const u32 (&r)[2]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
      "r"(r[0]), "r"(r[1])
      : "memory");
}
CROSSDOCK_DEVICE void store_matrix_x2_transposed(void* row, const u32 (&r)[2]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
      "r"(r[0]), "r"(r[1])
      : "memory");
}
CROSSDOCK_DEVICE void store_matrix_x4(void* row, const u32 (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
CROSSDOCK_DEVICE void store_matrix_x4_transposed(void* row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#else
CROSSDOCK_DEVICE void sync_warp(u32 mask CROSSDOCK_SITE) {
  twin::hooks::sync_warp(mask, site);
}
template <class T>
CROSSDOCK_DEVICE T shuffle_bits(u32 mask, T value, twin::hooks::ShuffleArgs args, twin::Site site) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = twin::hooks::shuffle(mask, bits, args, site);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
CROSSDOCK_DEVICE T shuffle(u32 mask, T value, u32 lane CROSSDOCK_SITE) {
  return shuffle_bits(mask, value, {twin::hooks::Shuffle::kIndex, lane}, site);
}
template <class T>
CROSSDOCK_DEVICE T shuffle_up(u32 mask, T value, u32 delta CROSSDOCK_SITE) {
  return shuffle_bits(mask, value, {twin::hooks::Shuffle::kUp, delta}, site);
}
template <class T>
CROSSDOCK_DEVICE T shuffle_down(u32 mask, T value, u32 delta CROSSDOCK_SITE) {
  return shuffle_bits(mask, value, {twin::hooks::Shuffle::kDown, delta}, site);
}
template <class T>
CROSSDOCK_DEVICE T shuffle_xor(u32 mask, T value, u32 lanes CROSSDOCK_SITE) {
  return shuffle_bits(mask, value, {twin::hooks::Shuffle::kXor, lanes}, site);
}
CROSSDOCK_DEVICE u32 uniform(u32 value CROSSDOCK_SITE) {
  return shuffle_bits(kFullMask, value, {twin::hooks::Shuffle::kIndex, 0}, site);
}
CROSSDOCK_DEVICE u32 warp_constant(u32 value CROSSDOCK_SITE) {
  return twin::hooks::reduce(kFullMask, twin::hooks::Rmw::kOr, value, site);
}
CROSSDOCK_DEVICE u32 lane_constant(u32 value CROSSDOCK_SITE) {
  return twin::hooks::reduce(1, twin::hooks::Rmw::kOr, value, site);
}
CROSSDOCK_DEVICE u32 ballot(u32 mask, bool predicate CROSSDOCK_SITE) {
  return twin::hooks::ballot(mask, predicate, site);
}
CROSSDOCK_DEVICE bool any(u32 mask, bool predicate CROSSDOCK_SITE) {
  return twin::hooks::any(mask, predicate, site);
}
CROSSDOCK_DEVICE bool all(u32 mask, bool predicate CROSSDOCK_SITE) {
  return twin::hooks::all(mask, predicate, site);
}
template <class T>
CROSSDOCK_DEVICE u32 match_any(u32 mask, T value CROSSDOCK_SITE) {
  return twin::hooks::match_any(mask, value, site);
}
CROSSDOCK_DEVICE u32 reduce_add(u32 mask, u32 value CROSSDOCK_SITE) {
  return twin::hooks::reduce(mask, twin::hooks::Rmw::kAdd, value, site);
}
CROSSDOCK_DEVICE u32 reduce_min(u32 mask, u32 value CROSSDOCK_SITE) {
  return twin::hooks::reduce(mask, twin::hooks::Rmw::kMin, value, site);
}
CROSSDOCK_DEVICE u32 reduce_max(u32 mask, u32 value CROSSDOCK_SITE) {
  return twin::hooks::reduce(mask, twin::hooks::Rmw::kMax, value, site);
}
CROSSDOCK_DEVICE u32 reduce_or(u32 mask, u32 value CROSSDOCK_SITE) {
  return twin::hooks::reduce(mask, twin::hooks::Rmw::kOr, value, site);
}
CROSSDOCK_DEVICE bool elect_one(u32 mask CROSSDOCK_SITE) {
  return twin::hooks::elect(mask, site);
}

CROSSDOCK_DEVICE void load_matrix_x4(u32 (&r)[4], const void* row CROSSDOCK_SITE) {
  twin::hooks::load_matrix(r, row, {4, false}, site);
}
CROSSDOCK_DEVICE void load_matrix_x4_transposed(u32 (&r)[4], const void* row CROSSDOCK_SITE) {
  twin::hooks::load_matrix(r, row, {4, true}, site);
}
CROSSDOCK_DEVICE void store_matrix_x2(void* row, const u32 (&r)[2] CROSSDOCK_SITE) {
  twin::hooks::store_matrix(r, row, {2, false}, site);
}
CROSSDOCK_DEVICE void store_matrix_x2_transposed(void* row, const u32 (&r)[2] CROSSDOCK_SITE) {
  twin::hooks::store_matrix(r, row, {2, true}, site);
}
CROSSDOCK_DEVICE void store_matrix_x4(void* row, const u32 (&r)[4] CROSSDOCK_SITE) {
  twin::hooks::store_matrix(r, row, {4, false}, site);
}
CROSSDOCK_DEVICE void store_matrix_x4_transposed(void* row, const u32 (&r)[4] CROSSDOCK_SITE) {
  twin::hooks::store_matrix(r, row, {4, true}, site);
}
#endif

}  // namespace crossdock::device::ptx
