// Virtual memory management of the driver: physical allocations that other processes can import,
// and address ranges they are mapped into. The symmetric heap and the cuda_ipc transport stand on
// it. Objects are single-owner. No multicast, no managed memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <utility>

#include <crossdock/core/result.hpp>

#include "base/fd.hpp"
#include "cuda/device.hpp"

namespace crossdock::cuda {

// How other processes may get at an allocation: not at all, by a file descriptor on the same host,
// or by a fabric handle (plain bytes) within one NVLink domain.
enum class Sharing { kNone, kPosixFd, kFabric };

struct AllocationOptions {
  Sharing sharing = Sharing::kPosixFd;
  bool rdma = false;  // NICs will access it
};

// Sizes and offsets of allocations and mappings are multiples of this.
Result<std::size_t> allocation_granularity(const Context& context,
                                           const AllocationOptions& options = {});

// Physical memory of one GPU. Mappings keep the memory; the handle may go before them.
class Allocation {
 public:
  // `bytes` is rounded up to the granularity.
  static Result<Allocation> create(const Context& context, std::size_t bytes,
                                   const AllocationOptions& options = {});
  // Memory of another process. `bytes` is what that process says the size is; a mapping beyond the
  // real size fails.
  static Result<Allocation> import_fd(const Context& context, int fd, std::size_t bytes);
  static Result<Allocation> import_fabric(const Context& context, const FabricHandle& handle,
                                          std::size_t bytes);

  Allocation(Allocation&& other) noexcept
      : context_(other.context_),
        handle_(std::exchange(other.handle_, 0)),
        bytes_(other.bytes_),
        sharing_(other.sharing_) {}
  Allocation& operator=(Allocation&& other) noexcept;
  ~Allocation() { release(); }

  Result<base::UniqueFd> export_fd() const;
  Result<FabricHandle> export_fabric() const;
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] AllocationHandle handle() const { return handle_; }
  [[nodiscard]] const Context& context() const { return context_; }

 private:
  Allocation(Context context, AllocationHandle handle, std::size_t bytes, Sharing sharing)
      : context_(std::move(context)), handle_(handle), bytes_(bytes), sharing_(sharing) {}
  void release() noexcept;
  Context context_;
  AllocationHandle handle_;
  std::size_t bytes_;
  Sharing sharing_;
};

struct ReserveOptions {
  std::size_t alignment = 0;  // 0: the driver's
  DevicePtr hint = 0;         // a wish, not a promise
};

// Reserved addresses, and the mappings inside them. Unmaps and frees all at destruction; the caller
// makes sure that no kernel or copy still uses them.
class AddressRange {
 public:
  static Result<AddressRange> reserve(const Context& context, std::size_t bytes,
                                      const ReserveOptions& options = {});
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  ~AddressRange() { free(); }

  [[nodiscard]] DevicePtr address() const { return address_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  // Maps the whole allocation at `offset` and opens it for reading and writing to the GPUs
  // `devices`. On failure nothing stays mapped there.
  Result<void> map(std::size_t offset, const Allocation& allocation, std::span<const int> devices);
  // Opens what is mapped at `offset` to these GPUs.
  Result<void> set_access(std::size_t offset, std::span<const int> devices);
  Result<void> unmap(std::size_t offset);

 private:
  AddressRange(Context context, DevicePtr address, std::size_t bytes)
      : context_(std::move(context)), address_(address), bytes_(bytes) {}
  Result<void> check_free(std::size_t offset, std::size_t bytes) const;
  void free() noexcept;
  Context context_;
  DevicePtr address_;
  std::size_t bytes_;
  std::map<std::size_t, std::size_t> mapped_;  // offset -> bytes
};

}  // namespace crossdock::cuda
