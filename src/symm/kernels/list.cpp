// Instantiates the first kernels for the twin, each beside its text for the JIT. See list.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/kernels/list.hpp"

#include <array>
#include <fmt/format.h>
#include <utility>

#include <crossdock/kernel/all_gather_counts.cuh>
#include <crossdock/kernel/barrier.cuh>
#include <crossdock/kernel/convert_check.cuh>
#include <crossdock/kernel/flag_ping_pong.cuh>
#include <crossdock/kernel/grid_sync_bench.cuh>
#include <crossdock/kernel/pull_rows.cuh>
#include <crossdock/kernel/push_rows.cuh>
#include <crossdock/kernel/ring_all_to_all.cuh>
#include <crossdock/kernel/wgmma_check.cuh>

namespace crossdock::symm {

using namespace crossdock::device;  // NOLINT: everything here is about device types

namespace {

constexpr std::array<RingAllToAllConfig, 2> kRings = {{
    {.warp_pairs = 4, .stages = 4, .batch = 8},
    {.warp_pairs = 2, .stages = 2, .batch = 2},
}};
constexpr std::array<MoveRowsConfig, 3> kMoves = {{
    {.warps = 8, .stages = 2},
    {.warps = 4, .stages = 2},
    {.warps = 8, .stages = 3},
}};
constexpr std::array<WgmmaCheckConfig, 20> kWgmmas = {{
    {.n = 8, .fp8 = true},
    {.n = 16, .fp8 = true},
    {.n = 32, .fp8 = true},
    {.n = 64, .fp8 = true},
    {.n = 96, .fp8 = true},
    {.n = 128, .fp8 = true},
    {.n = 192, .fp8 = true},
    {.n = 256, .fp8 = true},
    {.n = 8, .fp8 = false},
    {.n = 64, .fp8 = false},
    {.n = 256, .fp8 = false},
    {.n = 8, .fp8 = false, .a_registers = true},
    {.n = 64, .fp8 = false, .a_registers = true},
    {.n = 256, .fp8 = false, .a_registers = true},
    {.n = 8, .fp8 = true, .a_registers = true},
    {.n = 16, .fp8 = true, .a_registers = true},
    {.n = 32, .fp8 = true, .a_registers = true},
    {.n = 64, .fp8 = true, .a_registers = true},
    {.n = 128, .fp8 = true, .tensor_map = true},
    {.n = 64, .fp8 = false, .a_registers = true, .tensor_map = true},
}};

template <GridSyncBenchConfig kConfig>
KernelRef<GridSyncBenchParams> grid_sync() {
  using C = GridSyncBenchConfig;
  return make_kernel<kConfig>(KernelId::kGridSyncBench, "grid_sync_bench", "GridSyncBenchConfig",
                              &kernel::grid_sync_bench<kConfig>, Member{"threads", &C::threads},
                              Member{"verify", &C::verify});
}

template <BarrierConfig kConfig>
KernelRef<BarrierParams> barrier() {
  using C = BarrierConfig;
  return make_kernel<kConfig>(KernelId::kBarrier, "barrier", "BarrierConfig",
                              &kernel::barrier<kConfig>, Member{"threads", &C::threads},
                              Member{"grid_sync", &C::grid_sync}, Member{"verify", &C::verify});
}

template <FlagPingPongConfig kConfig>
KernelRef<FlagPingPongParams> ping_pong() {
  return make_kernel<kConfig>(KernelId::kFlagPingPong, "flag_ping_pong", "FlagPingPongConfig",
                              &kernel::flag_ping_pong<kConfig>,
                              Member{"release", &FlagPingPongConfig::release});
}

template <RingAllToAllConfig kConfig>
KernelRef<RingAllToAllParams> ring() {
  using C = RingAllToAllConfig;
  return make_kernel<kConfig>(KernelId::kRingAllToAll, "ring_all_to_all", "RingAllToAllConfig",
                              &kernel::ring_all_to_all<kConfig>,
                              Member{"warp_pairs", &C::warp_pairs}, Member{"stages", &C::stages},
                              Member{"batch", &C::batch});
}

template <MoveRowsConfig kConfig>
KernelRef<MoveRowsParams> push() {
  using C = MoveRowsConfig;
  return make_kernel<kConfig>(KernelId::kPushRows, "push_rows", "MoveRowsConfig",
                              &kernel::push_rows<kConfig>, Member{"warps", &C::warps},
                              Member{"stages", &C::stages});
}

template <MoveRowsConfig kConfig>
KernelRef<MoveRowsParams> pull() {
  using C = MoveRowsConfig;
  return make_kernel<kConfig>(KernelId::kPullRows, "pull_rows", "MoveRowsConfig",
                              &kernel::pull_rows<kConfig>, Member{"warps", &C::warps},
                              Member{"stages", &C::stages});
}

template <WgmmaCheckConfig kConfig>
KernelRef<WgmmaCheckParams> wgmma() {
  using C = WgmmaCheckConfig;
  return make_kernel<kConfig>(KernelId::kNone, "wgmma_check", "WgmmaCheckConfig",
                              &kernel::wgmma_check<kConfig>, Member{"n", &C::n},
                              Member{"fp8", &C::fp8}, Member{"a_registers", &C::a_registers},
                              Member{"tensor_map", &C::tensor_map});
}

bool same(const RingAllToAllConfig& a, const RingAllToAllConfig& b) {
  return a.warp_pairs == b.warp_pairs && a.stages == b.stages && a.batch == b.batch;
}
bool same(const MoveRowsConfig& a, const MoveRowsConfig& b) {
  return a.warps == b.warps && a.stages == b.stages;
}
bool same(const WgmmaCheckConfig& a, const WgmmaCheckConfig& b) {
  return a.n == b.n && a.fp8 == b.fp8 && a.a_registers == b.a_registers &&
         a.tensor_map == b.tensor_map;
}

// The kernel of the variant that equals `config`; `make` gives it for an index known at compile
// time.
template <class Params, class Config, std::size_t kCount, class Make, std::size_t... kIndex>
Result<KernelRef<Params>> choose(const char* name, const std::array<Config, kCount>& variants,
                                 const Config& config, const Make& make,
                                 std::index_sequence<kIndex...>) {
  KernelRef<Params> found;
  std::string known;
  const auto consider = [&](const auto index) {
    KernelRef<Params> kernel = make(index);
    known += (known.empty() ? "" : ", ") + kernel.spec.config;
    if (same(variants[index], config)) found = std::move(kernel);
  };
  (consider(std::integral_constant<std::size_t, kIndex>{}), ...);
  if (found.twin == nullptr)
    return invalid_argument(
        fmt::format("{}: there is no variant with this configuration; there are {}", name, known));
  return found;
}

}  // namespace

KernelRef<GridSyncBenchParams> grid_sync_kernel(bool verify) {
  return verify ? grid_sync<{.threads = kGridSyncThreads, .verify = true}>()
                : grid_sync<{.threads = kGridSyncThreads, .verify = false}>();
}

KernelRef<BarrierParams> barrier_kernel(bool with_grid_sync, bool verify) {
  if (with_grid_sync)
    return verify ? barrier<{.threads = kGridBarrierThreads, .grid_sync = true, .verify = true}>()
                  : barrier<{.threads = kGridBarrierThreads, .grid_sync = true, .verify = false}>();
  return verify ? barrier<{.threads = kBarrierThreads, .grid_sync = false, .verify = true}>()
                : barrier<{.threads = kBarrierThreads, .grid_sync = false, .verify = false}>();
}

KernelRef<AllGatherCountsParams> all_gather_counts_kernel() {
  constexpr AllGatherCountsConfig kConfig{.threads = kAllGatherThreads};
  return make_kernel<kConfig>(KernelId::kAllGatherCounts, "all_gather_counts",
                              "AllGatherCountsConfig", &kernel::all_gather_counts<kConfig>,
                              Member{"threads", &AllGatherCountsConfig::threads});
}

KernelRef<FlagPingPongParams> flag_ping_pong_kernel(bool release) {
  return release ? ping_pong<{.release = true}>() : ping_pong<{.release = false}>();
}

KernelRef<ConvertCheckParams> convert_check_kernel() {
  constexpr ConvertCheckConfig kConfig{.threads = kConvertCheckThreads};
  return make_kernel<kConfig>(KernelId::kNone, "convert_check", "ConvertCheckConfig",
                              &kernel::convert_check<kConfig>,
                              Member{"threads", &ConvertCheckConfig::threads});
}

Result<KernelRef<RingAllToAllParams>> ring_kernel(const RingAllToAllConfig& config) {
  return choose<RingAllToAllParams>(
      "ring_all_to_all", kRings, config, [](auto index) { return ring<kRings[index]>(); },
      std::make_index_sequence<kRings.size()>{});
}

Result<KernelRef<MoveRowsParams>> push_rows_kernel(const MoveRowsConfig& config) {
  return choose<MoveRowsParams>(
      "push_rows", kMoves, config, [](auto index) { return push<kMoves[index]>(); },
      std::make_index_sequence<kMoves.size()>{});
}

Result<KernelRef<MoveRowsParams>> pull_rows_kernel(const MoveRowsConfig& config) {
  return choose<MoveRowsParams>(
      "pull_rows", kMoves, config, [](auto index) { return pull<kMoves[index]>(); },
      std::make_index_sequence<kMoves.size()>{});
}

Result<KernelRef<WgmmaCheckParams>> wgmma_check_kernel(const WgmmaCheckConfig& config) {
  return choose<WgmmaCheckParams>(
      "wgmma_check", kWgmmas, config, [](auto index) { return wgmma<kWgmmas[index]>(); },
      std::make_index_sequence<kWgmmas.size()>{});
}

std::vector<RingAllToAllConfig> ring_variants() {
  return {kRings.begin(), kRings.end()};
}
std::vector<MoveRowsConfig> move_rows_variants() {
  return {kMoves.begin(), kMoves.end()};
}
std::vector<WgmmaCheckConfig> wgmma_check_variants() {
  return {kWgmmas.begin(), kWgmmas.end()};
}

u32 ring_shared_bytes(const RingAllToAllConfig& config, u32 row_bytes) {
  return kernel::ring_shared_bytes(config, row_bytes);
}
u32 move_rows_shared_bytes(const MoveRowsConfig& config, u32 row_bytes) {
  return kernel::move_rows_shared_bytes(config, row_bytes);
}
u32 wgmma_check_shared_bytes(const WgmmaCheckConfig& config) {
  return kernel::wgmma_check_shared_bytes(config.n);
}

}  // namespace crossdock::symm
