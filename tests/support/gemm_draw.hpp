// Cases of grouped products drawn from a seed: every combination of formats, scales, tiles, layouts
// and epilogues that the API takes may come. Test code.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <ostream>

#include "support/gemm_case.hpp"

namespace crossdock::testing {

// One after the other, each below what it was asked for.
class GemmDraws {
 public:
  explicit GemmDraws(u32 seed) : state_(seed * 0x9e3779b9u + 1) {}
  u32 below(u32 limit) {
    state_ = device::mix(state_ + 0x85ebca6bu);
    return state_ % limit;
  }
  bool coin() { return below(2) == 1; }

 private:
  u32 state_;
};

struct GemmDrawn {
  GemmCase c;
  std::optional<bool> hand_over;
};

inline GemmDrawn draw_gemm(u32 seed) {
  using moe::Format;
  using moe::GemmTile;
  constexpr GemmTile kTiles[] = {GemmTile::k128, GemmTile::k64, GemmTile::kFew32, GemmTile::kFew16,
                                 GemmTile::kFew8};
  constexpr u32 kSums[] = {128, 256, 384, 640, 1024};
  GemmDraws d(seed);
  GemmCase c;
  c.seed = seed;
  c.format = static_cast<Format>(d.below(3));
  if (c.fp8() && d.coin()) c.scale_type = moe::ScaleType::kUe8m0;
  c.tile = kTiles[d.below(5)];
  c.layout = static_cast<GemmLayout>(d.below(3));
  if (d.coin())
    c.swiglu = moe::Swiglu{.clamp = d.coin() ? 7.0f : std::numeric_limits<float>::infinity(),
                           .fast = d.coin()};
  c.n = c.swiglu ? 256 * (1 + d.below(2)) : 128 * (1 + d.below(4));
  c.k = kSums[d.below(5)];
  c.row_weights = d.coin();
  if (d.coin()) c.bias = d.coin() ? moe::Number::kBf16 : moe::Number::kF32;
  c.alignment = d.coin() ? 4 : 128;
  c.counts.resize(1 + d.below(4));
  for (u32& count : c.counts)
    count = d.below(4) == 0 ? 0 : d.below(8) == 0 ? 129 + d.below(8) : 1 + d.below(40);
  const std::optional<bool> given = d.below(3) == 0 ? std::nullopt : std::optional(d.coin());
  return {c, given};
}

inline std::ostream& operator<<(std::ostream& to, const GemmDrawn& drawn) {
  const GemmCase& c = drawn.c;
  to << "seed " << c.seed << ": format " << int(c.format) << " scales " << int(c.scale_type)
     << " tile " << int(c.tile) << " layout " << int(c.layout) << " n " << c.n << " k " << c.k
     << " swiglu " << c.swiglu.has_value() << " fast " << (c.swiglu && c.swiglu->fast) << " bias "
     << (c.bias ? int(*c.bias) : -1) << " weights " << c.row_weights << " counts";
  for (const u32 count : c.counts)
    to << " " << count;
  return to;
}

}  // namespace crossdock::testing
