// The host as a RankDevice: memory from the rank's heap in the twin, so that every access of a
// kernel is checked, or plain memory where no kernel can run.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <map>
#include <vector>

#include "symm/rank_device.hpp"
#include "twin/launch.hpp"

namespace crossdock::symm {
namespace {

constexpr u64 kAlignment = 256;

// Blocks of one rank's heap. The twin only ever appends to a heap, so freed blocks are kept here
// and given out again for the same size.
class Blocks {
 public:
  Blocks(u32 rank, std::shared_ptr<twin::World> world) : rank_(rank), world_(std::move(world)) {}

  Result<void*> take(u64 bytes) {
    auto& free = free_[bytes];
    if (!free.empty()) {
      void* const block = free.back();
      free.pop_back();
      return block;
    }
    if (world_) return world_->allocate(static_cast<int>(rank_), bytes, kAlignment);
    void* const block = std::aligned_alloc(kAlignment, device::round_up(bytes, kAlignment));
    if (block == nullptr)
      return make_error(Code::kNoMemory, fmt::format("allocate {} bytes of host memory", bytes));
    return block;
  }
  void give_back(void* block, u64 bytes) {
    if (world_) {
      free_[bytes].push_back(block);
    } else {
      std::free(block);
    }
  }

 private:
  u32 rank_;
  std::shared_ptr<twin::World> world_;
  std::map<u64, std::vector<void*>> free_;
};

class CpuDevice final : public RankDevice {
 public:
  CpuDevice(u32 rank, std::shared_ptr<twin::World> world)
      : blocks_(std::make_shared<Blocks>(rank, std::move(world))) {}

  std::string describe() const override { return "CPU"; }

  Result<LocalMemory> allocate(u64 bytes) override {
    if (bytes == 0) return invalid_argument("allocation of 0 bytes: ask for at least 1");
    CROSSDOCK_TRY(block, blocks_->take(bytes));
    std::memset(block, 0, bytes);
    const std::shared_ptr<void> owner(
        block, [blocks = blocks_, bytes](void* b) { blocks->give_back(b, bytes); });
    return LocalMemory(block, bytes, owner);
  }
  Result<LocalMemory> allocate_in_order(u64 bytes, const cuda::Stream*) override {
    return allocate(bytes);
  }
  Result<HostMemory> allocate_host(u64 bytes) override {
    CROSSDOCK_TRY(memory, allocate(bytes));
    return HostMemory(memory.address(), memory.address(), bytes, memory.owner());
  }
  Result<> zero(void* target, u64 bytes, Deadline) override {
    std::memset(target, 0, bytes);
    return {};
  }
  Result<> write(void* target, const void* source, u64 bytes, Deadline) override {
    std::memcpy(target, source, bytes);
    return {};
  }
  Result<> read(void* target, const void* source, u64 bytes, Deadline) override {
    std::memcpy(target, source, bytes);
    return {};
  }

 private:
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace

std::unique_ptr<RankDevice> make_cpu_device(u32 rank, std::shared_ptr<twin::World> world) {
  return std::make_unique<CpuDevice>(rank, std::move(world));
}

}  // namespace crossdock::symm
