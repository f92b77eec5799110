// Preparation of weights on the CPU, tile by tile. See crossdock/moe/weights.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <crossdock/layout/grouped_gemm.cuh>
#include <crossdock/moe/weights.hpp>

#include "moe/variants.hpp"
#include "moe/weight_matrix.hpp"
#include "moe/weight_tile.hpp"

namespace crossdock::moe {
namespace {

constexpr u32 kTile = device::kWeightTile;

Result<> check_layout(const WeightLayout& layout) {
  if (layout.version != kWeightLayoutVersion)
    return invalid_argument(
        fmt::format("moe weights: a layout of version {}; this library makes and takes version {}: "
                    "prepare the weights again",
                    layout.version, kWeightLayoutVersion));
  if (layout.format > Format::kE2m1 || layout.scales > ScaleType::kUe8m0)
    return invalid_argument(fmt::format("moe weights: the unknown format {} with scales of type {}",
                                        static_cast<unsigned>(layout.format),
                                        static_cast<unsigned>(layout.scales)));
  if (layout.experts == 0 || layout.experts > device::kGemmMaxExperts)
    return invalid_argument(fmt::format("moe weights: experts = {} must be 1 to {} on one rank",
                                        layout.experts, device::kGemmMaxExperts));
  for (const auto& [what, value] :
       {std::pair{"hidden", layout.hidden}, std::pair{"inter", layout.inter}})
    if (value == 0 || value % kTile != 0)
      return invalid_argument(
          fmt::format("moe weights: {} = {} must be a positive multiple of {}, the values that "
                      "share a scale: pad with zeros to {}",
                      what, value, kTile, device::round_up(std::max(value, 1u), kTile)));
  return {};
}

Result<u64> prepare_matrix(const NamedMatrix& m) {
  const ReadPlain read = [](void* to, const u8* from, u64 bytes) -> Result<> {
    std::memcpy(to, from, bytes);
    return {};
  };
  u64 inexact = 0;
  for (u32 expert = 0; expert < m.matrix.experts; ++expert)
    for (u32 block = 0; block < m.matrix.blocks(); ++block) {
      u64 flaw = ~u64{0};
      for (u32 group = 0; group < m.matrix.groups(); ++group) {
        const TileResult got = prepare_tile(m.matrix, {expert, block, group});
        flaw = std::min(flaw, got.flaw);
        inexact += got.inexact;
      }
      if (flaw != ~u64{0}) return weight_flaw_error(m, flaw, read);
    }
  return inexact;
}

}  // namespace

inline namespace v1 {

std::string describe(const WeightLayout& layout) {
  return fmt::format("version {}, {}, {} experts, hidden {}, inter {}{}", layout.version,
                     format_name(layout.format), layout.experts, layout.hidden, layout.inter,
                     layout.scales == ScaleType::kUe8m0 ? ", ue8m0 scales" : "");
}

Result<WeightSizes> weight_sizes(const WeightLayout& layout) {
  CROSSDOCK_CHECK_OK(check_layout(layout));
  const u64 tiles = u64{layout.experts} * (layout.hidden / kTile) * (layout.inter / kTile);
  const u64 bytes = layout.format == Format::kE2m1   ? device::kFp4BlockBytes
                    : layout.format == Format::kE4m3 ? kTile * kTile
                                                     : 2 * kTile * kTile;
  const u64 scales = layout.format == Format::kBf16 ? 0 : tiles;
  return WeightSizes{.gate_up_bytes = 2 * tiles * bytes,
                     .gate_up_scales = 2 * scales,
                     .down_bytes = tiles * bytes,
                     .down_scales = scales,
                     .scale_bytes = scales == 0 ? 0 : width_of(layout.scales)};
}

Result<Weights> Weights::prepare(const PlainWeights& plain, Format format, ScaleType scales) {
  const WeightLayout layout = layout_of(plain, {.format = format, .scales = scales});
  CROSSDOCK_TRY(sizes, weight_sizes(layout));
  CROSSDOCK_CHECK_OK(check_plain(plain, layout));
  Weights out(layout);
  out.gate_up_.resize(sizes.gate_up_bytes);
  out.gate_up_scales_.resize(sizes.gate_up_scales * sizes.scale_bytes);
  out.down_.resize(sizes.down_bytes);
  out.down_scales_.resize(sizes.down_scales * sizes.scale_bytes);
  for (const NamedMatrix& m : weight_matrices(plain, out.view())) {
    CROSSDOCK_TRY(inexact, prepare_matrix(m));
    out.report_.inexact_groups += inexact;
  }
  out.report_.groups = folded_groups(plain, layout);
  return out;
}

WeightsView Weights::view() const noexcept {
  const bool scaled = layout_.format != Format::kBf16;
  return {.layout = layout_,
          .gate_up = gate_up_.data(),
          .gate_up_scales = scaled ? gate_up_scales_.data() : nullptr,
          .down = down_.data(),
          .down_scales = scaled ? down_scales_.data() : nullptr};
}

}  // namespace v1
}  // namespace crossdock::moe
