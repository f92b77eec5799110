// Compares our declarations of the driver's binary interface with cuda.h: numbers, sizes, offsets
// and signatures. Does nothing, and says so, where there is no toolkit.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver_types.hpp"

#include <gtest/gtest.h>

#if __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)
#include <cstddef>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <type_traits>

namespace crossdock::cuda {
namespace {

#define SAME(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
#define SAME_FIELD(Ours, ours, Theirs, theirs)                      \
  static_assert(offsetof(Ours, ours) == offsetof(Theirs, theirs) && \
                sizeof(static_cast<Ours*>(nullptr)->ours) ==        \
                    sizeof(static_cast<Theirs*>(nullptr)->theirs))

SAME(Status::kSuccess, CUDA_SUCCESS);
SAME(Status::kInvalidValue, CUDA_ERROR_INVALID_VALUE);
SAME(Status::kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(Status::kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
SAME(Status::kDeinitialized, CUDA_ERROR_DEINITIALIZED);
SAME(Status::kStubLibrary, CUDA_ERROR_STUB_LIBRARY);
SAME(Status::kCallRequiresNewerDriver, CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER);
SAME(Status::kDeviceUnavailable, CUDA_ERROR_DEVICE_UNAVAILABLE);
SAME(Status::kNoDevice, CUDA_ERROR_NO_DEVICE);
SAME(Status::kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
SAME(Status::kInvalidImage, CUDA_ERROR_INVALID_IMAGE);
SAME(Status::kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
SAME(Status::kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(Status::kEccUncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME(Status::kPeerAccessUnsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
SAME(Status::kInvalidPtx, CUDA_ERROR_INVALID_PTX);
SAME(Status::kNvlinkUncorrectable, CUDA_ERROR_NVLINK_UNCORRECTABLE);
SAME(Status::kUnsupportedPtxVersion, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME(Status::kContained, CUDA_ERROR_CONTAINED);
SAME(Status::kOperatingSystem, CUDA_ERROR_OPERATING_SYSTEM);
SAME(Status::kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
SAME(Status::kNotFound, CUDA_ERROR_NOT_FOUND);
SAME(Status::kNotReady, CUDA_ERROR_NOT_READY);
SAME(Status::kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(Status::kLaunchOutOfResources, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
SAME(Status::kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME(Status::kPeerAccessAlreadyEnabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME(Status::kPeerAccessNotEnabled, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
SAME(Status::kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME(Status::kAssert, CUDA_ERROR_ASSERT);
SAME(Status::kTooManyPeers, CUDA_ERROR_TOO_MANY_PEERS);
SAME(Status::kHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(Status::kHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(Status::kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME(Status::kIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION);
SAME(Status::kMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS);
SAME(Status::kInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE);
SAME(Status::kInvalidPc, CUDA_ERROR_INVALID_PC);
SAME(Status::kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
SAME(Status::kCooperativeLaunchTooLarge, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
SAME(Status::kNotPermitted, CUDA_ERROR_NOT_PERMITTED);
SAME(Status::kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
SAME(Status::kSystemNotReady, CUDA_ERROR_SYSTEM_NOT_READY);
SAME(Status::kSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
SAME(Status::kCompatNotSupportedOnDevice, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE);
SAME(Status::kStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME(Status::kStreamCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
SAME(Status::kStreamCaptureIsolation, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
SAME(Status::kStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME(Status::kCapturedEvent, CUDA_ERROR_CAPTURED_EVENT);
SAME(Status::kStreamCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
SAME(Status::kInvalidClusterSize, CUDA_ERROR_INVALID_CLUSTER_SIZE);
SAME(Status::kUnknown, CUDA_ERROR_UNKNOWN);

SAME(DeviceAttribute::kClockRateKhz, CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
SAME(DeviceAttribute::kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(DeviceAttribute::kIntegrated, CU_DEVICE_ATTRIBUTE_INTEGRATED);
SAME(DeviceAttribute::kL2CacheBytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME(DeviceAttribute::kUnifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(DeviceAttribute::kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(DeviceAttribute::kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(DeviceAttribute::kHostPointerForRegistered,
     CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
SAME(DeviceAttribute::kCooperativeLaunch, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
SAME(DeviceAttribute::kMaxSharedMemoryPerBlockOptin,
     CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(DeviceAttribute::kVirtualMemoryManagement,
     CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(DeviceAttribute::kHandleTypePosixFd,
     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(DeviceAttribute::kGpuDirectRdmaWithVmm,
     CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME(DeviceAttribute::kGpuDirectRdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED);
SAME(DeviceAttribute::kGpuDirectRdmaWritesOrdering,
     CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
SAME(DeviceAttribute::kClusterLaunch, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH);
SAME(DeviceAttribute::kDmaBuf, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
#if CUDA_VERSION >= 12030
SAME(DeviceAttribute::kHandleTypeFabric, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
SAME(DeviceAttribute::kHostNumaId, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
SAME(HandleType::kFabric, CU_MEM_HANDLE_TYPE_FABRIC);
static_assert(sizeof(FabricHandle) == sizeof(CUmemFabricHandle));
#endif

SAME(P2pAttribute::kPerformanceRank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK);
SAME(P2pAttribute::kAccessSupported, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED);
SAME(P2pAttribute::kNativeAtomicSupported, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);

SAME(PointerAttribute::kContext, CU_POINTER_ATTRIBUTE_CONTEXT);
SAME(PointerAttribute::kMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(PointerAttribute::kDevicePointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
SAME(PointerAttribute::kHostPointer, CU_POINTER_ATTRIBUTE_HOST_POINTER);
SAME(PointerAttribute::kSyncMemops, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
SAME(PointerAttribute::kBufferId, CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME(PointerAttribute::kIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(PointerAttribute::kDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(PointerAttribute::kLegacyIpcCapable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(PointerAttribute::kRangeStart, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME(PointerAttribute::kRangeSize, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME(PointerAttribute::kAllowedHandleTypes, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES);
SAME(PointerAttribute::kGpuDirectRdmaCapable, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE);
SAME(MemoryType::kHost, CU_MEMORYTYPE_HOST);
SAME(MemoryType::kDevice, CU_MEMORYTYPE_DEVICE);
SAME(MemoryType::kUnified, CU_MEMORYTYPE_UNIFIED);

SAME(FunctionAttribute::kMaxThreadsPerBlock, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(FunctionAttribute::kSharedBytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
SAME(FunctionAttribute::kLocalBytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
SAME(FunctionAttribute::kNumRegs, CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME(FunctionAttribute::kBinaryVersion, CU_FUNC_ATTRIBUTE_BINARY_VERSION);
SAME(FunctionAttribute::kMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(FunctionAttribute::kNonPortableClusterSizeAllowed,
     CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);

SAME(CaptureMode::kGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
SAME(CaptureMode::kThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME(CaptureMode::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(CaptureStatus::kNone, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(CaptureStatus::kActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME(CaptureStatus::kInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
SAME(ProcAddressResult::kSymbolNotFound, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
SAME(ProcAddressResult::kVersionNotSufficient, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
SAME(kProcAddressLegacyStream, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
SAME(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME(kHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE);
SAME(kHostAllocDeviceMap, CU_MEMHOSTALLOC_DEVICEMAP);
SAME(kHostAllocWriteCombined, CU_MEMHOSTALLOC_WRITECOMBINED);
SAME(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
SAME(kHostRegisterDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(kStreamWaitValueGeq, CU_STREAM_WAIT_VALUE_GEQ);
SAME(kStreamWaitValueEq, CU_STREAM_WAIT_VALUE_EQ);
SAME(BatchMemOpType::kWaitValue64, CU_STREAM_MEM_OP_WAIT_VALUE_64);
SAME(BatchMemOpType::kWriteValue64, CU_STREAM_MEM_OP_WRITE_VALUE_64);
static_assert(sizeof(BatchMemOp) == sizeof(CUstreamBatchMemOpParams));
SAME_FIELD(BatchMemOp, word.address, CUstreamBatchMemOpParams, waitValue.address);
SAME_FIELD(BatchMemOp, word.value, CUstreamBatchMemOpParams, waitValue.value64);
SAME_FIELD(BatchMemOp, word.flags, CUstreamBatchMemOpParams, waitValue.flags);
SAME_FIELD(BatchMemOp, word.value, CUstreamBatchMemOpParams, writeValue.value64);
SAME_FIELD(BatchMemOp, word.flags, CUstreamBatchMemOpParams, writeValue.flags);
SAME(kIpcMemLazyEnablePeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);

SAME(AllocationType::kPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(LocationType::kDevice, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(HandleType::kNone, CU_MEM_HANDLE_TYPE_NONE);
SAME(HandleType::kPosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(Granularity::kMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(Granularity::kRecommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(AccessFlags::kNone, CU_MEM_ACCESS_FLAGS_PROT_NONE);
SAME(AccessFlags::kRead, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME(AccessFlags::kReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(RangeHandleType::kDmaBufFd, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD);

static_assert(sizeof(AllocationProp) == sizeof(CUmemAllocationProp));
SAME_FIELD(AllocationProp, type, CUmemAllocationProp, type);
SAME_FIELD(AllocationProp, requested_handles, CUmemAllocationProp, requestedHandleTypes);
SAME_FIELD(AllocationProp, location, CUmemAllocationProp, location);
SAME_FIELD(AllocationProp, win32_handle_meta_data, CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD(AllocationProp, flags, CUmemAllocationProp, allocFlags);
SAME_FIELD(AllocationProp, flags.gpu_direct_rdma_capable, CUmemAllocationProp,
           allocFlags.gpuDirectRDMACapable);
static_assert(sizeof(AccessDesc) == sizeof(CUmemAccessDesc));
SAME_FIELD(AccessDesc, location, CUmemAccessDesc, location);
SAME_FIELD(AccessDesc, flags, CUmemAccessDesc, flags);
static_assert(sizeof(IpcMemHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(Uuid) == sizeof(CUuuid));

SAME(LaunchAttributeId::kIgnore, CU_LAUNCH_ATTRIBUTE_IGNORE);
SAME(LaunchAttributeId::kCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(LaunchAttributeId::kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(LaunchAttributeId::kProgrammaticStreamSerialization,
     CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(LaunchAttributeId::kPriority, CU_LAUNCH_ATTRIBUTE_PRIORITY);
static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
SAME_FIELD(LaunchAttribute, id, CUlaunchAttribute, id);
SAME_FIELD(LaunchAttribute, value, CUlaunchAttribute, value);
SAME_FIELD(LaunchAttribute, value.cluster_dim, CUlaunchAttribute, value.clusterDim);
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
SAME_FIELD(LaunchConfig, grid_x, CUlaunchConfig, gridDimX);
SAME_FIELD(LaunchConfig, block_x, CUlaunchConfig, blockDimX);
SAME_FIELD(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_FIELD(LaunchConfig, stream, CUlaunchConfig, hStream);
SAME_FIELD(LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME_FIELD(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) &&
              alignof(TensorMap) >= alignof(CUtensorMap));

static_assert(std::is_same_v<StreamHandle, CUstream> && std::is_same_v<ContextHandle, CUcontext> &&
              std::is_same_v<DevicePtr, CUdeviceptr> &&
              std::is_same_v<AllocationHandle, CUmemGenericAllocationHandle>);

// Each parameter of the table passes in the same way as the driver's typedef of that very version:
// the same class (pointer, integer or enum, struct) and the same size.
template <class A, class B>
constexpr bool passes_alike() {
  return sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
         std::is_class_v<A> == std::is_class_v<B> &&
         std::is_floating_point_v<A> == std::is_floating_point_v<B>;
}
template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct Alike<R (*)(A...), S (*)(B...)>
    : std::bool_constant<sizeof(R) == sizeof(S) && (passes_alike<A, B>() && ...)> {};

#define CROSSDOCK_CUDA_FUNCTION(name, version, need, parameters) \
  static_assert(Alike<Status(*) parameters, PFN_##name##_v##version>::value, #name);
#include "cuda/driver_table.def"
#undef CROSSDOCK_CUDA_FUNCTION

TEST(DriverTypes, MatchTheToolkit) {
  // All of it is static; what is left for run time is to say against which toolkit.
  std::printf("driver types compared with cuda.h %d\n", CUDA_VERSION);
  EXPECT_GE(CUDA_VERSION, 12000);
}

}  // namespace
}  // namespace crossdock::cuda

#else

TEST(DriverTypes, MatchTheToolkit) {
  GTEST_SKIP() << "no cuda.h on this machine: declarations cannot be compared with the toolkit";
}

#endif
