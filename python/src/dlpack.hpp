// The structs of DLPack, by which array libraries lend each other memory, written from its
// specification: the plain form ("dltensor") and the versioned one ("dltensor_versioned", 1.0).
// Only
// what this package uses. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock::python::dlpack {

inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::int32_t kCudaHost = 3;

inline constexpr std::uint8_t kInt = 0;
inline constexpr std::uint8_t kUint = 1;
inline constexpr std::uint8_t kFloat = 2;
inline constexpr std::uint8_t kBfloat = 4;
inline constexpr std::uint8_t kBool = 6;
inline constexpr std::uint8_t kFloat8E4m3fn = 10;
inline constexpr std::uint8_t kFloat8E8m0fnu = 14;
// With two lanes, which are a byte.
inline constexpr std::uint8_t kFloat4E2m1fnX2 = 17;

struct Device {
  std::int32_t type;
  std::int32_t id;
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: dense
  std::uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};
struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;  // 1: read-only
  Tensor tensor;
};
static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, dtype) == 20);
static_assert(sizeof(ManagedTensor) == 64 && sizeof(ManagedTensorVersioned) == 80);

inline constexpr char kName[] = "dltensor";
inline constexpr char kVersionedName[] = "dltensor_versioned";

}  // namespace crossdock::python::dlpack
