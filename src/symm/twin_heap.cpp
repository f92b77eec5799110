// Windows in the heaps of a twin World: all ranks are in this process, and the World's own stride
// is the stride. The twin then knows whose memory an address is without a search.
// SPDX-License-Identifier: Apache-2.0
#include "base/check.hpp"
#include "symm/heap.hpp"
#include "twin/launch.hpp"

namespace crossdock::symm {
namespace {

class TwinHeap final : public Heap {
 public:
  TwinHeap(std::shared_ptr<twin::World> world, u64 window_bytes)
      : world_(std::move(world)), window_bytes_(window_bytes) {}

  Result<> allocate(u32 rank) override {
    CROSSDOCK_TRY(window, world_->allocate(static_cast<int>(rank), window_bytes_));
    CROSSDOCK_CHECK(window == world_->heap(static_cast<int>(rank)), "a window begins its heap");
    return {};
  }
  u64 allocated_bytes() const override { return window_bytes_; }
  Result<WindowHandle> share(u32) override {
    return make_error(Code::kUnsupported, "windows of the twin stay in their process");
  }
  Result<> reserve(u64) override { return {}; }
  Result<> map(u32, const WindowHandle*) override { return {}; }
  Result<> unmap(u32) override { return {}; }
  Result<> vacate(u32) override {
    return make_error(Code::kUnsupported, "the twin has all ranks of a group");
  }
  u8* window(u32 rank) const override { return world_->heap(static_cast<int>(rank)); }
  i64 stride() const override { return static_cast<i64>(world_->heap_bytes()); }
  Result<> clear(u32 rank, RankDevice& device, Deadline deadline) override {
    return device.zero(window(rank), window_bytes_, deadline);
  }

 private:
  std::shared_ptr<twin::World> world_;
  u64 window_bytes_;
};

}  // namespace

std::unique_ptr<Heap> make_twin_heap(std::shared_ptr<twin::World> world, u64 window_bytes) {
  return std::make_unique<TwinHeap>(std::move(world), window_bytes);
}

}  // namespace crossdock::symm
