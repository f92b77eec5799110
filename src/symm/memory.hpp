// Memory of one rank besides its window, on either backend: LocalMemory, which kernels use, and
// HostMemory, which the host reads while kernels write (pinned on the GPU). Move-only; each keeps
// alive what it came from, so any order of destruction is right. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include <crossdock/core.cuh>

namespace crossdock::symm {

using device::i64;
using device::u32;
using device::u64;
using device::u8;

class LocalMemory {
 public:
  LocalMemory() = default;
  LocalMemory(void* address, u64 bytes, std::shared_ptr<const void> owner)
      : address_(address), bytes_(bytes), owner_(std::move(owner)) {}
  LocalMemory(LocalMemory&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        owner_(std::move(other.owner_)) {}
  LocalMemory& operator=(LocalMemory&& other) noexcept {
    address_ = std::exchange(other.address_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    owner_ = std::move(other.owner_);
    return *this;
  }

  // As kernels see it; the host may follow it on the CPU backend only.
  [[nodiscard]] void* address() const { return address_; }
  [[nodiscard]] u64 bytes() const { return bytes_; }
  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(address_);
  }
  [[nodiscard]] const std::shared_ptr<const void>& owner() const { return owner_; }

 private:
  void* address_ = nullptr;
  u64 bytes_ = 0;
  std::shared_ptr<const void> owner_;
};

class HostMemory {
 public:
  HostMemory() = default;
  HostMemory(void* host, void* device, u64 bytes, std::shared_ptr<const void> owner)
      : host_(host), device_(device), bytes_(bytes), owner_(std::move(owner)) {}
  HostMemory(HostMemory&& other) noexcept
      : host_(std::exchange(other.host_, nullptr)),
        device_(std::exchange(other.device_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        owner_(std::move(other.owner_)) {}
  HostMemory& operator=(HostMemory&& other) noexcept {
    host_ = std::exchange(other.host_, nullptr);
    device_ = std::exchange(other.device_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    owner_ = std::move(other.owner_);
    return *this;
  }

  [[nodiscard]] u64 bytes() const { return bytes_; }
  // The address on the host.
  template <class T>
  [[nodiscard]] T* host() const {
    return static_cast<T*>(host_);
  }
  // The address in kernels.
  template <class T>
  [[nodiscard]] T* device() const {
    return static_cast<T*>(device_);
  }

 private:
  void* host_ = nullptr;
  void* device_ = nullptr;
  u64 bytes_ = 0;
  std::shared_ptr<const void> owner_;
};

}  // namespace crossdock::symm
