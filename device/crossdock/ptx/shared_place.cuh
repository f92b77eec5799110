// Shared memory where each instruction counts: places at constant distances from an address that is
// kept, and a table that is looked up with bytes of a word.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/memory.cuh>

namespace crossdock::device::ptx {

#if CROSSDOCK_ON_GPU
// A place in shared memory as a number that is kept: what lies at constant distances from it then
// takes no further instruction.
struct SharedPlace {
  u32 address;
};
CROSSDOCK_DEVICE SharedPlace shared_place(const u8* p) {
  return {shared_address(p)};
}
// With these bits of the address turned over.
CROSSDOCK_DEVICE SharedPlace exchanged(SharedPlace of, u32 bits) {
  SharedPlace place{of.address ^ bits};
  asm volatile("" : "+r"(place.address));
  return place;
}
CROSSDOCK_DEVICE u32 ld_shared(SharedPlace at, u32 distance) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at.address + distance) : "memory");
  return v;
}
CROSSDOCK_DEVICE void st_shared(SharedPlace at, u32 distance, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at.address + distance), "r"(v) : "memory");
}
// 8 bytes of a table whose address is a multiple of 256 and which nobody writes any more: at byte
// `which` of `offsets`, which one permutation puts into the address.
CROSSDOCK_DEVICE U32x2 ld_shared_table(const u8* table, u32 offsets, u32 which) {
  const u32 address = __byte_perm(offsets, shared_address(table), 0x7650 + which);
  U32x2 v;
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
// The same without the integer units, which unpacking fills: the byte is added to the address as a
// product of bytes.
CROSSDOCK_DEVICE U32x2 ld_shared_table_by_product(const u8* table, u32 offsets, u32 which) {
  u32 address;
  U32x2 v;
  asm("dp4a.u32.u32 %0, %1, %2, %3;"
      : "=r"(address)
      : "r"(offsets), "r"(1u << (8 * which)), "r"(shared_address(table)));
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
// The upper half of a word, by the same units.
CROSSDOCK_DEVICE u32 upper_half_by_product(u32 word) {
  u32 half;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(half) : "r"(word), "r"(0x100u), "r"(0u));
  return half;
}
#else
struct SharedPlace {
  u8* address;
};
CROSSDOCK_DEVICE SharedPlace shared_place(const u8* p) {
  return {const_cast<u8*>(p)};
}
CROSSDOCK_DEVICE SharedPlace exchanged(SharedPlace of, u32 bits) {
  return {reinterpret_cast<u8*>(reinterpret_cast<u64>(of.address) ^ bits)};
}
CROSSDOCK_DEVICE u32 ld_shared(SharedPlace at, u32 distance CROSSDOCK_SITE) {
  return ld_shared(reinterpret_cast<const u32*>(at.address + distance) CROSSDOCK_PASS_SITE);
}
CROSSDOCK_DEVICE void st_shared(SharedPlace at, u32 distance, u32 v CROSSDOCK_SITE) {
  st_shared(reinterpret_cast<u32*>(at.address + distance), v CROSSDOCK_PASS_SITE);
}
CROSSDOCK_DEVICE U32x2 ld_shared_table(const u8* table, u32 offsets, u32 which CROSSDOCK_SITE) {
  const u8* at = table + (offsets >> (8 * which) & 0xffu);
  return twin::hooks::load_as(reinterpret_cast<const U32x2*>(at), kWeakAccess, site);
}
CROSSDOCK_DEVICE U32x2 ld_shared_table_by_product(const u8* table, u32 offsets,
                                                  u32 which CROSSDOCK_SITE) {
  return ld_shared_table(table, offsets, which CROSSDOCK_PASS_SITE);
}
CROSSDOCK_DEVICE u32 upper_half_by_product(u32 word) {
  return word >> 16;
}
#endif

}  // namespace crossdock::device::ptx
