// Windows in the memory of GPUs. See gpu.hpp; the figure is in heap.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "symm/gpu.hpp"

namespace crossdock::symm {
namespace {

cuda::Sharing to_cuda(Sharing sharing) {
  switch (sharing) {
    case Sharing::kNone:
      return cuda::Sharing::kNone;
    case Sharing::kDescriptor:
      return cuda::Sharing::kPosixFd;
    case Sharing::kFabric:
      return cuda::Sharing::kFabric;
  }
  return cuda::Sharing::kNone;
}

// Says whose window it was, and how much memory the GPU still has.
Error window_error(Error error, const char* step, u32 rank, const cuda::Context& context) {
  std::string free;
  if (const auto info = context.memory_info(); info.ok())
    free = fmt::format("; {} of {} MiB are free on GPU {}", info->free_bytes >> 20,
                       info->total_bytes >> 20, context.ordinal());
  error.message = fmt::format("{} the window of rank {}: {}{}", step, rank, error.message, free);
  return error;
}

class GpuHeap final : public Heap {
 public:
  explicit GpuHeap(GpuHeapOptions options)
      : options_(std::move(options)), windows_(options_.heap.world, nullptr) {
    for (const auto& [rank, context] : options_.local)
      ordinals_.push_back(context.ordinal());
  }

  Result<> allocate(u32 rank) override {
    const cuda::Context& context = context_of(rank);
    auto made = cuda::Allocation::create(context, options_.heap.window_bytes,
                                         {.sharing = to_cuda(options_.sharing)});
    if (!made.ok()) return window_error(std::move(made).error(), "allocate", rank, context);
    allocated_bytes_ = std::max<u64>(allocated_bytes_, made->bytes());
    allocations_.insert_or_assign(rank, std::move(made).value());
    return {};
  }
  u64 allocated_bytes() const override { return allocated_bytes_; }
  Result<WindowHandle> share(u32 rank) override {
    const cuda::Allocation& allocation = allocations_.at(rank);
    WindowHandle handle;
    if (options_.sharing == Sharing::kFabric) {
      CROSSDOCK_TRY(fabric, allocation.export_fabric());
      handle.fabric.assign(reinterpret_cast<const char*>(&fabric), sizeof fabric);
      return handle;
    }
    CROSSDOCK_TRY(fd, allocation.export_fd());
    handle.fd = std::move(fd);
    return handle;
  }
  Result<> reserve(u64 stride) override {
    const cuda::Context& context = options_.local.front().second;
    CROSSDOCK_TRY(granularity,
                  cuda::allocation_granularity(context, {.sharing = to_cuda(options_.sharing)}));
    stride_ = device::round_up<u64>(std::max(stride, allocated_bytes_), granularity);
    const u32 ranges = options_.heap.at_stride ? 1 : options_.heap.world;
    const u64 bytes = options_.heap.at_stride ? stride_ * options_.heap.world : stride_;
    for (u32 i = 0; i < ranges; ++i) {
      CROSSDOCK_TRY(range, cuda::AddressRange::reserve(context, bytes));
      ranges_.push_back(std::move(range));
    }
    return {};
  }
  Result<> map(u32 rank, const WindowHandle* handle) override {
    if (handle == nullptr) return map_at(rank, allocations_.at(rank));
    const cuda::Context& context = options_.local.front().second;
    auto imported = import(context, *handle);
    if (!imported.ok()) return window_error(std::move(imported).error(), "import", rank, context);
    // The mapping keeps the memory; the handle may go.
    return map_at(rank, *imported);
  }
  Result<> unmap(u32 rank) override {
    CROSSDOCK_CHECK_OK(free_addresses(rank));
    allocations_.erase(rank);
    return {};
  }
  // One granule of memory, mapped over and over.
  Result<> vacate(u32 rank) override {
    const cuda::Context& context = options_.local.front().second;
    if (!sink_) {
      auto made = cuda::Allocation::create(context, 1, {.sharing = cuda::Sharing::kNone});
      if (!made.ok()) return window_error(std::move(made).error(), "vacate", rank, context);
      sink_.emplace(std::move(made).value());
    }
    CROSSDOCK_CHECK_OK(unmap(rank));
    const u64 offset = offset_of(rank);
    for (u64 at = 0; at + sink_->bytes() <= stride_; at += sink_->bytes()) {
      auto mapped = range_of(rank).map(offset + at, *sink_, ordinals_);
      if (!mapped.ok()) return window_error(std::move(mapped).error(), "vacate", rank, context);
      mapped_[rank].push_back(offset + at);
    }
    windows_[rank] = reinterpret_cast<u8*>(range_of(rank).address() + offset);
    return {};
  }
  u8* window(u32 rank) const override { return windows_[rank]; }
  i64 stride() const override { return options_.heap.at_stride ? static_cast<i64>(stride_) : 0; }
  Result<> clear(u32 rank, RankDevice& device, Deadline deadline) override {
    return device.zero(windows_[rank], options_.heap.window_bytes, deadline);
  }

 private:
  const cuda::Context& context_of(u32 rank) const {
    const auto found = std::find_if(options_.local.begin(), options_.local.end(),
                                    [&](const auto& local) { return local.first == rank; });
    return found->second;
  }
  Result<cuda::Allocation> import(const cuda::Context& context, const WindowHandle& handle) const {
    if (options_.sharing != Sharing::kFabric)
      return cuda::Allocation::import_fd(context, handle.fd.get(), handle.bytes);
    cuda::FabricHandle fabric{};
    if (handle.fabric.size() != sizeof fabric)
      return make_error(Code::kCorrupt, fmt::format("a fabric handle of {} bytes, expected {}",
                                                    handle.fabric.size(), sizeof fabric));
    std::memcpy(&fabric, handle.fabric.data(), sizeof fabric);
    return cuda::Allocation::import_fabric(context, fabric, handle.bytes);
  }
  Result<> free_addresses(u32 rank) {
    for (const u64 offset : mapped_[rank])
      CROSSDOCK_CHECK_OK(range_of(rank).unmap(offset));
    mapped_[rank].clear();
    return {};
  }
  Result<> map_at(u32 rank, const cuda::Allocation& allocation) {
    CROSSDOCK_CHECK_OK(free_addresses(rank));
    cuda::AddressRange& range = range_of(rank);
    const u64 offset = offset_of(rank);
    auto mapped = range.map(offset, allocation, ordinals_);
    if (!mapped.ok())
      return window_error(std::move(mapped).error(), "map", rank, options_.local.front().second);
    mapped_[rank].push_back(offset);
    windows_[rank] = reinterpret_cast<u8*>(range.address() + offset);
    return {};
  }
  cuda::AddressRange& range_of(u32 rank) {
    return options_.heap.at_stride ? ranges_[0] : ranges_[rank];
  }
  [[nodiscard]] u64 offset_of(u32 rank) const {
    return options_.heap.at_stride ? stride_ * rank : 0;
  }

  GpuHeapOptions options_;
  u64 allocated_bytes_ = 0;
  u64 stride_ = 0;
  std::vector<int> ordinals_;
  std::vector<u8*> windows_;
  std::map<u32, std::vector<u64>> mapped_;  // by rank: offsets in its range
  std::optional<cuda::Allocation> sink_;
  // Ranges unmap before allocations are released.
  std::map<u32, cuda::Allocation> allocations_;
  std::vector<cuda::AddressRange> ranges_;
};

// The GPU with this UUID as this process numbers it; -1 when it is hidden.
int ordinal_of(const std::vector<cuda::Device>& devices, const std::string& uuid) {
  for (const cuda::Device& device : devices)
    if (device.uuid == uuid) return device.ordinal;
  return -1;
}

Error no_path(const cuda::Context& from, u32 rank, const cuda::Device& to, u32 peer,
              const char* what) {
  return make_error(
      Code::kUnreachable,
      fmt::format("rank {} on GPU {} ({}) and rank {} on GPU {} ({}): {}; symmetric groups need "
                  "loads, stores and atomics between all their GPUs (NVLink): check `nvidia-smi "
                  "topo -p2p n`, or make a group for each NVLink domain",
                  rank, from.ordinal(), from.device().pci_id, peer, to.ordinal, to.pci_id, what));
}

}  // namespace

std::unique_ptr<Heap> make_gpu_heap(GpuHeapOptions options) {
  return std::make_unique<GpuHeap>(std::move(options));
}

Result<> check_peers(const std::vector<std::pair<u32, cuda::Context>>& local,
                     const Agreement& agreement) {
  if (local.empty()) return {};
  const cuda::Driver& driver = local.front().second.driver();
  CROSSDOCK_TRY(devices, cuda::query_devices(driver));
  for (const auto& [rank, context] : local)
    for (const message::Proposal& member : agreement.members)
      for (const message::ProposedRank& peer : member.ranks) {
        const int ordinal = ordinal_of(devices, peer.device);
        if (ordinal < 0 || ordinal == context.ordinal()) continue;
        const cuda::Device& device = devices[static_cast<std::size_t>(ordinal)];
        CROSSDOCK_TRY(access, cuda::query_peer_access(driver, context.ordinal(), ordinal));
        if (!access.supported)
          return no_path(context, rank, device, peer.rank, "no peer access between them");
        if (!access.native_atomics)
          return no_path(context, rank, device, peer.rank, "no atomics between them");
      }
  return {};
}

}  // namespace crossdock::symm
