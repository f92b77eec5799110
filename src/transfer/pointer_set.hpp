// A set of addresses for "seen before?": a few are compared one by one, many are hashed. Keeps its
// memory when cleared, so that a recycled owner allocates nothing. Thread-compatible.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace crossdock::transfer::detail {

class PointerSet {
 public:
  // False when it was in the set. Precondition: not null.
  bool insert(const void* pointer) {
    if (size_ < kFew) return insert_few(pointer);
    if (size_ == kFew) {
      if (std::find(few_.begin(), few_.end(), pointer) != few_.end()) return false;
      grow(8 * kFew);
      for (const void* one : few_)
        place(one);
    }
    if (2 * (size_ + 1) > table_.size()) grow(2 * table_.size());
    if (!place(pointer)) return false;
    ++size_;
    return true;
  }
  void clear() {
    // The table may have grown large once: it is wiped only when it was used.
    if (size_ > kFew) std::fill(table_.begin(), table_.end(), nullptr);
    size_ = 0;
  }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  static constexpr std::size_t kFew = 16;

  bool insert_few(const void* pointer) {
    const auto end = few_.begin() + static_cast<std::ptrdiff_t>(size_);
    if (std::find(few_.begin(), end, pointer) != end) return false;
    few_[size_++] = pointer;
    return true;
  }
  // Makes room for at least `slots`, a power of two, and takes over what is there.
  void grow(std::size_t slots) {
    if (slots <= table_.size()) return;
    std::vector<const void*> old(slots, nullptr);
    old.swap(table_);
    for (const void* one : old)
      if (one != nullptr) place(one);
  }
  // Linear probing; the table is at most half full.
  bool place(const void* pointer) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::uint64_t hash = reinterpret_cast<std::uint64_t>(pointer) * 0x9e3779b97f4a7c15u;
    for (std::size_t at = (hash >> 32) & mask;; at = (at + 1) & mask) {
      if (table_[at] == pointer) return false;
      if (table_[at] != nullptr) continue;
      table_[at] = pointer;
      return true;
    }
  }

  std::array<const void*, kFew> few_;  // the first size_ of them
  std::vector<const void*> table_;     // all of them, beyond kFew
  std::size_t size_ = 0;
};

}  // namespace crossdock::transfer::detail
