// Tensor: what a caller's array is (memory, type, shape, strides, where), whatever library made it.
// torch tensors and NumPy arrays are asked directly, everything else by DLPack without any
// synchronisation. Borrowed: the caller's object stays alive during the call. Needs the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nanobind/nanobind.h>
#include <string>

#include "dlpack.hpp"

namespace nb = nanobind;

namespace crossdock::python {

using std::int64_t;
using std::uint32_t;
using std::uint64_t;

// Which library made an array; outputs are made by the same one. Numbers are those of
// crossdock/_arrays.py.
enum class Framework : int { kNone = 0, kTorch = 1, kNumpy = 2, kCupy = 3 };

inline constexpr int kHost = -1;  // as a device
inline constexpr int kMaxDims = 2;

struct Tensor {
  const char* name = "";  // of the argument: "rows"
  void* data = nullptr;
  std::uint8_t kind = dlpack::kUint;  // code of DLPack
  uint32_t item_bytes = 1;
  int dims = 0;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in bytes
  int device = kHost;              // or a CUDA ordinal
  Framework framework = Framework::kNone;
  nb::handle object = {};

  [[nodiscard]] bool is(std::uint8_t k, uint32_t bytes) const {
    return kind == k && item_bytes == bytes;
  }
  // bf16, or 16-bit codes where a library has no bf16.
  [[nodiscard]] bool is_bf16() const {
    return is(dlpack::kBfloat, 2) || (framework != Framework::kTorch && is(dlpack::kUint, 2));
  }
  // Codes of a byte each: uint8, or the powers of two that scales of e8m0 are.
  [[nodiscard]] bool is_byte() const {
    return is(dlpack::kUint, 1) || is(dlpack::kFloat8E8m0fnu, 1);
  }
  [[nodiscard]] uint64_t row_bytes() const { return static_cast<uint64_t>(shape[1]) * item_bytes; }
  // Bytes from one row to the next; 0 where there is at most one row.
  [[nodiscard]] uint64_t row_stride() const {
    return shape[0] > 1 ? static_cast<uint64_t>(strides[0]) : 0;
  }
  [[nodiscard]] bool dense() const {
    return shape[0] <= 1 || static_cast<uint64_t>(strides[0]) == row_bytes();
  }
  // "torch.float32 [16, 128]", for messages.
  [[nodiscard]] std::string describe() const;
};

// Raises InvalidArgument, naming `name`, where the object is no array of one or two dimensions.
Tensor tensor_of(nb::handle object, const char* call, const char* name);
// The module `name` if the process has imported it, else nothing. Kept once found.
nb::handle loaded_module(const char* name);

// What an argument has to be; each raises InvalidArgument with the rule, the value and the fix.
// `call`: "ep dispatch".
void need_device(const char* call, const Tensor& t, uint32_t rank, int device);
// Two dimensions, the second one contiguous, rows neither repeated nor backwards, 16-byte aligned.
void need_rows(const char* call, const Tensor& t);
// Exactly [count, columns], dense.
void need_matrix(const char* call, const Tensor& t, int64_t count, int64_t columns);

}  // namespace crossdock::python
