// Tensor maps of the twin: the same description that the driver's encoder takes, packed into the
// opaque 128 bytes of device::TensorMap, and its expansion into copy segments.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <crossdock/core.cuh>
#include <crossdock/core/result.hpp>

#include "twin/async.hpp"

namespace crossdock::twin {

enum class TensorElement : std::uint8_t { kU8, kU16, kU32, kU64, kF16, kBf16, kF32 };
std::uint32_t bytes_of(TensorElement element);

// Innermost dimension first. `strides` are bytes between neighbours in dimension i + 1; the
// innermost dimension is contiguous. Elements outside of the tensor load as zero and are not
// stored.
struct TensorMapOptions {
  void* base = nullptr;
  TensorElement element = TensorElement::kU8;
  std::uint32_t rank = 2;
  std::array<std::uint64_t, 5> dims{};
  std::array<std::uint64_t, 4> strides{};
  std::array<std::uint32_t, 5> box{};
  std::uint32_t swizzle_bytes = 0;  // 0, 32, 64 or 128
  // On GPUs, how much L2 fetches at once: 0, 64, 128 or 256. Changes speed only.
  std::uint32_t l2_promotion_bytes = 0;
};

Result<device::TensorMap> encode_tensor_map(const TensorMapOptions& options);
// False when the bytes were not made by encode_tensor_map.
bool decode_tensor_map(const void* map, TensorMapOptions& options);

// Bytes of one box, which is what a load adds to its mbarrier.
std::uint32_t box_bytes(const TensorMapOptions& map);
// Bytes of the tile in shared memory: rows narrower than the swizzle are padded to its width.
std::uint32_t tile_bytes(const TensorMapOptions& map);
// The pieces of one box at `coordinates`. `shared_offset` is the tile's offset from a 1024-byte
// boundary, which the swizzle depends on.
std::vector<CopySegment> tensor_segments(const TensorMapOptions& map,
                                         const std::int32_t* coordinates, unsigned char* shared,
                                         std::uint32_t shared_offset);

}  // namespace crossdock::twin
