// The first kernels as KernelRefs: the variants of device/kernels.json that the library launches.
// Only list.cpp includes the kernels themselves. No state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <crossdock/core/result.hpp>
#include <crossdock/layout/check.cuh>
#include <crossdock/layout/exchange.cuh>
#include <crossdock/layout/probe.cuh>

#include "symm/kernel.hpp"

namespace crossdock::symm {

// Threads of a block of each kernel.
inline constexpr device::u32 kBarrierThreads = 64;       // one block a rank
inline constexpr device::u32 kGridBarrierThreads = 256;  // all blocks
inline constexpr device::u32 kGridSyncThreads = 256;
inline constexpr device::u32 kAllGatherThreads = 256;
inline constexpr device::u32 kConvertCheckThreads = 256;

KernelRef<device::GridSyncBenchParams> grid_sync_kernel(bool verify);
KernelRef<device::BarrierParams> barrier_kernel(bool grid_sync, bool verify);
KernelRef<device::AllGatherCountsParams> all_gather_counts_kernel();
KernelRef<device::FlagPingPongParams> flag_ping_pong_kernel(bool release);
KernelRef<device::ConvertCheckParams> convert_check_kernel();

// kInvalidArgument with the variants there are, when the configuration is not one of them.
Result<KernelRef<device::RingAllToAllParams>> ring_kernel(const device::RingAllToAllConfig& config);
Result<KernelRef<device::MoveRowsParams>> push_rows_kernel(const device::MoveRowsConfig& config);
Result<KernelRef<device::MoveRowsParams>> pull_rows_kernel(const device::MoveRowsConfig& config);
Result<KernelRef<device::WgmmaCheckParams>> wgmma_check_kernel(
    const device::WgmmaCheckConfig& config);

// The configurations that these take.
std::vector<device::RingAllToAllConfig> ring_variants();
std::vector<device::MoveRowsConfig> move_rows_variants();
std::vector<device::WgmmaCheckConfig> wgmma_check_variants();

// Shared memory of a block.
device::u32 ring_shared_bytes(const device::RingAllToAllConfig& config, device::u32 row_bytes);
device::u32 move_rows_shared_bytes(const device::MoveRowsConfig& config, device::u32 row_bytes);
device::u32 wgmma_check_shared_bytes(const device::WgmmaCheckConfig& config);

}  // namespace crossdock::symm
