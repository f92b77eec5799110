// Allocations, exports and imports, reserved ranges and mappings. See vmm.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/vmm.hpp"

#include <cstdint>
#include <fmt/format.h>
#include <iterator>
#include <set>
#include <vector>

namespace crossdock::cuda {
namespace {

HandleType handle_type(Sharing sharing) {
  switch (sharing) {
    case Sharing::kNone:
      return HandleType::kNone;
    case Sharing::kPosixFd:
      return HandleType::kPosixFd;
    case Sharing::kFabric:
      return HandleType::kFabric;
  }
  return HandleType::kNone;
}

AllocationProp properties(const Context& context, const AllocationOptions& options) {
  AllocationProp prop{};
  prop.type = AllocationType::kPinned;
  prop.requested_handles = handle_type(options.sharing);
  prop.location = {LocationType::kDevice, context.ordinal()};
  prop.flags.gpu_direct_rdma_capable = options.rdma && context.device().gpu_direct_rdma_vmm;
  return prop;
}

Error lacks(const Context& context, std::string_view ability, std::string_view remedy) {
  return make_error(
      Code::kUnsupported,
      fmt::format("GPU {} ({}) with driver CUDA {} has no {}; {}", context.ordinal(),
                  context.device().name, version_text(context.driver().version), ability, remedy));
}

Result<void> check_ability(const Context& context, Sharing sharing) {
  const Device& device = context.device();
  if (!device.vmm) return lacks(context, "virtual memory management", "use plain allocations");
  if (sharing == Sharing::kPosixFd && !device.posix_fd_handles)
    return lacks(context, "export by file descriptor", "use Sharing::kNone within one process");
  if (sharing == Sharing::kFabric && !device.fabric_handles)
    return lacks(
        context, "fabric handles",
        "share by file descriptor on one host (fabric handles need NVLink switches and IMEX)");
  return {};
}

}  // namespace

Result<std::size_t> allocation_granularity(const Context& context,
                                           const AllocationOptions& options) {
  CROSSDOCK_CHECK_OK(check_ability(context, options.sharing));
  const AllocationProp prop = properties(context, options);
  std::size_t bytes = 0;
  CROSSDOCK_CUDA(context.driver(),
                 cuMemGetAllocationGranularity(&bytes, &prop, Granularity::kRecommended),
                 fmt::format("ask the allocation granularity of GPU {}", context.ordinal()));
  return bytes;
}

Result<Allocation> Allocation::create(const Context& context, std::size_t bytes,
                                      const AllocationOptions& options) {
  CROSSDOCK_TRY(granularity, allocation_granularity(context, options));
  if (bytes == 0 || bytes > SIZE_MAX - granularity)
    return invalid_argument(
        fmt::format("allocation of {} bytes: must be at least 1 and fit the address space", bytes));
  const std::size_t rounded = (bytes + granularity - 1) / granularity * granularity;
  const AllocationProp prop = properties(context, options);
  AllocationHandle handle = 0;
  CROSSDOCK_TRY(guard, context.enter());
  CROSSDOCK_CUDA(
      context.driver(), cuMemCreate(&handle, rounded, &prop, 0),
      fmt::format("allocate {} bytes of shareable memory on GPU {}", rounded, context.ordinal()));
  return Allocation(context, handle, rounded, options.sharing);
}

Result<Allocation> Allocation::import_fd(const Context& context, int fd, std::size_t bytes) {
  CROSSDOCK_CHECK_OK(check_ability(context, Sharing::kPosixFd));
  AllocationHandle handle = 0;
  CROSSDOCK_TRY(guard, context.enter());
  // The driver takes the descriptor's number where other handle types take an address.
  void* const shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  CROSSDOCK_CUDA(
      context.driver(), cuMemImportFromShareableHandle(&handle, shareable, HandleType::kPosixFd),
      fmt::format("import {} bytes by file descriptor {} on GPU {}", bytes, fd, context.ordinal()));
  return Allocation(context, handle, bytes, Sharing::kPosixFd);
}

Result<Allocation> Allocation::import_fabric(const Context& context, const FabricHandle& fabric,
                                             std::size_t bytes) {
  CROSSDOCK_CHECK_OK(check_ability(context, Sharing::kFabric));
  AllocationHandle handle = 0;
  FabricHandle copy = fabric;
  CROSSDOCK_TRY(guard, context.enter());
  CROSSDOCK_CUDA(context.driver(),
                 cuMemImportFromShareableHandle(&handle, &copy, HandleType::kFabric),
                 fmt::format("import {} bytes by fabric handle on GPU {} (same NVLink domain and "
                             "IMEX channel?)",
                             bytes, context.ordinal()));
  return Allocation(context, handle, bytes, Sharing::kFabric);
}

Allocation& Allocation::operator=(Allocation&& other) noexcept {
  if (this == &other) return *this;
  release();
  context_ = other.context_;
  handle_ = std::exchange(other.handle_, 0);
  bytes_ = other.bytes_;
  sharing_ = other.sharing_;
  return *this;
}

void Allocation::release() noexcept {
  if (handle_ == 0) return;
  const auto guard = context_.enter_quietly();
  static_cast<void>(context_.driver().cuMemRelease(std::exchange(handle_, 0)));
}

Result<base::UniqueFd> Allocation::export_fd() const {
  if (sharing_ != Sharing::kPosixFd)
    return invalid_argument("export_fd() needs an allocation created with Sharing::kPosixFd");
  int fd = -1;
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(
      context_.driver(), cuMemExportToShareableHandle(&fd, handle_, HandleType::kPosixFd, 0),
      fmt::format("export {} bytes of GPU {} by file descriptor", bytes_, context_.ordinal()));
  return base::UniqueFd(fd);
}

Result<FabricHandle> Allocation::export_fabric() const {
  if (sharing_ != Sharing::kFabric)
    return invalid_argument("export_fabric() needs an allocation created with Sharing::kFabric");
  FabricHandle fabric{};
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(
      context_.driver(), cuMemExportToShareableHandle(&fabric, handle_, HandleType::kFabric, 0),
      fmt::format("export {} bytes of GPU {} by fabric handle", bytes_, context_.ordinal()));
  return fabric;
}

Result<AddressRange> AddressRange::reserve(const Context& context, std::size_t bytes,
                                           const ReserveOptions& options) {
  CROSSDOCK_CHECK_OK(check_ability(context, Sharing::kNone));
  DevicePtr address = 0;
  CROSSDOCK_TRY(guard, context.enter());
  CROSSDOCK_CUDA(context.driver(),
                 cuMemAddressReserve(&address, bytes, options.alignment, options.hint, 0),
                 fmt::format("reserve {} bytes of addresses", bytes));
  return AddressRange(context, address, bytes);
}

AddressRange::AddressRange(AddressRange&& other) noexcept
    : context_(other.context_),
      address_(std::exchange(other.address_, 0)),
      bytes_(other.bytes_),
      mapped_(std::exchange(other.mapped_, {})) {}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  if (this == &other) return *this;
  free();
  context_ = other.context_;
  address_ = std::exchange(other.address_, 0);
  bytes_ = other.bytes_;
  mapped_ = std::exchange(other.mapped_, {});
  return *this;
}

void AddressRange::free() noexcept {
  if (address_ == 0) return;
  const auto guard = context_.enter_quietly();
  for (const auto& [offset, bytes] : mapped_)
    static_cast<void>(context_.driver().cuMemUnmap(address_ + offset, bytes));
  mapped_.clear();
  static_cast<void>(context_.driver().cuMemAddressFree(std::exchange(address_, 0), bytes_));
}

Result<void> AddressRange::check_free(std::size_t offset, std::size_t bytes) const {
  if (offset > bytes_ || bytes > bytes_ - offset)
    return invalid_argument(
        fmt::format("mapping of {} bytes at offset {} leaves the reserved range "
                    "of {} bytes",
                    bytes, offset, bytes_));
  const auto next = mapped_.lower_bound(offset);
  const bool hits_next = next != mapped_.end() && next->first < offset + bytes;
  const bool hits_previous =
      next != mapped_.begin() && std::prev(next)->first + std::prev(next)->second > offset;
  if (hits_next || hits_previous)
    return make_error(Code::kBusy, fmt::format("offset {} of the reserved range is mapped already: "
                                               "unmap it first",
                                               offset));
  return {};
}

Result<void> AddressRange::map(std::size_t offset, const Allocation& allocation,
                               std::span<const int> devices) {
  CROSSDOCK_CHECK_OK(check_free(offset, allocation.bytes()));
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(),
                 cuMemMap(address_ + offset, allocation.bytes(), 0, allocation.handle(), 0),
                 fmt::format("map {} bytes at {:#x}", allocation.bytes(), address_ + offset));
  mapped_.emplace(offset, allocation.bytes());
  auto opened = set_access(offset, devices);
  if (!opened.ok()) static_cast<void>(unmap(offset));
  return opened;
}

Result<void> AddressRange::set_access(std::size_t offset, std::span<const int> devices) {
  const auto found = mapped_.find(offset);
  if (found == mapped_.end())
    return make_error(Code::kNotFound, fmt::format("nothing is mapped at offset {}", offset));
  std::vector<AccessDesc> access;
  // Ranks that share a GPU name it each; the driver wants each once.
  for (const int device : std::set<int>(devices.begin(), devices.end()))
    access.push_back({{LocationType::kDevice, device}, AccessFlags::kReadWrite});
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(),
                 cuMemSetAccess(address_ + offset, found->second, access.data(), access.size()),
                 fmt::format("open {} bytes at {:#x} to {} GPU(s)", found->second,
                             address_ + offset, access.size()));
  return {};
}

Result<void> AddressRange::unmap(std::size_t offset) {
  const auto found = mapped_.find(offset);
  if (found == mapped_.end())
    return make_error(Code::kNotFound, fmt::format("nothing is mapped at offset {}", offset));
  CROSSDOCK_TRY(guard, context_.enter());
  CROSSDOCK_CUDA(context_.driver(), cuMemUnmap(address_ + offset, found->second),
                 fmt::format("unmap {} bytes at {:#x}", found->second, address_ + offset));
  mapped_.erase(found);
  return {};
}

}  // namespace crossdock::cuda
