// The driver's encoder. See tensor_map.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/tensor_map.hpp"

#include <bit>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <span>

namespace crossdock::symm {
namespace {

// CUtensorMapDataType of cuda.h.
int data_type(TensorElement element) {
  switch (element) {
    case TensorElement::kU8:
      return 0;
    case TensorElement::kU16:
      return 1;
    case TensorElement::kU32:
      return 2;
    case TensorElement::kU64:
      return 4;
    case TensorElement::kF16:
      return 6;
    case TensorElement::kF32:
      return 7;
    case TensorElement::kBf16:
      return 9;
  }
  return -1;
}

// CUtensorMapSwizzle: 0, 1, 2, 3 for none, 32, 64 and 128 bytes; -1 for anything else.
int swizzle(std::uint32_t bytes) {
  if (bytes == 0) return 0;
  const bool known = bytes == 32 || bytes == 64 || bytes == 128;
  return known ? std::countr_zero(bytes) - 4 : -1;
}

// CUtensorMapL2promotion: 0, 1, 2, 3 for none, 64, 128 and 256 bytes; -1 for anything else.
int l2_promotion(std::uint32_t bytes) {
  if (bytes == 0) return 0;
  const bool known = bytes == 64 || bytes == 128 || bytes == 256;
  return known ? std::countr_zero(bytes) - 5 : -1;
}

std::string describe(const TensorMapOptions& o) {
  const std::size_t rank = o.rank;
  return fmt::format("encode a tensor map of {} with dims {}, strides {}, box {}, swizzle {}",
                     o.base, std::span(o.dims).first(rank), std::span(o.strides).first(rank - 1),
                     std::span(o.box).first(rank), o.swizzle_bytes);
}

}  // namespace

Result<device::TensorMap> encode_for_gpu(const cuda::Context& context,
                                         const TensorMapOptions& options) {
  if (options.rank < 1 || options.rank > 5)
    return invalid_argument(fmt::format("tensor map: rank = {} must be 1..5", options.rank));
  if (swizzle(options.swizzle_bytes) < 0)
    return invalid_argument(fmt::format("tensor map: swizzle_bytes = {} must be 0, 32, 64 or 128",
                                        options.swizzle_bytes));
  if (l2_promotion(options.l2_promotion_bytes) < 0)
    return invalid_argument(
        fmt::format("tensor map: l2_promotion_bytes = {} must be 0, 64, 128 or 256",
                    options.l2_promotion_bytes));
  const cuda::Driver& driver = context.driver();
  if (driver.cuTensorMapEncodeTiled == nullptr)
    return make_error(
        Code::kUnsupported,
        "this CUDA driver has no tensor maps; they need CUDA 12.0 and a GPU of sm_90");
  constexpr std::array<std::uint32_t, 5> kDense{1, 1, 1, 1, 1};
  CROSSDOCK_TRY(current, context.enter());  // the driver encodes for the current GPU
  cuda::TensorMap encoded{};
  CROSSDOCK_CUDA(
      driver,
      cuTensorMapEncodeTiled(&encoded, data_type(options.element), options.rank, options.base,
                             options.dims.data(), options.strides.data(), options.box.data(),
                             kDense.data(), 0, swizzle(options.swizzle_bytes),
                             l2_promotion(options.l2_promotion_bytes), 0),
      describe(options));
  device::TensorMap map{};
  static_assert(sizeof map == sizeof encoded);
  std::memcpy(&map, &encoded, sizeof map);
  return map;
}

}  // namespace crossdock::symm
