// Windows in the heaps of a twin World: all ranks are in this process, and the World's own stride
// is the stride. The twin then knows whose memory an address is without a search. Members of an
// elastic group in one process share a World, so their windows need no way from one to the other.
// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <mutex>
#include <set>

#include "base/check.hpp"
#include "symm/heap.hpp"
#include "twin/launch.hpp"

namespace crossdock::symm {
namespace {

class TwinHeap;

// Seats are taken and vacated by members on threads of their own.
struct Shared {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<twin::World>> worlds;  // by group
  std::set<TwinHeap*> heaps;                                 // all there are
};
// Never destroyed: groups may end later than static objects.
Shared& shared() {
  static auto& all = *new Shared;
  return all;
}

class TwinHeap final : public Heap {
 public:
  TwinHeap(std::shared_ptr<twin::World> world, u64 window_bytes)
      : world_(std::move(world)), window_bytes_(window_bytes) {
    const std::scoped_lock lock(shared().mutex);
    shared().heaps.insert(this);
  }
  ~TwinHeap() override {
    const std::scoped_lock lock(shared().mutex);
    shared().heaps.erase(this);
  }

  // What is left of a member that had the seat before goes.
  Result<> allocate(u32 rank) override {
    const std::scoped_lock lock(shared().mutex);
    world_->reset(static_cast<int>(rank));
    tell_others(rank, Seat::kTaken);
    return place(rank);
  }
  u64 allocated_bytes() const override { return window_bytes_; }
  Result<WindowHandle> share(u32) override {
    return make_error(Code::kUnsupported, "windows of the twin stay in their process");
  }
  Result<> reserve(u64) override { return {}; }
  Result<> map(u32, const WindowHandle*) override { return {}; }
  Result<> unmap(u32) override { return {}; }
  // Who had the seat has left a window, or nobody ever had it. What it had launched and nobody
  // waited for does not run: its words are those of an epoch that is over.
  Result<> vacate(u32 rank) override {
    const std::scoped_lock lock(shared().mutex);
    world_->drop_launches(static_cast<int>(rank));
    tell_others(rank, Seat::kLost);
    const u8* const window = world_->heap(static_cast<int>(rank));
    return world_->owns(static_cast<int>(rank), window) ? Result<>() : place(rank);
  }
  Seat seat(u32 rank) const override {
    const std::scoped_lock lock(shared().mutex);
    const auto lost = lost_.find(rank);
    return lost == lost_.end() ? Seat::kHeld : lost->second;
  }
  void hold(u32 rank) override {
    const std::scoped_lock lock(shared().mutex);
    lost_.erase(rank);
  }
  u8* window(u32 rank) const override { return world_->heap(static_cast<int>(rank)); }
  i64 stride() const override { return static_cast<i64>(world_->heap_bytes()); }
  Result<> clear(u32 rank, RankDevice& device, Deadline deadline) override {
    return device.zero(window(rank), window_bytes_, deadline);
  }

 private:
  Result<> place(u32 rank) {
    CROSSDOCK_TRY(window, world_->allocate(static_cast<int>(rank), window_bytes_));
    CROSSDOCK_CHECK(window == world_->heap(static_cast<int>(rank)), "a window begins its heap");
    return {};
  }
  // The member that had the seat, if it is still there. A seat that was taken is lost for good:
  // what its rank had allocated is gone.
  void tell_others(u32 rank, Seat seat) {
    for (TwinHeap* const heap : shared().heaps)
      if (heap != this && heap->world_ == world_ && heap->lost_[rank] != Seat::kTaken)
        heap->lost_[rank] = seat;
  }
  std::shared_ptr<twin::World> world_;
  u64 window_bytes_;
  std::map<u32, Seat> lost_;  // guarded by Shared's mutex
};

}  // namespace

Result<std::shared_ptr<twin::World>> share_world(
    const std::string& group,
    const std::function<Result<std::shared_ptr<twin::World>>()>& make_world) {
  const std::scoped_lock lock(shared().mutex);
  std::erase_if(shared().worlds, [](const auto& entry) { return entry.second.expired(); });
  if (const auto found = shared().worlds.find(group); found != shared().worlds.end())
    if (auto world = found->second.lock()) return world;
  CROSSDOCK_TRY(made, make_world());
  shared().worlds[group] = made;
  return made;
}

std::unique_ptr<Heap> make_twin_heap(std::shared_ptr<twin::World> world, u64 window_bytes) {
  return std::make_unique<TwinHeap>(std::move(world), window_bytes);
}

}  // namespace crossdock::symm
