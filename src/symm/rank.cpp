// A rank's own memory and its view. See rank.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/rank.hpp"

#include <algorithm>
#include <cstring>

#include "symm/fault.hpp"

namespace crossdock::symm {

Result<LocalMemory> Rank::allocate_state(u64 bytes) {
  CROSSDOCK_TRY(memory, device_->allocate(bytes));
  std::erase_if(state_, [](const State& state) { return state.owner.expired(); });
  state_.push_back({memory.address(), bytes, memory.owner()});
  return memory;
}

device::LaunchCommon Rank::common(device::KernelId kernel,
                                  std::chrono::nanoseconds deadline) const {
  const auto ns = std::max<std::chrono::nanoseconds::rep>(deadline.count(), 0);
  return {static_cast<u64>(ns), fault_.device<device::FaultRecord>(), control(), kernel,
          view_.rank};
}

Result<> Rank::check() const {
  return read_fault(fault());
}

Result<> Rank::prepare(u32 rank, u32 world, u64 window_bytes) {
  view_.rank = rank;
  view_.world = world;
  window_bytes_ = window_bytes;
  CROSSDOCK_TRY(control, device_->allocate(sizeof(device::ControlBlock)));
  control_ = std::move(control);
  CROSSDOCK_TRY(fault, device_->allocate_host(sizeof(device::FaultRecord)));
  fault_ = std::move(fault);
  return {};
}

Result<> Rank::look_at(const Heap& heap, bool table, Deadline deadline) {
  view_.base = heap.window(view_.rank);
  view_.stride = heap.stride();
  for (u32 peer = 0; peer < view_.world; ++peer)
    windows_.push_back(heap.window(peer));
  if (!table) return {};
  std::vector<i64> offsets;
  for (const u8* window : windows_)
    offsets.push_back(
        static_cast<i64>(reinterpret_cast<u64>(window) - reinterpret_cast<u64>(view_.base)));
  const u64 bytes = offsets.size() * sizeof(i64);
  CROSSDOCK_TRY(memory, device_->allocate(bytes));
  table_ = std::move(memory);
  CROSSDOCK_CHECK_OK(device_->write(table_.address(), offsets.data(), bytes, deadline));
  view_.offsets = table_.as<const i64>();
  return {};
}

Result<> Rank::clear(Deadline deadline) {
  std::erase_if(state_, [](const State& state) { return state.owner.expired(); });
  for (const State& state : state_)
    CROSSDOCK_CHECK_OK(device_->zero(state.address, state.bytes, deadline));
  CROSSDOCK_CHECK_OK(device_->zero(control_.address(), control_.bytes(), deadline));
  std::memset(fault_.host<void>(), 0, sizeof(device::FaultRecord));
  return {};
}

}  // namespace crossdock::symm
