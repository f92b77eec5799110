// Filling and checking of page content. A strong hash gives each row its seed; within a row, 64-bit
// words step by a constant, which the compiler turns into plain vector adds and compares, so that
// both directions run at memory speed.
// SPDX-License-Identifier: Apache-2.0
#include "kv/pattern.hpp"

#include <cstring>
#include <fmt/format.h>

namespace crossdock::kv::pattern {
namespace {

constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio: odd, all bytes differ

// The finaliser of splitmix64: every input bit reaches every output bit.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct CellSeed {
  std::uint64_t base;
  std::uint32_t first_token;
  [[nodiscard]] std::uint64_t row(std::uint32_t token, std::uint32_t head) const noexcept {
    return mix(base + ((std::uint64_t{first_token} + token) << 16) + head);
  }
};

CellSeed cell_seed(PageContent content, std::uint32_t layer, std::uint32_t plane) noexcept {
  const std::uint64_t place = (std::uint64_t{layer} << 8) + plane;
  return {mix(mix(content.key + kStep) + place * kStep), content.first_token};
}

void fill_row(std::byte* row, std::size_t bytes, std::uint64_t seed) noexcept {
  const std::size_t words = bytes / 8;
  for (std::size_t w = 0; w < words; ++w) {
    const std::uint64_t value = seed + w * kStep;
    std::memcpy(row + w * 8, &value, 8);
  }
  const std::uint64_t tail = seed + words * kStep;
  if (bytes % 8 != 0) std::memcpy(row + words * 8, &tail, bytes % 8);
}

bool row_matches(const std::byte* row, std::size_t bytes, std::uint64_t seed) noexcept {
  const std::size_t words = bytes / 8;
  std::uint64_t difference = 0;
  for (std::size_t w = 0; w < words; ++w) {
    std::uint64_t value;
    std::memcpy(&value, row + w * 8, 8);
    difference |= value ^ (seed + w * kStep);
  }
  const std::uint64_t tail = seed + words * kStep;
  return difference == 0 && std::memcmp(row + words * 8, &tail, bytes % 8) == 0;
}

std::size_t first_difference(const std::byte* row, std::size_t bytes, std::uint64_t seed) noexcept {
  for (std::size_t i = 0; i < bytes; ++i) {
    const std::uint64_t word = seed + i / 8 * kStep;
    if (std::memcmp(row + i, reinterpret_cast<const std::byte*>(&word) + i % 8, 1) != 0) return i;
  }
  return bytes;
}

}  // namespace

std::string Mismatch::describe() const {
  return fmt::format("layer {} page {} {} token {} head {}: byte {} differs", layer, page,
                     plane == 0 ? "K" : "V", token, head, byte);
}

void fill_page(const PageLayout& layout, std::byte* pool, std::uint32_t layer, PageId page,
               PageContent content) noexcept {
  const std::size_t row_bytes = layout.shape().row_bytes();
  const HeadRange heads = layout.heads();
  for (std::uint32_t plane = 0; plane < layout.shape().num_planes(); ++plane) {
    const CellSeed seed = cell_seed(content, layer, plane);
    std::byte* cell = pool + layout.cell_offset(layer, page, plane);
    for (std::uint32_t token = 0; token < layout.options().page_tokens; ++token)
      for (std::uint32_t h = heads.first; h < heads.first + heads.count; ++h)
        fill_row(cell + layout.row_offset(token, h), row_bytes, seed.row(token, h));
  }
}

std::optional<Mismatch> check_page(const PageLayout& layout, const std::byte* pool,
                                   std::uint32_t layer, PageId page, PageContent content) noexcept {
  const std::size_t row_bytes = layout.shape().row_bytes();
  const HeadRange heads = layout.heads();
  for (std::uint32_t plane = 0; plane < layout.shape().num_planes(); ++plane) {
    const CellSeed seed = cell_seed(content, layer, plane);
    const std::byte* cell = pool + layout.cell_offset(layer, page, plane);
    for (std::uint32_t i = 0; i < layout.options().page_tokens * heads.count; ++i) {
      const std::uint32_t token = i / heads.count;
      const std::uint32_t head = heads.first + i % heads.count;
      const std::byte* row = cell + layout.row_offset(token, head);
      const std::uint64_t expected = seed.row(token, head);
      if (row_matches(row, row_bytes, expected)) continue;
      return Mismatch{layer, page, plane, token, head, first_difference(row, row_bytes, expected)};
    }
  }
  return std::nullopt;
}

}  // namespace crossdock::kv::pattern
