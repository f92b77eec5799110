// Which memory an address belongs to: a rank's heap, memory attached to a rank from outside, the
// shared memory of some CTA, or none of them, which is an error of the kernel (a forgotten `map`, a
// host pointer). Filled by the World before a run, read-only during it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crossdock::twin {

struct Region {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
  int rank = 0;
  std::uintptr_t canonical = 0;  // the same in every process: what hashes are made of
  [[nodiscard]] bool contains(std::uintptr_t a, std::size_t n) const {
    return a >= base && a - base <= bytes && bytes - (a - base) >= n;
  }
};

class AddressSpace {
 public:
  // The heaps: `ranks` pieces of `stride` bytes from `base`, of which `used(rank)` are allocated.
  void set_heaps(std::uintptr_t base, std::size_t stride, int ranks);
  void set_shared(std::uintptr_t base, std::size_t bytes);
  void set_used(int rank, std::size_t bytes) { used_[static_cast<std::size_t>(rank)] = bytes; }
  [[nodiscard]] std::size_t used(int rank) const { return used_[static_cast<std::size_t>(rank)]; }
  void attach(int rank, void* base, std::size_t bytes);
  bool detach(void* base);
  void detach_all() { attached_.clear(); }
  [[nodiscard]] bool overlaps(const void* base, std::size_t bytes) const;

  [[nodiscard]] bool is_shared(const void* p) const {
    return reinterpret_cast<std::uintptr_t>(p) - shared_base_ < shared_bytes_;
  }
  // The rank whose memory holds [p, p + n), or -1.
  [[nodiscard]] int owner(const void* p, std::size_t n) const {
    const auto offset = reinterpret_cast<std::uintptr_t>(p) - heap_base_;
    if (offset < heap_bytes_) {
      const std::size_t rank = offset / stride_;
      return offset - rank * stride_ + n <= used_[rank] ? static_cast<int>(rank) : -1;
    }
    return attached_.empty() ? -1 : owner_attached(p, n);
  }
  // An address whose bits do not depend on where the kernel put attached memory.
  [[nodiscard]] std::uintptr_t canonical(const void* p) const {
    const auto a = reinterpret_cast<std::uintptr_t>(p);
    if (attached_.empty() || a - heap_base_ < heap_bytes_ || a - shared_base_ < shared_bytes_)
      return a;
    return canonical_attached(a);
  }
  // "rank 3's heap + 0x1200 (of 4096 allocated bytes)", for messages.
  [[nodiscard]] const Region* find_attached(std::uintptr_t a) const;
  [[nodiscard]] std::uintptr_t heap_base() const { return heap_base_; }
  [[nodiscard]] std::size_t stride() const { return stride_; }
  [[nodiscard]] bool in_heaps(const void* p) const {
    return reinterpret_cast<std::uintptr_t>(p) - heap_base_ < heap_bytes_;
  }

 private:
  [[nodiscard]] int owner_attached(const void* p, std::size_t n) const;
  [[nodiscard]] std::uintptr_t canonical_attached(std::uintptr_t a) const;

  std::uintptr_t heap_base_ = 0;
  std::size_t heap_bytes_ = 0;
  std::size_t stride_ = 1;
  std::uintptr_t shared_base_ = 0;
  std::size_t shared_bytes_ = 0;
  std::vector<std::size_t> used_;
  std::vector<Region> attached_;
  std::uintptr_t next_canonical_ = std::uintptr_t{1} << 52;
};

}  // namespace crossdock::twin
