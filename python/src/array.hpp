// Array: memory of the library that Python sees, with its shape and type. It keeps the owner of the
// memory alive, and so does everything made from it: by DLPack, by __array_interface__ (NumPy), by
// __cuda_array_interface__. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <nanobind/nanobind.h>

#include "tensor.hpp"

namespace crossdock::python {

struct ArrayType {
  std::uint8_t kind = dlpack::kUint;
  uint32_t bytes = 1;
};
inline constexpr ArrayType kInt32{dlpack::kInt, 4};
inline constexpr ArrayType kFloat32{dlpack::kFloat, 4};
inline constexpr ArrayType kBf16{dlpack::kBfloat, 2};
// For bytes of any type that the caller gives its name back: "view" them as what was put in.
constexpr ArrayType carrier(uint32_t bytes) {
  return bytes == 1 ? ArrayType{dlpack::kUint, 1} : ArrayType{dlpack::kInt, bytes};
}

struct Array {
  std::shared_ptr<const void> owner;
  void* data = nullptr;
  ArrayType type = {};
  int dims = 1;
  int64_t shape[kMaxDims] = {0, 1};
  int64_t strides[kMaxDims] = {1, 1};  // in elements
  int device = kHost;
};
// Dense, [rows, columns].
Array matrix(std::shared_ptr<const void> owner, void* data, ArrayType type, int64_t rows,
             int64_t columns);
Array vector(std::shared_ptr<const void> owner, void* data, ArrayType type, int64_t length);

}  // namespace crossdock::python
