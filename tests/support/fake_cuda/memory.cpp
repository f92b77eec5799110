// The fake's memory: blocks and pinned memory from the heap, shareable allocations from memfds that
// are mapped into reserved address ranges.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/fake_cuda/state.hpp"

namespace crossdock::testing::fake {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

bool charge(int device, std::size_t bytes) {
  auto& d = state().devices[device];
  if (bytes > d.total_bytes || d.used_bytes > d.total_bytes - bytes) return false;
  d.used_bytes += bytes;
  return true;
}

void drop_reference(AllocationHandle handle) {
  const auto found = state().allocations.find(handle);
  if (--found->second.references > 0) return;
  ::close(found->second.fd);
  if (!found->second.imported)
    state().devices[found->second.device].used_bytes -= found->second.bytes;
  state().allocations.erase(found);
}

// The reserved range that holds [address, address + bytes), or end().
bool reserved(DevicePtr address, std::size_t bytes) {
  auto range = state().ranges.upper_bound(address);
  if (range == state().ranges.begin()) return false;
  --range;
  return address + bytes <= range->first + range->second;
}

bool overlaps_mapping(DevicePtr address, std::size_t bytes) {
  for (const auto& [base, mapping] : state().mappings)
    if (address < base + mapping.bytes && base < address + bytes) return true;
  return false;
}

AllocationState* live_allocation(AllocationHandle handle) {
  const auto found = state().allocations.find(handle);
  return found == state().allocations.end() || !found->second.handle_alive ? nullptr
                                                                           : &found->second;
}

// What the driver knows of the memory around an address.
struct Known {
  MemoryType type = MemoryType::kDevice;
  int device = -1;
  bool managed = false;
  DevicePtr base = 0;
  std::size_t bytes = 0;
};
bool find_known(DevicePtr address, Known& known) {
  for (const auto& [base, block] : state().blocks)
    if (address >= base && address < base + block.first) {
      known = {MemoryType::kDevice, block.second, state().managed.count(base) != 0, base,
               block.first};
      return true;
    }
  for (const auto& [base, block] : state().pinned)
    if (address >= base && address < base + block.bytes) {
      known = {MemoryType::kHost, block.device, false, base, block.bytes};
      return true;
    }
  for (const auto& [base, mapping] : state().mappings)
    if (address >= base && address < base + mapping.bytes) {
      const int device = state().allocations.at(mapping.allocation).device;
      known = {MemoryType::kDevice, device, false, base, mapping.bytes};
      return true;
    }
  return false;
}

// The name of the memfd tells which GPU's memory it is, in every process that imports it.
std::string memory_name(int device) {
  return "fake-gpu-" + std::to_string(device);
}
int device_of_memory(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  char target[128] = {};
  int device = -1;
  if (::readlink(link.c_str(), target, sizeof target - 1) < 0) return -1;
  return std::sscanf(target, "/memfd:fake-gpu-%d", &device) == 1 ? device : -1;
}

AllocationHandle add_allocation(AllocationState allocation) {
  const auto handle = static_cast<AllocationHandle>(state().next_id += 16);
  state().allocations[handle] = allocation;
  return handle;
}

}  // namespace

Status cuMemGetInfo(std::size_t* free, std::size_t* total) {
  const int device = current_device();
  if (device < 0) return Status::kInvalidContext;
  *total = state().devices[device].total_bytes;
  *free = *total - state().devices[device].used_bytes;
  return Status::kSuccess;
}

Status cuMemAlloc(DevicePtr* address, std::size_t bytes) {
  const int device = current_device();
  if (device < 0) return Status::kInvalidContext;
  if (bytes == 0) return Status::kInvalidValue;
  if (!charge(device, bytes)) return Status::kOutOfMemory;
  void* const memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  *address = reinterpret_cast<DevicePtr>(memory);
  state().blocks[*address] = {bytes, device};
  return Status::kSuccess;
}

// The fake's streams run at once, so their order is that of the calls.
Status cuMemAllocAsync(DevicePtr* address, std::size_t bytes, StreamHandle stream) {
  const auto own = state().streams.find(stream);
  if (stream != nullptr && own == state().streams.end()) return Status::kInvalidHandle;
  if (stream != nullptr && own->second.capturing) return Status::kStreamCaptureUnsupported;
  return cuMemAlloc(address, bytes);
}

Status cuMemFree(DevicePtr address) {
  const auto found = state().blocks.find(address);
  if (found == state().blocks.end()) return Status::kInvalidValue;
  state().devices[found->second.second].used_bytes -= found->second.first;
  std::free(reinterpret_cast<void*>(address));
  state().managed.erase(address);
  state().blocks.erase(found);
  return Status::kSuccess;
}

Status cuMemGetAddressRange(DevicePtr* base, std::size_t* bytes, DevicePtr address) {
  for (const auto& [start, block] : state().blocks) {
    if (address < start || address >= start + block.first) continue;
    *base = start;
    *bytes = block.first;
    return Status::kSuccess;
  }
  return Status::kInvalidValue;
}

Status cuMemHostAlloc(void** host, std::size_t bytes, unsigned) {
  if (current_device() < 0) return Status::kInvalidContext;
  *host = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  state().pinned[reinterpret_cast<DevicePtr>(*host)] = {bytes, current_device()};
  return Status::kSuccess;
}

Status cuMemFreeHost(void* host) {
  if (state().pinned.erase(reinterpret_cast<DevicePtr>(host)) == 0) return Status::kInvalidValue;
  std::free(host);
  return Status::kSuccess;
}

Status cuMemHostGetDevicePointer(DevicePtr* address, void* host, unsigned) {
  *address = reinterpret_cast<DevicePtr>(host);
  if (state().pinned.count(*address) == 0 && state().registered.count(host) == 0)
    return Status::kInvalidValue;
  return Status::kSuccess;
}

Status cuMemHostRegister(void* host, std::size_t, unsigned) {
  if (current_device() < 0) return Status::kInvalidContext;
  return state().registered.insert(host).second ? Status::kSuccess
                                                : Status::kHostMemoryAlreadyRegistered;
}

Status cuMemHostUnregister(void* host) {
  return state().registered.erase(host) ? Status::kSuccess : Status::kHostMemoryNotRegistered;
}

Status cuMemcpy(DevicePtr target, DevicePtr source, std::size_t bytes) {
  std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes);
  return Status::kSuccess;
}

Status cuMemcpyAsync(DevicePtr target, DevicePtr source, std::size_t bytes, StreamHandle stream) {
  return submit(stream, {[=] { static_cast<void>(cuMemcpy(target, source, bytes)); }});
}

Status cuMemsetD8Async(DevicePtr target, unsigned char value, std::size_t count,
                       StreamHandle stream) {
  return submit(stream, {[=] { std::memset(reinterpret_cast<void*>(target), value, count); }});
}

Status cuMemsetD32Async(DevicePtr target, unsigned value, std::size_t count, StreamHandle stream) {
  return submit(stream, {[=] {
                  auto* const words = reinterpret_cast<unsigned*>(target);
                  for (std::size_t i = 0; i < count; ++i)
                    words[i] = value;
                }});
}

// Of blocks, pinned and mapped memory; of the device pointer as well, which is the address itself.
Status cuPointerGetAttribute(void* value, PointerAttribute attribute, DevicePtr address) {
  Known known;
  if (!find_known(address, known)) return Status::kInvalidValue;
  switch (attribute) {
    case PointerAttribute::kMemoryType:
      *static_cast<unsigned*>(value) = static_cast<unsigned>(known.type);
      break;
    case PointerAttribute::kDeviceOrdinal:
      *static_cast<int*>(value) = known.device;
      break;
    case PointerAttribute::kIsManaged:
      *static_cast<unsigned*>(value) = known.managed ? 1 : 0;
      break;
    case PointerAttribute::kRangeStart:
      *static_cast<DevicePtr*>(value) = known.base;
      break;
    case PointerAttribute::kRangeSize:
      *static_cast<std::size_t*>(value) = known.bytes;
      break;
    case PointerAttribute::kDevicePointer:
      if (current_device() < 0) return Status::kInvalidContext;
      if (state().unmapped.count({current_device(), known.base}) != 0) return Status::kInvalidValue;
      *static_cast<DevicePtr*>(value) = address;
      break;
    default:
      return Status::kNotSupported;
  }
  return Status::kSuccess;
}

Status cuPointerSetAttribute(const void*, PointerAttribute, DevicePtr) {
  return Status::kSuccess;
}

// Legacy handles name heap memory of this process; other processes cannot open them.
Status cuIpcGetMemHandle(IpcMemHandle* handle, DevicePtr address) {
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle->reserved, &address, sizeof address);
  const int pid = ::getpid();
  std::memcpy(handle->reserved + 8, &pid, sizeof pid);
  return state().blocks.count(address) ? Status::kSuccess : Status::kInvalidValue;
}

Status cuIpcOpenMemHandle(DevicePtr*, IpcMemHandle, unsigned) {
  return Status::kNotSupported;
}
Status cuIpcCloseMemHandle(DevicePtr) {
  return Status::kInvalidValue;
}

Status cuMemGetHandleForAddressRange(void*, DevicePtr, std::size_t, RangeHandleType,
                                     unsigned long long) {
  return Status::kNotSupported;
}

Status cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp*, Granularity) {
  *bytes = kGranularity;
  return Status::kSuccess;
}

Status cuMemAddressReserve(DevicePtr* address, std::size_t bytes, std::size_t, DevicePtr hint,
                           unsigned long long) {
  if (bytes == 0 || bytes % kGranularity != 0) return Status::kInvalidValue;
  // Reserved with a margin, so that the start can be aligned to the granularity.
  const std::size_t padded = bytes + kGranularity;
  void* const raw = ::mmap(reinterpret_cast<void*>(hint), padded, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return Status::kOutOfMemory;
  const auto start = reinterpret_cast<DevicePtr>(raw);
  *address = (start + kGranularity - 1) / kGranularity * kGranularity;
  if (*address > start) ::munmap(raw, *address - start);
  const DevicePtr end = start + padded;
  if (end > *address + bytes)
    ::munmap(reinterpret_cast<void*>(*address + bytes), end - *address - bytes);
  state().ranges[*address] = bytes;
  return Status::kSuccess;
}

Status cuMemAddressFree(DevicePtr address, std::size_t bytes) {
  const auto found = state().ranges.find(address);
  if (found == state().ranges.end() || found->second != bytes || overlaps_mapping(address, bytes))
    return Status::kInvalidValue;
  ::munmap(reinterpret_cast<void*>(address), bytes);
  state().ranges.erase(found);
  return Status::kSuccess;
}

Status cuMemCreate(AllocationHandle* handle, std::size_t bytes, const AllocationProp* prop,
                   unsigned long long) {
  const int device = prop->location.id;
  if (bytes == 0 || bytes % kGranularity != 0 || device >= state().device_count)
    return Status::kInvalidValue;
  if (!charge(device, bytes)) return Status::kOutOfMemory;
  const int fd = ::memfd_create(memory_name(device).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return Status::kOperatingSystem;
  *handle = add_allocation(
      {.fd = fd, .bytes = bytes, .device = device, .sharing = prop->requested_handles});
  return Status::kSuccess;
}

Status cuMemRelease(AllocationHandle handle) {
  auto* const allocation = live_allocation(handle);
  if (!allocation) return Status::kInvalidValue;
  allocation->handle_alive = false;
  drop_reference(handle);
  return Status::kSuccess;
}

Status cuMemRetainAllocationHandle(AllocationHandle* handle, void* address) {
  for (const auto& [base, mapping] : state().mappings) {
    const auto a = reinterpret_cast<DevicePtr>(address);
    if (a < base || a >= base + mapping.bytes) continue;
    *handle = mapping.allocation;
    auto& allocation = state().allocations.at(mapping.allocation);
    if (allocation.handle_alive)
      return Status::kNotSupported;  // one handle at a time is enough here
    allocation.handle_alive = true;
    ++allocation.references;
    return Status::kSuccess;
  }
  return Status::kInvalidValue;
}

Status cuMemMap(DevicePtr address, std::size_t bytes, std::size_t offset, AllocationHandle handle,
                unsigned long long) {
  auto* const allocation = live_allocation(handle);
  if (!allocation || offset != 0 || bytes > allocation->bytes) return Status::kInvalidValue;
  if (!reserved(address, bytes) || overlaps_mapping(address, bytes)) return Status::kInvalidValue;
  void* const mapped = ::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                              MAP_SHARED | MAP_FIXED, allocation->fd, 0);
  if (mapped == MAP_FAILED) return Status::kOutOfMemory;
  state().mappings[address] = {bytes, handle};
  ++allocation->references;
  return Status::kSuccess;
}

Status cuMemUnmap(DevicePtr address, std::size_t bytes) {
  const auto found = state().mappings.find(address);
  if (found == state().mappings.end() || found->second.bytes != bytes) return Status::kInvalidValue;
  ::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  drop_reference(found->second.allocation);
  state().mappings.erase(found);
  return Status::kSuccess;
}

Status cuMemSetAccess(DevicePtr address, std::size_t bytes, const AccessDesc* access,
                      std::size_t count) {
  const auto found = state().mappings.find(address);
  if (found == state().mappings.end() || bytes != found->second.bytes) return Status::kInvalidValue;
  const int owner = state().allocations.at(found->second.allocation).device;
  for (std::size_t i = 0; i < count; ++i) {
    const int device = access[i].location.id;
    if (device < 0 || device >= state().device_count) return Status::kInvalidDevice;
    if (state().no_peer.count({device, owner}) != 0) return Status::kInvalidValue;
  }
  const int protection = count > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
  return ::mprotect(reinterpret_cast<void*>(address), bytes, protection) == 0
             ? Status::kSuccess
             : Status::kOperatingSystem;
}

// A fabric handle names the descriptor by process, which is enough between processes of one user.
Status cuMemExportToShareableHandle(void* shareable, AllocationHandle handle, HandleType type,
                                    unsigned long long) {
  auto* const allocation = live_allocation(handle);
  if (!allocation || allocation->sharing != type) return Status::kInvalidValue;
  if (type == HandleType::kPosixFd) {
    const int fd = ::fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
    std::memcpy(shareable, &fd, sizeof fd);
    return fd < 0 ? Status::kOperatingSystem : Status::kSuccess;
  }
  FabricHandle fabric{};
  std::snprintf(reinterpret_cast<char*>(fabric.data), sizeof fabric.data, "/proc/%d/fd/%d",
                ::getpid(), allocation->fd);
  std::memcpy(shareable, &fabric, sizeof fabric);
  return Status::kSuccess;
}

Status cuMemImportFromShareableHandle(AllocationHandle* handle, void* shareable, HandleType type) {
  const int device = current_device();
  if (device < 0) return Status::kInvalidContext;
  const int fd = type == HandleType::kPosixFd
                     ? ::fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)),
                               F_DUPFD_CLOEXEC, 0)
                     : ::open(static_cast<const char*>(shareable), O_RDWR | O_CLOEXEC);
  struct stat info{};
  if (fd < 0) return Status::kInvalidValue;
  const int owner = device_of_memory(fd);
  if (owner < 0 || ::fstat(fd, &info) != 0) {
    ::close(fd);
    return Status::kInvalidValue;
  }
  *handle = add_allocation({.fd = fd,
                            .bytes = static_cast<std::size_t>(info.st_size),
                            .device = owner,
                            .sharing = type,
                            .imported = true});
  return Status::kSuccess;
}

}  // namespace crossdock::testing::fake
