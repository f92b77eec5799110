// The part of the CUDA driver's binary interface that Crossdock uses, declared by ourselves, so
// that the library builds and loads on machines without any CUDA installed. Plain types, no code;
// every number and size here is compared with cuda.h by tests/unit/cuda/driver_types_test.cpp
// wherever a toolkit is present. Must not include a CUDA header.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// The driver's opaque objects keep the driver's own tags: a stream of any framework converts
// freely.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUfunc_st;
struct CUgraph_st;
struct CUgraphExec_st;
struct CUgraphNode_st;

namespace crossdock::cuda {

using ContextHandle = ::CUctx_st*;
using StreamHandle = ::CUstream_st*;
using EventHandle = ::CUevent_st*;
using ModuleHandle = ::CUmod_st*;
using FunctionHandle = ::CUfunc_st*;
using GraphHandle = ::CUgraph_st*;
using GraphExecHandle = ::CUgraphExec_st*;
using GraphNodeHandle = ::CUgraphNode_st*;
using DevicePtr = unsigned long long;         // an address in the GPU's view
using AllocationHandle = unsigned long long;  // physical memory of the virtual memory management
using DeviceOrdinal = int;
using HostFunction = void (*)(void* user_data);

// What every driver call returns. Only the values that Crossdock tells apart.
enum class Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kStubLibrary = 34,
  kCallRequiresNewerDriver = 36,
  kDeviceUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kEccUncorrectable = 214,
  kPeerAccessUnsupported = 217,
  kInvalidPtx = 218,
  kNvlinkUncorrectable = 220,
  kUnsupportedPtxVersion = 222,
  kContained = 226,
  kOperatingSystem = 304,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchTimeout = 702,
  kPeerAccessAlreadyEnabled = 704,
  kPeerAccessNotEnabled = 705,
  kContextIsDestroyed = 709,
  kAssert = 710,
  kTooManyPeers = 711,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailed = 719,
  kCooperativeLaunchTooLarge = 720,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemNotReady = 802,
  kSystemDriverMismatch = 803,
  kCompatNotSupportedOnDevice = 804,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
  kStreamCaptureIsolation = 905,
  kStreamCaptureImplicit = 906,
  kCapturedEvent = 907,
  kStreamCaptureWrongThread = 908,
  kInvalidClusterSize = 912,
  kUnknown = 999,
};

enum class DeviceAttribute : int {
  kClockRateKhz = 13,
  kMultiprocessorCount = 16,
  kIntegrated = 18,
  kL2CacheBytes = 38,
  kUnifiedAddressing = 41,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kHostPointerForRegistered = 91,
  kCooperativeLaunch = 95,
  kMaxSharedMemoryPerBlockOptin = 97,
  kVirtualMemoryManagement = 102,
  kHandleTypePosixFd = 103,
  kGpuDirectRdmaWithVmm = 110,
  kGpuDirectRdma = 116,
  kGpuDirectRdmaWritesOrdering = 118,
  kClusterLaunch = 120,
  kDmaBuf = 124,
  kHandleTypeFabric = 128,
  kHostNumaId = 134,
};

enum class P2pAttribute : int {
  kPerformanceRank = 1,
  kAccessSupported = 2,
  kNativeAtomicSupported = 3,
};

enum class PointerAttribute : int {
  kContext = 1,
  kMemoryType = 2,
  kDevicePointer = 3,
  kHostPointer = 4,
  kSyncMemops = 6,
  kBufferId = 7,
  kIsManaged = 8,
  kDeviceOrdinal = 9,
  kLegacyIpcCapable = 10,
  kRangeStart = 11,
  kRangeSize = 12,
  kAllowedHandleTypes = 14,
  kGpuDirectRdmaCapable = 15,
};

enum class MemoryType : int { kHost = 1, kDevice = 2, kArray = 3, kUnified = 4 };

enum class FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedBytes = 1,
  kLocalBytes = 3,
  kNumRegs = 4,
  kBinaryVersion = 6,
  kMaxDynamicSharedBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
enum class ProcAddressResult : int { kSuccess = 0, kSymbolNotFound = 1, kVersionNotSufficient = 2 };
inline constexpr unsigned long long kProcAddressLegacyStream = 1;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kHostAllocDeviceMap = 2;
inline constexpr unsigned kHostAllocWriteCombined = 4;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr unsigned kHostRegisterDeviceMap = 2;
inline constexpr unsigned kStreamWaitValueGeq = 0;
inline constexpr unsigned kStreamWaitValueEq = 1;
inline constexpr unsigned kIpcMemLazyEnablePeerAccess = 1;

// --- words written and waited for in stream order ---
enum class BatchMemOpType : int { kWaitValue64 = 4, kWriteValue64 = 5 };
// Waits and writes have the same members.
struct BatchMemOpWord {
  BatchMemOpType operation;
  DevicePtr address;
  std::uint64_t value;
  unsigned flags;
  DevicePtr alias;
};
union BatchMemOp {
  BatchMemOpWord word;
  std::uint64_t pad[6];
};
inline constexpr unsigned kMostBatchMemOps = 256;  // of one call

// --- virtual memory management ---
enum class AllocationType : int { kPinned = 1 };
enum class LocationType : int { kDevice = 1 };
enum class HandleType : int { kNone = 0, kPosixFd = 1, kFabric = 8 };
enum class Granularity : int { kMinimum = 0, kRecommended = 1 };
enum class AccessFlags : int { kNone = 0, kRead = 1, kReadWrite = 3 };
enum class RangeHandleType : int { kDmaBufFd = 1 };

struct Location {
  LocationType type;
  int id;
};
struct AllocationProp {
  AllocationType type;
  HandleType requested_handles;
  Location location;
  void* win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct AccessDesc {
  Location location;
  AccessFlags flags;
};
struct FabricHandle {
  unsigned char data[64];
};
struct IpcMemHandle {
  char reserved[64];
};
struct Uuid {
  char bytes[16];
};

// --- launches ---
enum class LaunchAttributeId : int {
  kIgnore = 0,
  kCooperative = 2,
  kClusterDimension = 4,
  kProgrammaticStreamSerialization = 6,
  kPriority = 8,
};
union LaunchAttributeValue {
  char pad[64];
  int cooperative;
  struct {
    unsigned x, y, z;
  } cluster_dim;
  int programmatic_stream_serialization;
  int priority;
};
struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[4];
  LaunchAttributeValue value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// A tensor map of the bulk copy engine: 128 opaque bytes that a kernel takes as a parameter.
struct alignas(128) TensorMap {
  std::uint64_t opaque[16];
};

}  // namespace crossdock::cuda
