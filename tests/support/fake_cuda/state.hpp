// The fake driver's state, shared by its files. Every entry point holds state().mutex.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "support/fake_cuda/fake_cuda.hpp"

namespace crossdock::testing::fake {

using namespace crossdock::cuda;  // NOLINT: the driver's types by their own names

// The library has no name for it: what it makes of a capture that cannot end does not depend on
// why.
inline constexpr Status kStreamCaptureUnjoined{904};

struct DeviceState {
  std::size_t total_bytes = std::size_t{1} << 30;
  std::size_t used_bytes = 0;
  int retained = 0;  // of the primary context
};
// One step of a stream. `ready` false: it waits, and with it all that comes later; empty: it never
// does.
struct Work {
  std::function<void()> run;
  std::function<bool()> ready = {};
};
// Of each stream of a capture, how much of its work comes before some point.
using Progress = std::map<StreamHandle, std::size_t>;
struct StreamState {
  int device = 0;
  bool capturing = false;
  std::uint64_t capture = 0;    // its number
  StreamHandle origin = {};     // the stream that the capture began on, which has all its work
  bool invalidated = false;     // of the origin: its capture cannot end well any more
  std::vector<Work> recorded;   // of the origin
  Progress before = {};         // what its next work in the capture comes after
  std::deque<Work> queue = {};  // what has not run yet
};
struct EventState {
  std::uint64_t recorded = 0;  // number of its last record; 0: none
  std::uint64_t reached = 0;   // of the last record that its stream has come to
  bool timing = false;
  std::optional<std::uint64_t> capture = {};  // in which it was recorded last; none: in no capture
  Progress before = {};                       // in that capture, what it comes after
};
struct BlockState {
  std::size_t bytes = 0;
  int device = 0;
};
struct AllocationState {
  int fd = -1;
  std::size_t bytes = 0;
  int device = 0;
  HandleType sharing = HandleType::kNone;
  int references = 1;  // the handle's and one per mapping
  bool handle_alive = true;
  bool imported = false;
};
struct Mapping {
  std::size_t bytes;
  AllocationHandle allocation;
};
struct GraphState {
  std::vector<Work> work;
};

struct State {
  mutable std::recursive_mutex mutex;
  // configuration
  int version = 13000;
  int device_count = 4;
  std::map<int, int> attributes;
  std::set<std::pair<int, int>> no_peer;
  std::set<std::pair<int, int>> no_atomics;
  std::set<std::string> hidden;
  std::vector<FakeFailure> failures;
  std::map<std::string, FakeKernel> kernels;
  bool held = false;
  // what happened
  std::map<std::string, int> calls;
  FakeLaunch last_launch;
  // objects
  DeviceState devices[16];
  std::map<StreamHandle, StreamState> streams;
  std::list<StreamState> destroyed;  // whose work is still to be done
  std::map<EventHandle, EventState> events;
  std::map<DevicePtr, std::pair<std::size_t, int>> blocks;
  std::map<DevicePtr, BlockState> pinned;
  std::set<DevicePtr> managed;  // blocks that are as if cuMemAllocManaged had made them
  std::set<std::pair<int, DevicePtr>> unmapped;  // known memory that kernels of a GPU cannot reach
  std::set<void*> registered;
  std::map<AllocationHandle, AllocationState> allocations;
  std::map<DevicePtr, std::size_t> ranges;
  std::map<DevicePtr, Mapping> mappings;
  std::set<ModuleHandle> modules;
  std::map<FunctionHandle, std::string> functions;
  std::map<GraphHandle, GraphState> graphs;
  std::map<GraphExecHandle, GraphState> execs;
  std::set<std::pair<int, int>> peers_enabled;
  std::uintptr_t next_id = 0x1000;
  std::uint64_t records = 0;  // of events
  bool advancing = false;
};

State& state();
// The device of the calling thread's current context; -1 without one.
int current_device();
ContextHandle context_of(int device);
int device_of(ContextHandle context);
// A fresh handle value that no object has.
template <class Handle>
Handle new_handle() {
  return reinterpret_cast<Handle>(state().next_id += 16);
}
// Runs the work as soon as it is its turn, which may be now, or records it when the stream is being
// captured.
Status submit(StreamHandle stream, Work work);
// Runs all that can run.
void advance();

#define CROSSDOCK_CUDA_FUNCTION(name, version, need, parameters) Status name parameters;
#include "cuda/driver_table.def"
#undef CROSSDOCK_CUDA_FUNCTION

}  // namespace crossdock::testing::fake
