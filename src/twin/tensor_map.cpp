// Encoding, checking and expanding of tensor maps.
// SPDX-License-Identifier: Apache-2.0
#include "twin/tensor_map.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "twin/sanitizer.hpp"

namespace crossdock::twin {

namespace {

constexpr std::uint64_t kMagic = 0x7477696e6d617031ull;
constexpr std::uint32_t kMaxRank = 5;
constexpr std::uint32_t kMaxBox = 256;
constexpr std::uint32_t kChunk = 16;

// What lies in TensorMap::opaque.
struct Packed {
  std::uint64_t magic;
  std::uint64_t base;
  std::array<std::uint32_t, 5> dims;
  std::array<std::uint16_t, 5> box;
  std::uint8_t element;
  std::uint8_t rank;
  std::uint8_t swizzle;
  std::array<std::uint64_t, 4> strides;
};
static_assert(sizeof(Packed) <= sizeof(device::TensorMap));

Result<void> check_dimension(const TensorMapOptions& o, std::uint32_t i) {
  if (o.dims[i] == 0 || o.dims[i] > 0xFFFFFFFFull)
    return invalid_argument(
        fmt::format("tensor map: dims[{}] = {} must be 1..2^32-1", i, o.dims[i]));
  if (o.box[i] == 0 || o.box[i] > kMaxBox)
    return invalid_argument(
        fmt::format("tensor map: box[{}] = {} must be 1..{}", i, o.box[i], kMaxBox));
  if (i > 0 && o.strides[i - 1] % kChunk != 0)
    return invalid_argument(
        fmt::format("tensor map: strides[{}] = {} must be a multiple of {} bytes", i - 1,
                    o.strides[i - 1], kChunk));
  return {};
}

}  // namespace

std::uint32_t bytes_of(TensorElement element) {
  switch (element) {
    case TensorElement::kU8:
      return 1;
    case TensorElement::kU16:
    case TensorElement::kF16:
    case TensorElement::kBf16:
      return 2;
    case TensorElement::kU32:
    case TensorElement::kF32:
      return 4;
    case TensorElement::kU64:
      return 8;
  }
  return 1;
}

Result<device::TensorMap> encode_tensor_map(const TensorMapOptions& o) {
  if (o.rank == 0 || o.rank > kMaxRank)
    return invalid_argument(fmt::format("tensor map: rank = {} must be 1..{}", o.rank, kMaxRank));
  const auto base = reinterpret_cast<std::uintptr_t>(o.base);
  if (base == 0 || base % kChunk != 0)
    return invalid_argument(
        fmt::format("tensor map: base {} must be aligned to {} bytes", o.base, kChunk));
  for (std::uint32_t i = 0; i < o.rank; ++i)
    CROSSDOCK_CHECK_OK(check_dimension(o, i));
  const std::uint32_t inner = o.box[0] * bytes_of(o.element);
  if (inner % kChunk != 0)
    return invalid_argument(fmt::format(
        "tensor map: the box is {} bytes wide; it must be a multiple of {}", inner, kChunk));
  const std::uint32_t s = o.swizzle_bytes;
  if (s != 0 && s != 32 && s != 64 && s != 128)
    return invalid_argument(
        fmt::format("tensor map: swizzle of {} bytes must be 0, 32, 64 or 128", s));
  if (s != 0 && inner > s)
    return invalid_argument(
        fmt::format("tensor map: the box is {} bytes wide, wider than the swizzle of {}; "
                    "make it narrower",
                    inner, s));
  Packed packed{};
  packed.magic = kMagic;
  packed.base = base;
  packed.element = static_cast<std::uint8_t>(o.element);
  packed.rank = static_cast<std::uint8_t>(o.rank);
  packed.swizzle = static_cast<std::uint8_t>(s);
  packed.strides = o.strides;
  for (std::uint32_t i = 0; i < o.rank; ++i) {
    packed.dims[i] = static_cast<std::uint32_t>(o.dims[i]);
    packed.box[i] = static_cast<std::uint16_t>(o.box[i]);
  }
  device::TensorMap map{};
  raw_copy(map.opaque, &packed, sizeof packed);
  return map;
}

bool decode_tensor_map(const void* map, TensorMapOptions& o) {
  Packed packed;
  raw_copy(&packed, map, sizeof packed);
  if (packed.magic != kMagic) return false;
  o.base = reinterpret_cast<void*>(packed.base);
  o.element = static_cast<TensorElement>(packed.element);
  o.rank = packed.rank;
  o.swizzle_bytes = packed.swizzle;
  o.strides = packed.strides;
  for (std::uint32_t i = 0; i < kMaxRank; ++i) {
    o.dims[i] = packed.dims[i];
    o.box[i] = packed.box[i];
  }
  return true;
}

std::uint32_t box_bytes(const TensorMapOptions& map) {
  std::uint32_t bytes = bytes_of(map.element);
  for (std::uint32_t i = 0; i < map.rank; ++i)
    bytes *= map.box[i];
  return bytes;
}

namespace {

std::uint32_t row_pitch(const TensorMapOptions& map) {
  return map.swizzle_bytes != 0 ? map.swizzle_bytes : map.box[0] * bytes_of(map.element);
}

}  // namespace

std::uint32_t tile_bytes(const TensorMapOptions& map) {
  std::uint32_t bytes = row_pitch(map);
  for (std::uint32_t i = 1; i < map.rank; ++i)
    bytes *= map.box[i];
  return bytes;
}

namespace {

// One row of the box along the innermost dimension.
class RowExpander {
 public:
  RowExpander(const TensorMapOptions& map, unsigned char* shared, std::uint32_t shared_offset,
              std::vector<CopySegment>& out)
      : map_(map), shared_(shared), phase_(shared_offset), out_(out) {}

  // `global`: address of the row's coordinate 0, nullptr when an outer coordinate is outside.
  void add(std::uint32_t row, unsigned char* global, std::int64_t first) {
    const std::uint32_t element = bytes_of(map_.element);
    const std::int64_t dim = static_cast<std::int64_t>(map_.dims[0]);
    const std::int64_t lo = std::clamp<std::int64_t>(-first, 0, map_.box[0]);
    const std::int64_t hi = std::clamp<std::int64_t>(dim - first, lo, map_.box[0]);
    const std::uint32_t inner = map_.box[0] * element;
    const auto lo_byte = static_cast<std::uint32_t>(lo) * element;
    const auto hi_byte = static_cast<std::uint32_t>(hi) * element;
    const std::uint32_t start = row * row_pitch(map_);
    if (global == nullptr) {
      put(start, inner, nullptr);
      return;
    }
    put(start, lo_byte, nullptr);
    put(start + lo_byte, hi_byte - lo_byte, global + (first + lo) * element);
    put(start + hi_byte, inner - hi_byte, nullptr);
  }

 private:
  // A contiguous run of the linear box, cut where the swizzle moves 16-byte chunks.
  void put(std::uint32_t at, std::uint32_t bytes, unsigned char* global) {
    while (bytes != 0) {
      const std::uint32_t part =
          map_.swizzle_bytes == 0 ? bytes : std::min(bytes, kChunk - at % kChunk);
      out_.push_back({shared_ + place(at), global, part});
      at += part;
      bytes -= part;
      if (global != nullptr) global += part;
    }
  }
  std::uint32_t place(std::uint32_t at) const {
    if (map_.swizzle_bytes == 0) return at;
    const std::uint32_t address = phase_ + at;
    // Chunk index bits are XORed with the number of the 128-byte line.
    const std::uint32_t chunks = map_.swizzle_bytes / kChunk;
    return (address ^ (address / 128 % chunks * kChunk)) - phase_;
  }

  const TensorMapOptions& map_;
  unsigned char* shared_;
  std::uint32_t phase_;
  std::vector<CopySegment>& out_;
};

}  // namespace

std::vector<CopySegment> tensor_segments(const TensorMapOptions& map,
                                         const std::int32_t* coordinates, unsigned char* shared,
                                         std::uint32_t shared_offset) {
  std::vector<CopySegment> segments;
  RowExpander rows(map, shared, shared_offset, segments);
  std::uint32_t count = 1;
  for (std::uint32_t i = 1; i < map.rank; ++i)
    count *= map.box[i];
  for (std::uint32_t row = 0; row < count; ++row) {
    std::uint32_t rest = row;
    bool inside = true;
    auto* global = static_cast<unsigned char*>(map.base);
    for (std::uint32_t i = 1; i < map.rank; ++i) {
      const std::int64_t at = std::int64_t{coordinates[i]} + rest % map.box[i];
      rest /= map.box[i];
      inside = inside && at >= 0 && at < static_cast<std::int64_t>(map.dims[i]);
      if (inside) global += static_cast<std::uint64_t>(at) * map.strides[i - 1];
    }
    rows.add(row, inside ? global : nullptr, coordinates[0]);
  }
  return segments;
}

}  // namespace crossdock::twin
