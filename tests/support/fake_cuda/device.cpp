// The fake's devices, contexts, errors and peers.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstring>

#include "support/fake_cuda/state.hpp"

namespace crossdock::testing::fake {
namespace {

thread_local std::vector<ContextHandle> context_stack;

bool valid(int device) {
  return device >= 0 && device < state().device_count;
}

char context_tags[16];  // their addresses are the context handles

}  // namespace

ContextHandle context_of(int device) {
  return reinterpret_cast<ContextHandle>(&context_tags[device]);
}

int device_of(ContextHandle context) {
  const auto* const tag = reinterpret_cast<const char*>(context);
  if (tag < context_tags || tag >= context_tags + sizeof context_tags) return -1;
  const int device = static_cast<int>(tag - context_tags);
  return state().devices[device].retained > 0 ? device : -1;
}

int current_device() {
  return context_stack.empty() ? -1 : device_of(context_stack.back());
}

Status cuInit(unsigned) {
  return state().device_count > 0 ? Status::kSuccess : Status::kNoDevice;
}

Status cuDriverGetVersion(int* version) {
  *version = state().version;
  return Status::kSuccess;
}

Status cuGetErrorName(Status status, const char** name) {
  if (status == kStreamCaptureUnjoined) {
    *name = "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
    return Status::kSuccess;
  }
  switch (status) {
    case Status::kOutOfMemory:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case Status::kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      break;
    case Status::kIllegalAddress:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      break;
    case Status::kNoDevice:
      *name = "CUDA_ERROR_NO_DEVICE";
      break;
    case Status::kSystemNotReady:
      *name = "CUDA_ERROR_SYSTEM_NOT_READY";
      break;
    case Status::kInvalidImage:
      *name = "CUDA_ERROR_INVALID_IMAGE";
      break;
    default:
      *name = nullptr;
      return Status::kInvalidValue;
  }
  return Status::kSuccess;
}

Status cuGetErrorString(Status status, const char** text) {
  switch (status) {
    case Status::kOutOfMemory:
      *text = "out of memory";
      break;
    case Status::kInvalidValue:
      *text = "invalid argument";
      break;
    case Status::kIllegalAddress:
      *text = "an illegal memory access was encountered";
      break;
    case Status::kNoDevice:
      *text = "no CUDA-capable device is detected";
      break;
    case Status::kSystemNotReady:
      *text = "system not yet initialized";
      break;
    case Status::kInvalidImage:
      *text = "device kernel image is invalid";
      break;
    default:
      *text = nullptr;
      return Status::kInvalidValue;
  }
  return Status::kSuccess;
}

Status cuDeviceGetCount(int* count) {
  *count = state().device_count;
  return Status::kSuccess;
}

Status cuDeviceGet(DeviceOrdinal* device, int ordinal) {
  if (!valid(ordinal)) return Status::kInvalidDevice;
  *device = ordinal;
  return Status::kSuccess;
}

Status cuDeviceGetName(char* name, int length, DeviceOrdinal device) {
  if (!valid(device)) return Status::kInvalidDevice;
  std::snprintf(name, static_cast<std::size_t>(length), "Fake GPU");
  return Status::kSuccess;
}

Status cuDeviceGetAttribute(int* value, DeviceAttribute attribute, DeviceOrdinal device) {
  if (!valid(device)) return Status::kInvalidDevice;
  const auto set = state().attributes.find(static_cast<int>(attribute));
  if (set != state().attributes.end()) {
    *value = set->second;
    return Status::kSuccess;
  }
  switch (attribute) {
    case DeviceAttribute::kMultiprocessorCount:
      *value = 132;
      break;
    case DeviceAttribute::kComputeCapabilityMajor:
      *value = 9;
      break;
    case DeviceAttribute::kMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case DeviceAttribute::kClockRateKhz:
      *value = 1980000;
      break;
    case DeviceAttribute::kL2CacheBytes:
      *value = 50 << 20;
      break;
    case DeviceAttribute::kHostNumaId:
      *value = device / 2;
      break;
    case DeviceAttribute::kComputeCapabilityMinor:
    case DeviceAttribute::kIntegrated:
    case DeviceAttribute::kHandleTypeFabric:
      *value = 0;
      break;
    default:
      *value = 1;
      break;
  }
  return Status::kSuccess;
}

Status cuDeviceTotalMem(std::size_t* bytes, DeviceOrdinal device) {
  if (!valid(device)) return Status::kInvalidDevice;
  *bytes = state().devices[device].total_bytes;
  return Status::kSuccess;
}

Status cuDeviceGetUuid(Uuid* uuid, DeviceOrdinal device) {
  if (!valid(device)) return Status::kInvalidDevice;
  std::memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = static_cast<char>(0xfa);
  uuid->bytes[15] = static_cast<char>(device);
  return Status::kSuccess;
}

Status cuDeviceGetPCIBusId(char* id, int length, DeviceOrdinal device) {
  if (!valid(device)) return Status::kInvalidDevice;
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0", 0x1a + device);
  return Status::kSuccess;
}

Status cuDeviceGetByPCIBusId(DeviceOrdinal* device, const char* id) {
  unsigned bus = 0;
  if (std::sscanf(id, "0000:%x:00.0", &bus) != 1) return Status::kInvalidValue;
  *device = static_cast<int>(bus) - 0x1a;
  return valid(*device) ? Status::kSuccess : Status::kInvalidDevice;
}

Status cuDeviceCanAccessPeer(int* can, DeviceOrdinal device, DeviceOrdinal peer) {
  if (!valid(device) || !valid(peer)) return Status::kInvalidDevice;
  *can = device != peer && state().no_peer.count({device, peer}) == 0;
  return Status::kSuccess;
}

Status cuDeviceGetP2PAttribute(int* value, P2pAttribute attribute, DeviceOrdinal source,
                               DeviceOrdinal target) {
  if (!valid(source) || !valid(target) || source == target) return Status::kInvalidDevice;
  bool can = state().no_peer.count({source, target}) == 0;
  if (attribute == P2pAttribute::kNativeAtomicSupported)
    can = can && state().no_atomics.count({source, target}) == 0;
  *value = attribute == P2pAttribute::kPerformanceRank ? 0 : can;
  return Status::kSuccess;
}

Status cuDevicePrimaryCtxRetain(ContextHandle* context, DeviceOrdinal device) {
  if (!valid(device)) return Status::kInvalidDevice;
  ++state().devices[device].retained;
  *context = context_of(device);
  return Status::kSuccess;
}

Status cuDevicePrimaryCtxRelease(DeviceOrdinal device) {
  if (device < 0 || device >= 16 || state().devices[device].retained == 0)
    return Status::kInvalidContext;
  --state().devices[device].retained;
  return Status::kSuccess;
}

Status cuDevicePrimaryCtxGetState(DeviceOrdinal device, unsigned* flags, int* active) {
  if (!valid(device)) return Status::kInvalidDevice;
  *flags = 0;
  *active = state().devices[device].retained > 0;
  return Status::kSuccess;
}

Status cuCtxPushCurrent(ContextHandle context) {
  if (device_of(context) < 0) return Status::kInvalidContext;
  context_stack.push_back(context);
  return Status::kSuccess;
}

Status cuCtxPopCurrent(ContextHandle* context) {
  if (context_stack.empty()) return Status::kInvalidContext;
  *context = context_stack.back();
  context_stack.pop_back();
  return Status::kSuccess;
}

Status cuCtxGetCurrent(ContextHandle* context) {
  *context = context_stack.empty() ? nullptr : context_stack.back();
  return Status::kSuccess;
}

Status cuCtxGetDevice(DeviceOrdinal* device) {
  *device = current_device();
  return *device < 0 ? Status::kInvalidContext : Status::kSuccess;
}

Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (current_device() < 0) return Status::kInvalidContext;
  *least = 0;
  *greatest = -5;
  return Status::kSuccess;
}

Status cuCtxEnablePeerAccess(ContextHandle peer, unsigned) {
  const int from = current_device();
  const int to = device_of(peer);
  if (from < 0 || to < 0) return Status::kInvalidContext;
  if (from == to) return Status::kInvalidDevice;
  if (state().no_peer.count({from, to}) != 0) return Status::kPeerAccessUnsupported;
  const bool fresh = state().peers_enabled.insert({from, to}).second;
  return fresh ? Status::kSuccess : Status::kPeerAccessAlreadyEnabled;
}

}  // namespace crossdock::testing::fake
