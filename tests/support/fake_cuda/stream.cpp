// The fake's streams, events, modules, launches and graphs. Work runs when it is submitted.
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

Status finished() {
  return state().held ? Status::kNotReady : Status::kSuccess;
}

void run(const GraphState& graph) {
  for (const auto& work : graph.work)
    work();
}

}  // namespace

// Null is the legacy default stream of the current context; it is never captured.
Status submit(StreamHandle stream, std::function<void()> work) {
  if (current_device() < 0) return Status::kInvalidContext;
  StreamState* const own = find(state().streams, stream);
  if (stream && !own) return Status::kInvalidHandle;
  if (own && own->capturing) {
    own->recorded.push_back(std::move(work));
  } else {
    work();
  }
  return Status::kSuccess;
}

Status cuStreamCreateWithPriority(StreamHandle* stream, unsigned, int) {
  if (current_device() < 0) return Status::kInvalidContext;
  *stream = new_handle<StreamHandle>();
  state().streams[*stream].device = current_device();
  return Status::kSuccess;
}

Status cuStreamDestroy(StreamHandle stream) {
  return state().streams.erase(stream) ? Status::kSuccess : Status::kInvalidHandle;
}

Status cuStreamQuery(StreamHandle stream) {
  const auto* const own = find(state().streams, stream);
  if (stream && !own) return Status::kInvalidHandle;
  if (own && own->capturing) return Status::kStreamCaptureUnsupported;
  return finished();
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

Status cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned) {
  if (!find(state().events, event)) return Status::kInvalidHandle;
  return submit(stream, [] {});
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

Status cuStreamBeginCapture(StreamHandle stream, CaptureMode) {
  auto* const own = find(state().streams, stream);
  if (!own || own->capturing) return Status::kStreamCaptureUnsupported;
  own->capturing = true;
  own->recorded.clear();
  return Status::kSuccess;
}

Status cuStreamEndCapture(StreamHandle stream, GraphHandle* graph) {
  auto* const own = find(state().streams, stream);
  if (!own || !own->capturing) return Status::kInvalidValue;
  own->capturing = false;
  *graph = new_handle<GraphHandle>();
  state().graphs[*graph].work = std::exchange(own->recorded, {});
  return Status::kSuccess;
}

Status cuStreamWriteValue32(StreamHandle stream, DevicePtr address, std::uint32_t value, unsigned) {
  return submit(stream,
                [=] { std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value); });
}

Status cuStreamWriteValue64(StreamHandle stream, DevicePtr address, std::uint64_t value, unsigned) {
  return submit(stream,
                [=] { std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value); });
}

// Waits would block the calling thread here: only a word that is there already is accepted.
Status cuStreamWaitValue32(StreamHandle, DevicePtr address, std::uint32_t value, unsigned) {
  std::uint32_t now = 0;
  std::memcpy(&now, reinterpret_cast<void*>(address), sizeof now);
  return now >= value ? Status::kSuccess : Status::kNotSupported;
}

Status cuStreamWaitValue64(StreamHandle, DevicePtr address, std::uint64_t value, unsigned) {
  std::uint64_t now = 0;
  std::memcpy(&now, reinterpret_cast<void*>(address), sizeof now);
  return now >= value ? Status::kSuccess : Status::kNotSupported;
}

// In order; when captured, all of it runs at the replay.
Status cuStreamBatchMemOp(StreamHandle stream, unsigned count, BatchMemOp* operations, unsigned) {
  if (count > kMostBatchMemOps) return Status::kInvalidValue;
  const auto* const own = find(state().streams, stream);
  const bool capturing = own && own->capturing;
  for (unsigned i = 0; i < count; ++i) {
    const BatchMemOpWord op = operations[i].word;
    if (op.operation == BatchMemOpType::kWriteValue64) {
      const Status status = cuStreamWriteValue64(stream, op.address, op.value, 0);
      if (status != Status::kSuccess) return status;
      continue;
    }
    std::uint64_t now = 0;
    std::memcpy(&now, reinterpret_cast<void*>(op.address), sizeof now);
    if (!capturing && now != op.value) return Status::kNotSupported;
  }
  return Status::kSuccess;
}

Status cuLaunchHostFunc(StreamHandle stream, HostFunction function, void* user_data) {
  return submit(stream, [=] { function(user_data); });
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
  own->recorded = true;
  return submit(stream, [] {});
}

Status cuEventQuery(EventHandle event) {
  const auto* const own = find(state().events, event);
  if (!own) return Status::kInvalidHandle;
  return own->recorded ? finished() : Status::kSuccess;
}

Status cuEventSynchronize(EventHandle event) {
  return cuEventQuery(event);
}

Status cuEventElapsedTime(float* milliseconds, EventHandle start, EventHandle end) {
  const auto* const a = find(state().events, start);
  const auto* const b = find(state().events, end);
  if (!a || !b || !a->timing || !b->timing || !a->recorded || !b->recorded)
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
  if (stream && stream->capturing) return submit(config->stream, [] {});
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
  return submit(stream, [work = *own] { run(work); });
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
