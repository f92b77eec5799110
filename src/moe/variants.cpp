// Which variant of grouped_gemm a call takes, and its kernel. See variants.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe/variants.hpp"

#include <fmt/format.h>

#include "moe/variants_list.hpp"

namespace crossdock::moe {

using device::GroupedGemmConfig;
using device::GroupedGemmParams;
using symm::KernelRef;

namespace {

// Sums of so many values and more are worth another warp that stores them (gemm/hand_over.cuh):
// shorter ones have not been measured.
constexpr u32 kLongSum = 1536;

// Whether another warp may store the outputs: there is none where rows are gathered, and a bias
// lies where outputs would.
bool may_hand_over(const GemmCall& call) {
  return call.groups.rows == nullptr && !call.bias;
}

u32 rows_of(GemmTile tile) {
  switch (tile) {
    case GemmTile::k64:
      return 64;
    case GemmTile::kFew32:
      return 32;
    case GemmTile::kFew16:
      return 16;
    case GemmTile::kFew8:
      return 8;
    default:
      return 128;
  }
}

}  // namespace

const char* format_name(Format format) {
  switch (format) {
    case Format::kE4m3:
      return "e4m3";
    case Format::kE2m1:
      return "e2m1";
    default:
      return "bf16";
  }
}

bool same(const GroupedGemmConfig& a, const GroupedGemmConfig& b) {
  return a.tile_rows == b.tile_rows && a.stages == b.stages && a.fp8 == b.fp8 &&
         a.swapped == b.swapped && a.swiglu == b.swiglu && a.ue8m0 == b.ue8m0 && a.fp4 == b.fp4 &&
         a.hand_over == b.hand_over && a.spare_integers == b.spare_integers;
}

std::vector<GroupedGemmConfig> gemm_variants() {
  std::vector<GroupedGemmConfig> all;
  const auto add = [&](const auto& list) { all.insert(all.end(), list.begin(), list.end()); };
  add(bf16_gemms());
  for (const bool ue8m0 : {false, true}) {
    add(e4m3_gemms(ue8m0));
    add(e2m1_gemms(ue8m0));
  }
  return all;
}

Result<GroupedGemmConfig> choose_gemm(const GemmCall& call) {
  const Format format = call.weights.format;
  const bool chosen = call.tile != GemmTile::kAuto;
  const u32 rows = rows_of(chosen ? call.tile : choose_tile(call.expected_rows));
  const bool ue8m0 = format != Format::kBf16 && call.scale_type == ScaleType::kUe8m0;
  const bool hand_over =
      rows == 128 && format == Format::kE4m3 && call.weights.k >= kLongSum && may_hand_over(call);
  for (const GroupedGemmConfig& config : gemm_variants())
    if (config.tile_rows == rows && config.fp8 == (format != Format::kBf16) &&
        config.fp4 == (format == Format::kE2m1) && config.ue8m0 == ue8m0 &&
        config.swiglu == call.swiglu.has_value() && config.hand_over == hand_over)
      return config;
  return make_error(Code::kUnsupported,
                    fmt::format("moe: no kernel for tiles of {} rows with weights of {}{}", rows,
                                format_name(format), call.swiglu ? " with SwiGLU" : ""));
}

Result<KernelRef<GroupedGemmParams>> gemm_kernel(const GroupedGemmConfig& config) {
  const auto find = config.fp4     ? (config.ue8m0 ? find_e2m1_ue8m0_gemm : find_e2m1_gemm)
                    : config.ue8m0 ? find_e4m3_ue8m0_gemm
                    : config.fp8   ? find_e4m3_gemm
                                   : find_bf16_gemm;
  auto found = find(config);
  if (found.twin == nullptr)
    return invalid_argument("moe: this configuration of grouped_gemm is not in the list");
  return found;
}

inline namespace v1 {

GemmTile choose_tile(std::uint32_t expected_rows) {
  if (expected_rows == 0 || expected_rows > 64) return GemmTile::k128;
  if (expected_rows > 32) return GemmTile::k64;
  if (expected_rows > 16) return GemmTile::kFew32;
  return expected_rows > 8 ? GemmTile::kFew16 : GemmTile::kFew8;
}

}  // namespace v1
}  // namespace crossdock::moe
