// Instantiates grouped_gemm for the twin, each variant beside its text for the JIT. See
// variants.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe/variants.hpp"

#include <array>
#include <fmt/format.h>
#include <utility>

#include <crossdock/kernel/grouped_gemm.cuh>

namespace crossdock::moe {

using device::GroupedGemmConfig;
using device::GroupedGemmParams;
using symm::KernelRef;
using symm::make_kernel;
using symm::Member;

namespace {

constexpr std::array<GroupedGemmConfig, 20> kGemms = {{
    {.tile_rows = 128, .stages = 4, .fp8 = true, .swapped = false, .swiglu = false},
    {.tile_rows = 128, .stages = 4, .fp8 = true, .swapped = false, .swiglu = true},
    {.tile_rows = 128, .stages = 4, .fp8 = false, .swapped = false, .swiglu = false},
    {.tile_rows = 128, .stages = 4, .fp8 = false, .swapped = false, .swiglu = true},
    {.tile_rows = 64, .stages = 5, .fp8 = true, .swapped = false, .swiglu = false},
    {.tile_rows = 64, .stages = 5, .fp8 = true, .swapped = false, .swiglu = true},
    {.tile_rows = 64, .stages = 5, .fp8 = false, .swapped = false, .swiglu = false},
    {.tile_rows = 64, .stages = 5, .fp8 = false, .swapped = false, .swiglu = true},
    {.tile_rows = 32, .stages = 5, .fp8 = true, .swapped = true, .swiglu = false},
    {.tile_rows = 32, .stages = 5, .fp8 = true, .swapped = true, .swiglu = true},
    {.tile_rows = 32, .stages = 5, .fp8 = false, .swapped = true, .swiglu = false},
    {.tile_rows = 32, .stages = 5, .fp8 = false, .swapped = true, .swiglu = true},
    {.tile_rows = 16, .stages = 5, .fp8 = true, .swapped = true, .swiglu = false},
    {.tile_rows = 16, .stages = 5, .fp8 = true, .swapped = true, .swiglu = true},
    {.tile_rows = 16, .stages = 5, .fp8 = false, .swapped = true, .swiglu = false},
    {.tile_rows = 16, .stages = 5, .fp8 = false, .swapped = true, .swiglu = true},
    {.tile_rows = 8, .stages = 5, .fp8 = true, .swapped = true, .swiglu = false},
    {.tile_rows = 8, .stages = 5, .fp8 = true, .swapped = true, .swiglu = true},
    {.tile_rows = 8, .stages = 5, .fp8 = false, .swapped = true, .swiglu = false},
    {.tile_rows = 8, .stages = 5, .fp8 = false, .swapped = true, .swiglu = true},
}};

template <GroupedGemmConfig kConfig>
KernelRef<GroupedGemmParams> gemm() {
  using C = GroupedGemmConfig;
  return make_kernel<kConfig>(device::KernelId::kGroupedGemm, "grouped_gemm", "GroupedGemmConfig",
                              &device::kernel::grouped_gemm<kConfig>,
                              Member{"tile_rows", &C::tile_rows}, Member{"stages", &C::stages},
                              Member{"fp8", &C::fp8}, Member{"swapped", &C::swapped},
                              Member{"swiglu", &C::swiglu});
}

template <std::size_t... kIndex>
KernelRef<GroupedGemmParams> find(const GroupedGemmConfig& config, std::index_sequence<kIndex...>) {
  KernelRef<GroupedGemmParams> found;
  ((same(kGemms[kIndex], config) ? void(found = gemm<kGemms[kIndex]>()) : void()), ...);
  return found;
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

bool same(const GroupedGemmConfig& a, const GroupedGemmConfig& b) {
  return a.tile_rows == b.tile_rows && a.stages == b.stages && a.fp8 == b.fp8 &&
         a.swapped == b.swapped && a.swiglu == b.swiglu;
}

std::vector<GroupedGemmConfig> gemm_variants() {
  return {kGemms.begin(), kGemms.end()};
}

Result<GroupedGemmConfig> choose_gemm(const GemmCall& call) {
  const GemmTile tile = call.tile == GemmTile::kAuto ? choose_tile(call.expected_rows) : call.tile;
  const bool fp8 = call.weights.format == Format::kE4m3;
  for (const GroupedGemmConfig& config : kGemms)
    if (config.tile_rows == rows_of(tile) && config.fp8 == fp8 &&
        config.swiglu == call.swiglu.has_value())
      return config;
  return make_error(
      Code::kUnsupported,
      fmt::format("moe: no kernel for tiles of {} rows of {}{}: choose another tile", rows_of(tile),
                  fp8 ? "e4m3" : "bf16", call.swiglu ? " with SwiGLU" : ""));
}

Result<KernelRef<GroupedGemmParams>> gemm_kernel(const GroupedGemmConfig& config) {
  auto found = find(config, std::make_index_sequence<kGemms.size()>());
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
