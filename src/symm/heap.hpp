// Heap: the windows of all ranks as this process sees them. Window r lies at `window(0) + r *
// stride()`, or anywhere when the stride is 0:
//
//     one reserved range of addresses
//     | window 0 | pad | window 1 | pad | window 2 | pad | ...      <- stride ->
//       a peer's         this rank's      a peer's
//
// It is built in steps, so that processes can tell each other the outcome of each: allocate() for
// every local rank, share() for every local rank when there are other processes, reserve(), map()
// for every rank.
// Local and bounded: no step waits for a peer, and destruction frees only what is this process's
// own. Peers that still write into a window keep its memory alive by themselves. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <crossdock/core/result.hpp>

#include "base/fd.hpp"
#include "symm/memory.hpp"
#include "symm/rank_device.hpp"

namespace crossdock::symm {

// What another process needs to map a window: a descriptor, or the bytes of a fabric handle.
struct WindowHandle {
  base::UniqueFd fd = {};
  std::string fabric = {};
  u64 bytes = 0;  // of the allocation behind it
};

class Heap {
 public:
  virtual ~Heap() = default;
  // Memory for the window of a local rank; again after unmap(): other memory.
  virtual Result<> allocate(u32 rank) = 0;
  // What the memory of one window takes; the same for all ranks of this process.
  [[nodiscard]] virtual u64 allocated_bytes() const = 0;
  virtual Result<WindowHandle> share(u32 rank) = 0;
  // Addresses for all windows; `stride`: the most that any rank has allocated.
  virtual Result<> reserve(u64 stride) = 0;
  // `handle` null: a local rank.
  virtual Result<> map(u32 rank, const WindowHandle* handle) = 0;
  // The window is not looked at any more; its addresses stay reserved. The memory of a local rank
  // goes when no other process maps it either.
  virtual Result<> unmap(u32 rank) = 0;
  // Memory of no meaning where the window of a vacant rank would be, so that a stray access harms
  // nobody. Takes little memory, however large windows are.
  virtual Result<> vacate(u32 rank) = 0;
  // Members of one process have one memory in the twin, so one that was left out is told here that
  // its rank has lost its seat. Elsewhere nobody can know, and nobody needs to.
  enum class Seat : u8 { kHeld, kLost, kTaken };
  [[nodiscard]] virtual Seat seat(u32) const { return Seat::kHeld; }
  // A local rank that had lost its seat has it again. Precondition: nobody has taken it since.
  virtual void hold(u32) {}
  // Where the window of `rank` is mapped; null before.
  [[nodiscard]] virtual u8* window(u32 rank) const = 0;
  [[nodiscard]] virtual i64 stride() const = 0;
  // Zeroes the window of a local rank.
  virtual Result<> clear(u32 rank, RankDevice& device, Deadline deadline) = 0;
};

struct HeapOptions {
  u32 world = 1;
  u64 window_bytes = 0;
  bool at_stride = true;
};

// The windows are the first allocation of the heaps of `world`.
std::unique_ptr<Heap> make_twin_heap(std::shared_ptr<twin::World> world, u64 window_bytes);
// The World that the members of one elastic group share when all are in this process; who comes
// first makes it, and it goes with the last. Thread-safe.
Result<std::shared_ptr<twin::World>> share_world(
    const std::string& group,
    const std::function<Result<std::shared_ptr<twin::World>>()>& make_world);
// Host memory that other processes map (memfd).
std::unique_ptr<Heap> make_shared_heap(const HeapOptions& options);

}  // namespace crossdock::symm
