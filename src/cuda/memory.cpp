// Device and pinned memory, copies, fills. See memory.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/memory.hpp"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

namespace crossdock::cuda {
namespace {

// "...: 1.2 GB are free" makes an out-of-memory error useful; silent where it cannot be asked.
std::string free_text(const Context& context) {
  const auto info = context.memory_info();
  if (!info.ok()) return {};
  return fmt::format(" ({} of {} MiB free)", info->free_bytes >> 20, info->total_bytes >> 20);
}

Result<void> refuse_empty(std::size_t bytes, std::string_view what) {
  if (bytes != 0) return {};
  return invalid_argument(fmt::format("{} of 0 bytes: ask for at least 1", what));
}

}  // namespace

Result<DeviceMemory> DeviceMemory::allocate(const Context& context, std::size_t bytes) {
  CROSSDOCK_CHECK_OK(refuse_empty(bytes, "device allocation"));
  CROSSDOCK_TRY(guard, context.enter());
  DevicePtr address = 0;
  CROSSDOCK_CUDA(
      context.driver(), cuMemAlloc(&address, bytes),
      fmt::format("allocate {} bytes on GPU {}{}", bytes, context.ordinal(), free_text(context)));
  return DeviceMemory(context, address, bytes);
}

Result<DeviceMemory> DeviceMemory::allocate_in_order(const Stream& stream, std::size_t bytes) {
  const Context& context = stream.context();
  if (context.driver().cuMemAllocAsync == nullptr) return allocate(context, bytes);
  CROSSDOCK_CHECK_OK(refuse_empty(bytes, "device allocation"));
  CROSSDOCK_TRY(guard, context.enter());
  DevicePtr address = 0;
  const Status status = context.driver().cuMemAllocAsync(&address, bytes, stream.handle());
  if (status == Status::kNotSupported) return allocate(context, bytes);
  CROSSDOCK_CHECK_OK(context.driver().check(
      status, fmt::format("allocate {} bytes on GPU {} in the order of a stream{}", bytes,
                          context.ordinal(), free_text(context))));
  return DeviceMemory(context, address, bytes);
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  if (this == &other) return *this;
  free();
  context_ = other.context_;
  address_ = std::exchange(other.address_, 0);
  bytes_ = other.bytes_;
  return *this;
}

void DeviceMemory::free() noexcept {
  if (address_ == 0) return;
  const auto guard = context_.enter_quietly();
  static_cast<void>(context_.driver().cuMemFree(std::exchange(address_, 0)));
}

Result<PinnedMemory> PinnedMemory::allocate(const Context& context, std::size_t bytes,
                                            Caching caching) {
  CROSSDOCK_CHECK_OK(refuse_empty(bytes, "pinned allocation"));
  CROSSDOCK_TRY(guard, context.enter());
  const unsigned flags = kHostAllocPortable | kHostAllocDeviceMap |
                         (caching == Caching::kWriteCombined ? kHostAllocWriteCombined : 0);
  void* host = nullptr;
  CROSSDOCK_CUDA(context.driver(), cuMemHostAlloc(&host, bytes, flags),
                 fmt::format("allocate {} bytes of pinned host memory", bytes));
  PinnedMemory memory(context, host, 0, bytes);
  CROSSDOCK_CUDA(context.driver(), cuMemHostGetDevicePointer(&memory.device_, host, 0),
                 fmt::format("map pinned host memory for GPU {}", context.ordinal()));
  std::memset(host, 0, bytes);
  return memory;
}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  if (this == &other) return *this;
  free();
  context_ = other.context_;
  host_ = std::exchange(other.host_, nullptr);
  device_ = other.device_;
  bytes_ = other.bytes_;
  return *this;
}

void PinnedMemory::free() noexcept {
  if (!host_) return;
  const auto guard = context_.enter_quietly();
  static_cast<void>(context_.driver().cuMemFreeHost(std::exchange(host_, nullptr)));
}

Result<HostRegistration> HostRegistration::add(const Context& context, void* host,
                                               std::size_t bytes) {
  CROSSDOCK_CHECK_OK(refuse_empty(bytes, "host registration"));
  CROSSDOCK_TRY(guard, context.enter());
  CROSSDOCK_CUDA(context.driver(),
                 cuMemHostRegister(host, bytes, kHostRegisterPortable | kHostRegisterDeviceMap),
                 fmt::format("page-lock {} bytes of host memory (ulimit -l?)", bytes));
  HostRegistration registration(context, host, 0);
  CROSSDOCK_CUDA(context.driver(), cuMemHostGetDevicePointer(&registration.device_, host, 0),
                 fmt::format("map registered host memory for GPU {}", context.ordinal()));
  return registration;
}

HostRegistration& HostRegistration::operator=(HostRegistration&& other) noexcept {
  if (this == &other) return *this;
  remove();
  context_ = other.context_;
  host_ = std::exchange(other.host_, nullptr);
  device_ = other.device_;
  return *this;
}

void HostRegistration::remove() noexcept {
  if (!host_) return;
  const auto guard = context_.enter_quietly();
  static_cast<void>(context_.driver().cuMemHostUnregister(std::exchange(host_, nullptr)));
}

Result<void> copy_async(DevicePtr target, DevicePtr source, std::size_t bytes,
                        const Stream& stream) {
  CROSSDOCK_TRY(guard, stream.context().enter());
  CROSSDOCK_CUDA(stream.driver(), cuMemcpyAsync(target, source, bytes, stream.handle()),
                 fmt::format("copy {} bytes from {:#x} to {:#x}", bytes, source, target));
  return {};
}

Result<void> fill_bytes_async(DevicePtr target, std::uint8_t value, std::size_t bytes,
                              const Stream& stream) {
  CROSSDOCK_TRY(guard, stream.context().enter());
  CROSSDOCK_CUDA(stream.driver(), cuMemsetD8Async(target, value, bytes, stream.handle()),
                 fmt::format("fill {} bytes at {:#x}", bytes, target));
  return {};
}

Result<void> fill_words_async(DevicePtr target, std::uint32_t value, std::size_t count,
                              const Stream& stream) {
  CROSSDOCK_TRY(guard, stream.context().enter());
  CROSSDOCK_CUDA(stream.driver(), cuMemsetD32Async(target, value, count, stream.handle()),
                 fmt::format("fill {} words at {:#x}", count, target));
  return {};
}

Result<void> write_value_async(const Stream& stream, DevicePtr address, std::uint64_t value) {
  CROSSDOCK_TRY(guard, stream.context().enter());
  CROSSDOCK_CUDA(stream.driver(), cuStreamWriteValue64(stream.handle(), address, value, 0),
                 fmt::format("write a word at {:#x} in stream order", address));
  return {};
}

Result<void> wait_value_async(const Stream& stream, DevicePtr address, std::uint64_t value) {
  CROSSDOCK_TRY(guard, stream.context().enter());
  CROSSDOCK_CUDA(stream.driver(),
                 cuStreamWaitValue64(stream.handle(), address, value, kStreamWaitValueGeq),
                 fmt::format("make a stream wait for the word at {:#x}", address));
  return {};
}

Result<void> words_async(const Stream& stream, std::span<const WordOp> ops) {
  if (stream.driver().cuStreamBatchMemOp == nullptr)
    return make_error(Code::kUnsupported,
                      "this driver cannot write and wait for words in batches in stream order: "
                      "install a driver for CUDA 11.7 or newer");
  CROSSDOCK_TRY(guard, stream.context().enter());
  BatchMemOp batch[kMostBatchMemOps];
  while (!ops.empty()) {
    const std::size_t count = std::min<std::size_t>(ops.size(), kMostBatchMemOps);
    for (std::size_t i = 0; i < count; ++i) {
      const bool wait = ops[i].kind == WordOp::Kind::kWait;
      batch[i] = BatchMemOp{
          .word = {.operation = wait ? BatchMemOpType::kWaitValue64 : BatchMemOpType::kWriteValue64,
                   .address = device_ptr(ops[i].word),
                   .value = ops[i].value,
                   .flags = wait ? kStreamWaitValueEq : 0,
                   .alias = 0}};
    }
    CROSSDOCK_CUDA(stream.driver(),
                   cuStreamBatchMemOp(stream.handle(), static_cast<unsigned>(count), batch, 0),
                   fmt::format("write and wait for {} words from {:#x} in stream order", count,
                               device_ptr(ops.front().word)));
    ops = ops.subspan(count);
  }
  return {};
}

Result<PointerInfo> query_pointer(const Driver& driver, DevicePtr address) {
  unsigned type = 0;  // the driver writes 32 bits
  const Status status = driver.cuPointerGetAttribute(&type, PointerAttribute::kMemoryType, address);
  if (status == Status::kInvalidValue) return PointerInfo{};  // plain host memory
  CROSSDOCK_CHECK_OK(driver.check(status, fmt::format("ask what {:#x} is", address)));
  PointerInfo info{.type = static_cast<MemoryType>(type)};
  const auto ask = [&](void* value, PointerAttribute which) {
    return driver.check(driver.cuPointerGetAttribute(value, which, address),
                        fmt::format("ask attribute {} of {:#x}", static_cast<int>(which), address));
  };
  unsigned managed = 0;
  CROSSDOCK_CHECK_OK(ask(&info.ordinal, PointerAttribute::kDeviceOrdinal));
  CROSSDOCK_CHECK_OK(ask(&managed, PointerAttribute::kIsManaged));
  info.managed = (managed & 0xffu) != 0;
  if (info.type == MemoryType::kHost) return info;
  CROSSDOCK_CHECK_OK(ask(&info.base, PointerAttribute::kRangeStart));
  CROSSDOCK_CHECK_OK(ask(&info.bytes, PointerAttribute::kRangeSize));
  return info;
}

}  // namespace crossdock::cuda
