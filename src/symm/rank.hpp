// Rank: one local rank of a Group and everything a launch needs: its sight of all windows, its
// control block, its fault record, memory besides the window. Lives as long as its group. As
// RankDevice for threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/layout/fault.cuh>
#include <crossdock/layout/symmetric.cuh>

#include "symm/heap.hpp"
#include "symm/memory.hpp"
#include "symm/rank_device.hpp"

namespace crossdock::symm {

class Rank {
 public:
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  [[nodiscard]] u32 rank() const { return view_.rank; }
  [[nodiscard]] u32 world() const { return view_.world; }
  [[nodiscard]] const device::SymmetricView& view() const { return view_; }
  [[nodiscard]] u64 window_bytes() const { return window_bytes_; }
  // The place at `offset` of this rank's window, as kernels see it.
  template <class T>
  [[nodiscard]] T* at(u64 offset) const {
    return view_.at<T>(offset);
  }
  // The same of another rank's window. The host asks here: a view with a table reads memory of the
  // GPU.
  template <class T>
  [[nodiscard]] T* at(u64 offset, u32 peer) const {
    return reinterpret_cast<T*>(windows_[peer] + offset);
  }

  // Memory of this rank besides the window, zeroed. `allocate_state` is for what kernels keep
  // between launches (epochs, totals): it is zeroed again by each reset of the group.
  Result<LocalMemory> allocate(u64 bytes) { return device_->allocate(bytes); }
  Result<LocalMemory> allocate_state(u64 bytes);
  // Zeroed memory that the host reads and writes too.
  Result<HostMemory> allocate_host(u64 bytes) { return device_->allocate_host(bytes); }

  // Copies between memory of the host (or of any GPU) and memory of this rank, window or not; the
  // data has arrived when they return. They come after what was launched on the rank's own stream,
  // and after nothing else.
  Result<> write(void* target, const void* source, u64 bytes, Deadline deadline) {
    return device_->write(target, source, bytes, deadline);
  }
  Result<> read(void* target, const void* source, u64 bytes, Deadline deadline) const {
    return device_->read(target, source, bytes, deadline);
  }

  // What the parameters of every kernel begin with. `deadline`: the longest a single wait for a
  // peer may last.
  [[nodiscard]] device::LaunchCommon common(device::KernelId kernel,
                                            std::chrono::nanoseconds deadline) const;
  // The fault of this rank, if there is one: see fault.hpp. Never waits.
  [[nodiscard]] Result<> check() const;
  [[nodiscard]] const device::FaultRecord& fault() const {
    return *fault_.host<device::FaultRecord>();
  }
  // On the GPU this is an address for kernels only.
  [[nodiscard]] device::ControlBlock* control() const {
    return control_.as<device::ControlBlock>();
  }
  [[nodiscard]] RankDevice& device() const { return *device_; }

 private:
  friend class Group;
  friend class GroupBuilder;
  explicit Rank(std::unique_ptr<RankDevice> device) : device_(std::move(device)) {}
  // Control block and fault record, then (when the windows are mapped) the view.
  Result<> prepare(u32 rank, u32 world, u64 window_bytes);
  Result<> look_at(const Heap& heap, bool table, Deadline deadline);
  // Zeroes everything but the window.
  Result<> clear(Deadline deadline);

  struct State {
    void* address;
    u64 bytes;
    std::weak_ptr<const void> owner;
  };
  std::unique_ptr<RankDevice> device_;  // outlives what it made
  device::SymmetricView view_{};
  u64 window_bytes_ = 0;
  std::vector<u8*> windows_;  // of all ranks
  LocalMemory control_;
  LocalMemory table_;
  HostMemory fault_;
  std::vector<State> state_;
};

}  // namespace crossdock::symm
