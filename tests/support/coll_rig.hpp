// A group of collectives whose ranks are all in this process, with memory of each rank, on the CPU
// or on GPUs, for tests and their faults.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include <crossdock/coll/group.hpp>

#include "coll/core.hpp"
#include "symm/copy.hpp"

namespace crossdock::testing {

using symm::u32;
using symm::u64;
using symm::u8;

inline Deadline soon() {
  return Deadline::in(std::chrono::seconds(60));
}

// Byte i of what rank `rank` gives in round `round`.
inline u8 byte_of(u32 rank, u32 round, u64 i) {
  return static_cast<u8>(rank * 89 + round * 31 + i * 7 + (i >> 8) + 1);
}
inline std::vector<u8> bytes_of(u32 rank, u32 round, u64 count) {
  std::vector<u8> bytes(count);
  for (u64 i = 0; i < count; ++i)
    bytes[i] = byte_of(rank, round, i);
  return bytes;
}

class CollRig {
 public:
  explicit CollRig(const coll::GroupOptions& options)
      : group_(coll::Group::create(options).value()) {}

  [[nodiscard]] coll::Group& group() { return group_; }
  [[nodiscard]] u32 world() const { return group_.world(); }
  [[nodiscard]] symm::Rank& rank(u32 r) { return group_.core().group().rank(r); }

  // Memory of the rank that lives as long as the rig.
  template <class T>
  T* memory(u32 r, u64 count) {
    blocks_.push_back(rank(r).allocate(count * sizeof(T)).value());
    return blocks_.back().as<T>();
  }
  template <class T>
  T* memory(u32 r, const std::vector<T>& values) {
    T* const at = memory<T>(r, values.size());
    write(r, at, values);
    return at;
  }
  template <class T>
  void write(u32 r, T* at, const std::vector<T>& values) {
    const auto done = symm::upload(rank(r), at, values, soon());
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }
  template <class T>
  std::vector<T> read(u32 r, const T* at, u64 count) {
    return symm::download(rank(r), at, count, soon()).value();
  }
  void finish() {
    const auto done = group_.synchronize(soon());
    ASSERT_TRUE(done.ok()) << done.error().describe();
  }

 private:
  coll::Group group_;
  std::vector<symm::LocalMemory> blocks_;
};

// Of the expected kind, or what came instead.
#define EXPECT_OK(...)                                           \
  do {                                                           \
    const auto expect_ok = (__VA_ARGS__);                        \
    EXPECT_TRUE(expect_ok.ok()) << expect_ok.error().describe(); \
  } while (0)

}  // namespace crossdock::testing
