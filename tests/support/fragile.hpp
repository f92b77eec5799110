// Memory of which the end can be taken away, as an owner does who frees what is still registered.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstring>
#include <gtest/gtest.h>
#include <sys/mman.h>

namespace crossdock::testing {

// The address stays reserved, or a later allocation would come to lie there.
class Fragile {
 public:
  static constexpr std::size_t kBytes = 1 << 20;
  Fragile()
      : data_(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    std::memset(data_, 1, kBytes);
  }
  ~Fragile() { ::munmap(data_, kBytes); }
  Fragile(const Fragile&) = delete;
  Fragile& operator=(const Fragile&) = delete;
  void lose_from(std::size_t offset) const {
    ASSERT_EQ(::mprotect(static_cast<std::byte*>(data_) + offset, kBytes - offset, PROT_NONE), 0);
  }
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* const data_;
};

}  // namespace crossdock::testing
