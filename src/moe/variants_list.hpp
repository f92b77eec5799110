// The lists of variants of grouped_gemm by what they multiply, and the kernel of one of a list.
// Each list is instantiated for the twin in a file of its own, since that takes the compiler long.
// No state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <utility>

#include <crossdock/kernel/grouped_gemm.cuh>

#include "moe/variants.hpp"

namespace crossdock::moe {

// Every tile, with and without SwiGLU.
template <std::size_t kTiles>
constexpr std::array<device::GroupedGemmConfig, 2 * kTiles> with_swiglu(
    const std::array<device::GroupedGemmConfig, kTiles>& plain) {
  std::array<device::GroupedGemmConfig, 2 * kTiles> all{};
  for (std::size_t i = 0; i < 2 * kTiles; ++i) {
    all[i] = plain[i / 2];
    all[i].swiglu = i % 2 != 0;
  }
  return all;
}

constexpr auto e4m3_gemms(bool ue8m0) {
  using C = device::GroupedGemmConfig;
  return with_swiglu(std::array{
      C{.tile_rows = 128, .stages = 4, .fp8 = true, .ue8m0 = ue8m0},
      C{.tile_rows = 128, .stages = 4, .fp8 = true, .ue8m0 = ue8m0, .hand_over = true},
      C{.tile_rows = 64, .stages = 5, .fp8 = true, .ue8m0 = ue8m0},
      C{.tile_rows = 32, .stages = 5, .fp8 = true, .swapped = true, .ue8m0 = ue8m0},
      C{.tile_rows = 16, .stages = 5, .fp8 = true, .swapped = true, .ue8m0 = ue8m0},
      C{.tile_rows = 8, .stages = 5, .fp8 = true, .swapped = true, .ue8m0 = ue8m0},
  });
}
constexpr auto bf16_gemms() {
  using C = device::GroupedGemmConfig;
  return with_swiglu(std::array{
      C{.tile_rows = 128, .stages = 4},
      C{.tile_rows = 64, .stages = 5},
      C{.tile_rows = 32, .stages = 5, .swapped = true},
      C{.tile_rows = 16, .stages = 5, .swapped = true},
      C{.tile_rows = 8, .stages = 5, .swapped = true},
  });
}
// Stages are half as large, so there are twice as many; with 128 rows a stage's weights are there
// twice, packed and as e4m3.
constexpr auto e2m1_gemms(bool ue8m0) {
  using C = device::GroupedGemmConfig;
  return with_swiglu(std::array{
      C{.tile_rows = 128, .stages = 3, .fp8 = true, .ue8m0 = ue8m0, .fp4 = true},
      C{.tile_rows = 64, .stages = 7, .fp8 = true, .swapped = true, .ue8m0 = ue8m0, .fp4 = true},
      C{.tile_rows = 32,
        .stages = 9,
        .fp8 = true,
        .swapped = true,
        .ue8m0 = ue8m0,
        .fp4 = true,
        .spare_integers = true},
      C{.tile_rows = 16, .stages = 10, .fp8 = true, .swapped = true, .ue8m0 = ue8m0, .fp4 = true},
      C{.tile_rows = 8, .stages = 11, .fp8 = true, .swapped = true, .ue8m0 = ue8m0, .fp4 = true},
  });
}

// The kernel of a configuration; its `twin` is null where it is not in the list.
using FoundGemm = symm::KernelRef<device::GroupedGemmParams>;
FoundGemm find_bf16_gemm(const device::GroupedGemmConfig& config);
FoundGemm find_e4m3_gemm(const device::GroupedGemmConfig& config);
FoundGemm find_e4m3_ue8m0_gemm(const device::GroupedGemmConfig& config);
FoundGemm find_e2m1_gemm(const device::GroupedGemmConfig& config);
FoundGemm find_e2m1_ue8m0_gemm(const device::GroupedGemmConfig& config);

namespace detail {

template <device::GroupedGemmConfig kConfig>
FoundGemm gemm() {
  using C = device::GroupedGemmConfig;
  using symm::Member;
  return symm::make_kernel<kConfig>(
      device::KernelId::kGroupedGemm, "grouped_gemm", "GroupedGemmConfig",
      &device::kernel::grouped_gemm<kConfig>, Member{"tile_rows", &C::tile_rows},
      Member{"stages", &C::stages}, Member{"fp8", &C::fp8}, Member{"swapped", &C::swapped},
      Member{"swiglu", &C::swiglu}, Member{"ue8m0", &C::ue8m0}, Member{"fp4", &C::fp4},
      Member{"hand_over", &C::hand_over}, Member{"spare_integers", &C::spare_integers});
}

// `kList`: a function that gives the list.
template <auto kList, std::size_t... kIndex>
FoundGemm find_in(const device::GroupedGemmConfig& config, std::index_sequence<kIndex...>) {
  FoundGemm found;
  ((same(kList()[kIndex], config) ? void(found = gemm<kList()[kIndex]>()) : void()), ...);
  return found;
}

}  // namespace detail

template <auto kList>
FoundGemm find_gemm(const device::GroupedGemmConfig& config) {
  return detail::find_in<kList>(config, std::make_index_sequence<kList().size()>());
}

}  // namespace crossdock::moe
