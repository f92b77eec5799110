// An anonymous mapping, at a fixed address where replaying a seed needs one. Move-only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include <crossdock/core/result.hpp>

namespace crossdock::twin {

class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        anywhere_(other.anywhere_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(anywhere_, other.anywhere_);
    return *this;
  }

  // `address` 0: anywhere.
  static Result<Mapping> create(std::uintptr_t address, std::size_t bytes);
  // Zero pages again, without the memory behind them.
  void discard(std::size_t offset, std::size_t bytes);

  [[nodiscard]] unsigned char* base() const { return base_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  unsigned char* base_ = nullptr;
  std::size_t bytes_ = 0;
  bool anywhere_ = false;
};

// Address ranges for one World: the lowest free slot, so that equal programs get equal addresses.
class AddressSlot {
 public:
  AddressSlot();
  ~AddressSlot();
  AddressSlot(const AddressSlot&) = delete;
  AddressSlot& operator=(const AddressSlot&) = delete;
  [[nodiscard]] bool valid() const { return index_ >= 0; }
  [[nodiscard]] std::uintptr_t heaps() const;
  [[nodiscard]] std::uintptr_t shared() const;
  static std::size_t max_heap_bytes();
  static std::size_t max_shared_bytes();

 private:
  int index_ = -1;
};

}  // namespace crossdock::twin
