// The fake's streams, events, modules, launches and graphs. Work of a stream runs in its order, on
// whichever thread calls the driver once it can: at once, unless work is held or the stream waits
// for a word or an event. The bodies of kernels alone run at the launch, whatever is before them.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include "support/fake_cuda/state.hpp"

namespace crossdock::testing::fake {
namespace {

template <class Map, class Key>
auto* find(Map& map, const Key& key) {
  const auto found = map.find(key);
  return found == map.end() ? nullptr : &found->second;
}

Status finished(bool done = true) {
  return state().held || !done ? Status::kNotReady : Status::kSuccess;
}

std::uint64_t word_at(DevicePtr address) {
  return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(address), __ATOMIC_ACQUIRE);
}
void write_word(DevicePtr address, std::uint64_t value) {
  __atomic_store_n(reinterpret_cast<std::uint64_t*>(address), value, __ATOMIC_RELEASE);
}

bool can_run(const Work& work) {
  return !work.ready || work.ready();
}

// The next step of a stream, if it may run.
bool step(StreamState& stream) {
  if (stream.queue.empty() || !can_run(stream.queue.front())) return false;
  const Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  work.run();
  return true;
}

}  // namespace

void advance() {
  State& s = state();
  if (s.held || std::exchange(s.advancing, true)) return;
  for (bool any = true; any;) {
    any = false;
    for (auto& [handle, stream] : s.streams)
      while (step(stream))
        any = true;
    for (StreamState& stream : s.destroyed)
      while (step(stream))
        any = true;
    s.destroyed.remove_if([](const StreamState& stream) { return stream.queue.empty(); });
  }
  s.advancing = false;
}

// Null is the legacy default stream of the current context; it is never captured, and has no queue.
Status submit(StreamHandle stream, Work work) {
  if (current_device() < 0) return Status::kInvalidContext;
  StreamState* const own = find(state().streams, stream);
  if (stream && !own) return Status::kInvalidHandle;
  if (!own) {
    if (!can_run(work)) return Status::kNotSupported;
    work.run();
  } else if (own->capturing) {
    find(state().streams, own->origin)->recorded.push_back(std::move(work));
    ++own->before[stream];
  } else {
    own->queue.push_back(std::move(work));
  }
  advance();
  return Status::kSuccess;
}

Status cuStreamCreateWithPriority(StreamHandle* stream, unsigned, int) {
  if (current_device() < 0) return Status::kInvalidContext;
  *stream = new_handle<StreamHandle>();
  state().streams[*stream].device = current_device();
  return Status::kSuccess;
}

Status cuStreamDestroy(StreamHandle stream) {
  auto* const own = find(state().streams, stream);
  if (!own) return Status::kInvalidHandle;
  if (!own->queue.empty()) state().destroyed.push_back(std::move(*own));
  state().streams.erase(stream);
  return Status::kSuccess;
}

Status cuStreamQuery(StreamHandle stream) {
  const auto* const own = find(state().streams, stream);
  if (stream && !own) return Status::kInvalidHandle;
  if (own && own->capturing) return Status::kStreamCaptureUnsupported;
  advance();
  return finished(!own || own->queue.empty());
}

Status cuStreamSynchronize(StreamHandle stream) {
  return cuStreamQuery(stream);
}

Status cuStreamGetCtx(StreamHandle stream, ContextHandle* context) {
  const auto* const own = find(state().streams, stream);
  if (!own) return Status::kInvalidHandle;
  *context = context_of(own->device);
  return Status::kSuccess;
}

namespace {

void come_after(StreamState& stream, const EventState& event) {
  for (const auto& [handle, count] : event.before)
    stream.before[handle] = std::max(stream.before[handle], count);
}

// A stream that waits for an event of a capture becomes part of that capture.
Status join(StreamState& stream, const EventState& event) {
  for (const auto& [handle, other] : state().streams) {
    if (!other.capturing || other.capture != *event.capture) continue;
    stream.capturing = true;
    stream.capture = *event.capture;
    stream.origin = other.origin;
    stream.before = event.before;
    return Status::kSuccess;
  }
  return Status::kCapturedEvent;
}

// A capture cannot wait for what is outside it, and is lost when it tries.
Status wait_in_capture(StreamState& stream, const EventState& event) {
  if (event.capture == stream.capture) come_after(stream, event);
  if (event.capture == stream.capture || (!event.capture && event.recorded == 0))
    return Status::kSuccess;
  find(state().streams, stream.origin)->invalidated = true;
  return Status::kStreamCaptureIsolation;
}

// Whether the capture's first stream comes after all work of the others.
bool is_joined(const StreamState& origin) {
  return std::ranges::all_of(state().streams, [&](const auto& entry) {
    const auto& [handle, stream] = entry;
    if (!stream.capturing || stream.capture != origin.capture) return true;
    const auto own = stream.before.find(handle), reached = origin.before.find(handle);
    const std::size_t work = own == stream.before.end() ? 0 : own->second;
    return work == 0 || (reached != origin.before.end() && reached->second == work);
  });
}

}  // namespace

Status cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned) {
  const auto* const own = find(state().events, event);
  if (!own) return Status::kInvalidHandle;
  auto* const on = find(state().streams, stream);
  if (on && on->capturing) return wait_in_capture(*on, *own);
  if (own->capture) return on ? join(*on, *own) : Status::kCapturedEvent;
  return submit(stream, {[] {},
                         [event, record = own->recorded] {
                           const auto* const now = find(state().events, event);
                           return !now || now->reached >= record;
                         }});
}

Status cuStreamIsCapturing(StreamHandle stream, CaptureStatus* status) {
  const auto* const own = find(state().streams, stream);
  if (stream && !own) return Status::kInvalidHandle;
  if (!own) {
    for (const auto& [handle, other] : state().streams)
      if (other.capturing) return Status::kStreamCaptureImplicit;
  }
  *status = own && own->capturing ? CaptureStatus::kActive : CaptureStatus::kNone;
  return Status::kSuccess;
}

Status cuStreamGetCaptureInfo(StreamHandle stream, CaptureStatus* status, std::uint64_t* id) {
  const Status asked = cuStreamIsCapturing(stream, status);
  if (asked == Status::kSuccess && *status == CaptureStatus::kActive)
    *id = find(state().streams, stream)->capture;
  return asked;
}

Status cuStreamBeginCapture(StreamHandle stream, CaptureMode) {
  static std::uint64_t captures = 0;
  auto* const own = find(state().streams, stream);
  if (!own || own->capturing) return Status::kStreamCaptureUnsupported;
  own->capturing = true;
  own->capture = captures++;
  own->origin = stream;
  own->invalidated = false;
  own->recorded.clear();
  own->before.clear();
  return Status::kSuccess;
}

Status cuStreamEndCapture(StreamHandle stream, GraphHandle* graph) {
  auto* const own = find(state().streams, stream);
  if (!own || !own->capturing || own->origin != stream) return Status::kInvalidValue;
  const bool joined = is_joined(*own);
  for (auto& [handle, other] : state().streams)
    if (other.capturing && other.capture == own->capture) other.capturing = false;
  if (own->invalidated) {
    *graph = nullptr;
    return Status::kStreamCaptureInvalidated;
  }
  if (!joined) {
    *graph = nullptr;
    return kStreamCaptureUnjoined;
  }
  *graph = new_handle<GraphHandle>();
  state().graphs[*graph].work = std::exchange(own->recorded, {});
  return Status::kSuccess;
}

Status cuStreamWriteValue32(StreamHandle stream, DevicePtr address, std::uint32_t value, unsigned) {
  return submit(stream,
                {[=] { std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value); }});
}

Status cuStreamWriteValue64(StreamHandle stream, DevicePtr address, std::uint64_t value, unsigned) {
  return submit(stream, {[=] { write_word(address, value); }});
}

Status cuStreamWaitValue32(StreamHandle stream, DevicePtr address, std::uint32_t value, unsigned) {
  return submit(stream, {[] {},
                         [=] {
                           std::uint32_t now = 0;
                           std::memcpy(&now, reinterpret_cast<void*>(address), sizeof now);
                           return now >= value;
                         }});
}

Status cuStreamWaitValue64(StreamHandle stream, DevicePtr address, std::uint64_t value, unsigned) {
  return submit(stream, {[] {}, [=] { return word_at(address) >= value; }});
}

Status cuStreamBatchMemOp(StreamHandle stream, unsigned count, BatchMemOp* operations, unsigned) {
  if (count > kMostBatchMemOps) return Status::kInvalidValue;
  for (unsigned i = 0; i < count; ++i) {
    const BatchMemOpWord op = operations[i].word;
    const Status status =
        op.operation == BatchMemOpType::kWriteValue64
            ? cuStreamWriteValue64(stream, op.address, op.value, 0)
            : submit(stream, {[] {}, [op] { return word_at(op.address) == op.value; }});
    if (status != Status::kSuccess) return status;
  }
  return Status::kSuccess;
}

Status cuLaunchHostFunc(StreamHandle stream, HostFunction function, void* user_data) {
  return submit(stream, {[=] { function(user_data); }});
}

Status cuEventCreate(EventHandle* event, unsigned flags) {
  if (current_device() < 0) return Status::kInvalidContext;
  *event = new_handle<EventHandle>();
  state().events[*event].timing = (flags & kEventDisableTiming) == 0;
  return Status::kSuccess;
}

Status cuEventDestroy(EventHandle event) {
  return state().events.erase(event) ? Status::kSuccess : Status::kInvalidHandle;
}

Status cuEventRecord(EventHandle event, StreamHandle stream) {
  auto* const own = find(state().events, event);
  if (!own) return Status::kInvalidHandle;
  const auto* const on = find(state().streams, stream);
  if (on && on->capturing) {
    own->capture = on->capture;
    own->before = on->before;
    return Status::kSuccess;
  }
  own->capture.reset();
  own->recorded = ++state().records;
  return submit(stream, {[event, record = own->recorded] {
                  if (auto* const now = find(state().events, event)) now->reached = record;
                }});
}

Status cuEventQuery(EventHandle event) {
  const auto* const own = find(state().events, event);
  if (!own) return Status::kInvalidHandle;
  advance();
  return own->recorded != 0 ? finished(own->reached >= own->recorded) : Status::kSuccess;
}

Status cuEventSynchronize(EventHandle event) {
  return cuEventQuery(event);
}

Status cuEventElapsedTime(float* milliseconds, EventHandle start, EventHandle end) {
  const auto* const a = find(state().events, start);
  const auto* const b = find(state().events, end);
  if (!a || !b || !a->timing || !b->timing || a->recorded == 0 || b->recorded == 0)
    return Status::kInvalidHandle;
  *milliseconds = 0.5F;
  return finished();
}

Status cuModuleLoadData(ModuleHandle* module, const void* image) {
  if (current_device() < 0) return Status::kInvalidContext;
  if (std::memcmp(image, "\177ELF", 4) != 0) return Status::kInvalidImage;
  *module = new_handle<ModuleHandle>();
  state().modules.insert(*module);
  return Status::kSuccess;
}

Status cuModuleUnload(ModuleHandle module) {
  return state().modules.erase(module) ? Status::kSuccess : Status::kInvalidHandle;
}

Status cuModuleGetFunction(FunctionHandle* function, ModuleHandle module, const char* name) {
  if (state().modules.count(module) == 0) return Status::kInvalidHandle;
  if (std::strncmp(name, "missing", 7) == 0) return Status::kNotFound;
  *function = new_handle<FunctionHandle>();
  state().functions[*function] = name;
  return Status::kSuccess;
}

Status cuModuleGetGlobal(DevicePtr*, std::size_t*, ModuleHandle module, const char*) {
  return state().modules.count(module) ? Status::kNotFound : Status::kInvalidHandle;
}

Status cuFuncGetAttribute(int* value, FunctionAttribute attribute, FunctionHandle function) {
  if (!find(state().functions, function)) return Status::kInvalidHandle;
  switch (attribute) {
    case FunctionAttribute::kNumRegs:
      *value = 32;
      break;
    case FunctionAttribute::kMaxThreadsPerBlock:
      *value = 1024;
      break;
    case FunctionAttribute::kBinaryVersion:
      *value = 90;
      break;
    default:
      *value = 0;
      break;
  }
  return Status::kSuccess;
}

Status cuFuncSetAttribute(FunctionHandle function, FunctionAttribute, int) {
  return find(state().functions, function) ? Status::kSuccess : Status::kInvalidHandle;
}

Status cuLaunchKernelEx(const LaunchConfig* config, FunctionHandle function, void** parameters,
                        void**) {
  if (current_device() < 0) return Status::kInvalidContext;
  const auto* const name = find(state().functions, function);
  if (!name) return Status::kInvalidHandle;
  const unsigned threads = config->block_x * config->block_y * config->block_z;
  if (config->grid_x == 0 || threads == 0 || threads > 1024) return Status::kInvalidValue;
  FakeLaunch launch{.kernel = *name, .config = *config};
  launch.config.attributes = nullptr;  // dead when the call returns
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == LaunchAttributeId::kCooperative)
      launch.cooperative = attribute.value.cooperative != 0;
    if (attribute.id == LaunchAttributeId::kClusterDimension)
      launch.cluster_x = attribute.value.cluster_dim.x;
    if (attribute.id == LaunchAttributeId::kProgrammaticStreamSerialization)
      launch.programmatic = attribute.value.programmatic_stream_serialization != 0;
  }
  state().last_launch = launch;
  const auto* const stream = find(state().streams, config->stream);
  if (config->stream && !stream) return Status::kInvalidHandle;
  // The sizes of the parameters are not known here, so a captured launch cannot be replayed.
  if (stream && stream->capturing) return submit(config->stream, {[] {}});
  if (const auto* const body = find(state().kernels, *name)) (*body)(*config, parameters);
  return Status::kSuccess;
}

Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, FunctionHandle function, int size,
                                                   std::size_t shared_bytes) {
  if (!find(state().functions, function)) return Status::kInvalidHandle;
  constexpr std::size_t kSharedOfAnSm = 228 << 10, kReserved = 1 << 10;
  const std::size_t by_memory = kSharedOfAnSm / (shared_bytes + kReserved);
  *blocks = static_cast<int>(std::min<std::size_t>(2048 / (size < 1 ? 1 : size), by_memory));
  return Status::kSuccess;
}

Status cuOccupancyMaxActiveClusters(int* clusters, FunctionHandle, const LaunchConfig*) {
  *clusters = 66;
  return Status::kSuccess;
}

Status cuGraphInstantiateWithFlags(GraphExecHandle* exec, GraphHandle graph, unsigned long long) {
  const auto* const own = find(state().graphs, graph);
  if (!own) return Status::kInvalidHandle;
  *exec = new_handle<GraphExecHandle>();
  state().execs[*exec] = *own;
  return Status::kSuccess;
}

Status cuGraphUpload(GraphExecHandle exec, StreamHandle) {
  return find(state().execs, exec) ? Status::kSuccess : Status::kInvalidHandle;
}

Status cuGraphLaunch(GraphExecHandle exec, StreamHandle stream) {
  const auto* const own = find(state().execs, exec);
  if (!own) return Status::kInvalidHandle;
  for (const Work& work : own->work)
    if (const Status status = submit(stream, work); status != Status::kSuccess) return status;
  return Status::kSuccess;
}

Status cuGraphDestroy(GraphHandle graph) {
  return state().graphs.erase(graph) ? Status::kSuccess : Status::kInvalidHandle;
}

Status cuGraphExecDestroy(GraphExecHandle exec) {
  return state().execs.erase(exec) ? Status::kSuccess : Status::kInvalidHandle;
}

Status cuTensorMapEncodeTiled(TensorMap* map, int, std::uint32_t rank, void*, const std::uint64_t*,
                              const std::uint64_t*, const std::uint32_t*, const std::uint32_t*, int,
                              int, int, int) {
  if (current_device() < 0) return Status::kInvalidContext;
  if (rank == 0 || rank > 5) return Status::kInvalidValue;
  std::memset(map, 0, sizeof *map);
  return Status::kSuccess;
}

}  // namespace crossdock::testing::fake
