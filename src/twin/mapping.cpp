// Mappings and the table of address slots.
// SPDX-License-Identifier: Apache-2.0
#include "twin/mapping.hpp"

#include <atomic>
#include <bit>
#include <cerrno>
#include <fmt/format.h>
#include <sys/mman.h>

#include "twin/sanitizer.hpp"

namespace crossdock::twin {

namespace {

// Places that neither the kernel's own choice of addresses nor a sanitizer's shadow uses. TSan
// leaves only the low 512 GiB.
constexpr std::uintptr_t kGiB = std::uintptr_t{1} << 30;
constexpr std::uintptr_t kHeaps = kTsan ? 16 * kGiB : 0x2000'0000'0000;
constexpr std::uintptr_t kHeapPitch = kTsan ? 24 * kGiB : 1024 * kGiB;
constexpr std::uintptr_t kShared = kTsan ? 420 * kGiB : 0x3000'0000'0000;
constexpr std::uintptr_t kSharedPitch = kTsan ? 4 * kGiB : 64 * kGiB;
constexpr int kSlots = 16;

std::atomic<std::uint32_t> used_slots{0};

}  // namespace

Mapping::~Mapping() {
  if (base_ == nullptr) return;
  // Fibers that never returned leave marks in the shadow, which the next mapping at a place that
  // the kernel chose would inherit.
  if (anywhere_) asan::unpoison(base_, bytes_);
  munmap(base_, bytes_);
}

Result<Mapping> Mapping::create(std::uintptr_t address, std::size_t bytes) {
  const int flags =
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (address != 0 ? MAP_FIXED_NOREPLACE : 0);
  void* base = mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (base == MAP_FAILED)
    return errno_error(errno, fmt::format("map {} bytes of twin memory at {:#x}", bytes, address));
  Mapping mapping;
  mapping.base_ = static_cast<unsigned char*>(base);
  mapping.bytes_ = bytes;
  mapping.anywhere_ = address == 0;
  return mapping;
}

void Mapping::discard(std::size_t offset, std::size_t bytes) {
  madvise(base_ + offset, bytes, MADV_DONTNEED);
}

AddressSlot::AddressSlot() {
  std::uint32_t used = used_slots.load(std::memory_order_relaxed);
  for (;;) {
    const int index = std::countr_one(used);
    if (index >= kSlots) return;
    // Relaxed: the bits guard addresses, not memory; mmap itself is the arbiter.
    if (used_slots.compare_exchange_weak(used, used | 1u << index, std::memory_order_relaxed)) {
      index_ = index;
      return;
    }
  }
}

AddressSlot::~AddressSlot() {
  if (valid()) used_slots.fetch_and(~(1u << index_), std::memory_order_relaxed);
}

std::uintptr_t AddressSlot::heaps() const {
  return kHeaps + static_cast<std::uintptr_t>(index_) * kHeapPitch;
}
std::uintptr_t AddressSlot::shared() const {
  return kShared + static_cast<std::uintptr_t>(index_) * kSharedPitch;
}
std::size_t AddressSlot::max_heap_bytes() {
  return kHeapPitch;
}
std::size_t AddressSlot::max_shared_bytes() {
  return kSharedPitch;
}

}  // namespace crossdock::twin
