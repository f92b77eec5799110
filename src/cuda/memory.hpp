// Plain device memory, pinned host memory that kernels can reach, registration of foreign host
// memory, copies and fills in stream order. Objects are single-owner and keep their context alive.
// No managed memory, and nothing here allocates behind the caller's back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <crossdock/core/result.hpp>

#include "cuda/stream.hpp"

namespace crossdock::cuda {

class DeviceMemory {
 public:
  static Result<DeviceMemory> allocate(const Context& context, std::size_t bytes);
  // For what comes later on the stream; does not wait for work on the GPU. Nobody may use it any
  // more when it is freed. Plain memory on drivers without memory in stream order.
  static Result<DeviceMemory> allocate_in_order(const Stream& stream, std::size_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept
      : context_(other.context_),
        address_(std::exchange(other.address_, 0)),
        bytes_(other.bytes_) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory() { free(); }

  [[nodiscard]] DevicePtr address() const { return address_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(address_);
  }

 private:
  DeviceMemory(Context context, DevicePtr address, std::size_t bytes)
      : context_(std::move(context)), address_(address), bytes_(bytes) {}
  void free() noexcept;
  Context context_;
  DevicePtr address_;
  std::size_t bytes_;
};

// Page-locked host memory, zeroed, mapped for the GPUs of all contexts.
class PinnedMemory {
 public:
  enum class Caching { kNormal, kWriteCombined };
  static Result<PinnedMemory> allocate(const Context& context, std::size_t bytes,
                                       Caching caching = Caching::kNormal);
  PinnedMemory(PinnedMemory&& other) noexcept
      : context_(other.context_),
        host_(std::exchange(other.host_, nullptr)),
        device_(other.device_),
        bytes_(other.bytes_) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  ~PinnedMemory() { free(); }

  [[nodiscard]] void* host() const { return host_; }
  [[nodiscard]] DevicePtr device() const { return device_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  template <class T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(host_);
  }

 private:
  PinnedMemory(Context context, void* host, DevicePtr device, std::size_t bytes)
      : context_(std::move(context)), host_(host), device_(device), bytes_(bytes) {}
  void free() noexcept;
  Context context_;
  void* host_;
  DevicePtr device_;
  std::size_t bytes_;
};

// Page-locks memory of somebody else (a shared segment) for as long as it lives; the memory must
// outlive it.
class HostRegistration {
 public:
  static Result<HostRegistration> add(const Context& context, void* host, std::size_t bytes);
  HostRegistration(HostRegistration&& other) noexcept
      : context_(other.context_),
        host_(std::exchange(other.host_, nullptr)),
        device_(other.device_) {}
  HostRegistration& operator=(HostRegistration&& other) noexcept;
  ~HostRegistration() { remove(); }
  [[nodiscard]] DevicePtr device() const { return device_; }

 private:
  HostRegistration(Context context, void* host, DevicePtr device)
      : context_(std::move(context)), host_(host), device_(device) {}
  void remove() noexcept;
  Context context_;
  void* host_;
  DevicePtr device_;
};

[[nodiscard]] inline DevicePtr device_ptr(const void* pointer) {
  return static_cast<DevicePtr>(reinterpret_cast<std::uintptr_t>(pointer));
}

// Both ends may be device memory of any GPU, pinned host memory, or (then the copy is staged and
// may block) pageable host memory.
Result<void> copy_async(DevicePtr target, DevicePtr source, std::size_t bytes,
                        const Stream& stream);
Result<void> fill_bytes_async(DevicePtr target, std::uint8_t value, std::size_t bytes,
                              const Stream& stream);
Result<void> fill_words_async(DevicePtr target, std::uint32_t value, std::size_t count,
                              const Stream& stream);

// Writes `value` to an aligned 64-bit word in stream order, after everything before it is visible;
// how a completion reaches the host or a peer without a callback.
Result<void> write_value_async(const Stream& stream, DevicePtr address, std::uint64_t value);
// Later work on the stream waits until the word is >= value. The wait itself has no deadline:
// whoever uses it must be able to release it by writing the word.
Result<void> wait_value_async(const Stream& stream, DevicePtr address, std::uint64_t value);

// One step of a batch: an aligned 64-bit word is written, or waited for until it has exactly this
// value. Writes are made after everything before them is visible.
struct WordOp {
  enum class Kind : std::uint8_t { kWrite, kWait };
  Kind kind = Kind::kWrite;
  void* word = nullptr;
  std::uint64_t value = 0;
};
// In stream order, one after the other, by few calls of the driver, without an SM. As with
// wait_value_async() somebody has to bound the waits. kUnsupported with drivers before CUDA 11.7.
Result<void> words_async(const Stream& stream, std::span<const WordOp> ops);

// What an address is. Memory the driver does not know is host memory with ordinal -1.
struct PointerInfo {
  MemoryType type = MemoryType::kHost;
  int ordinal = -1;
  bool managed = false;
  DevicePtr base = 0;  // of the allocation around it; 0 for host memory
  std::size_t bytes = 0;
};
Result<PointerInfo> query_pointer(const Driver& driver, DevicePtr address);

}  // namespace crossdock::cuda
