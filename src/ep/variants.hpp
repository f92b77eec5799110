// The kernel variants of dispatch and combine (device/kernels.json), and which one a call takes.
// Only variants.cpp includes the kernels themselves. No state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <crossdock/core/result.hpp>
#include <crossdock/layout/ep_combine.cuh>
#include <crossdock/layout/ep_copy.cuh>
#include <crossdock/layout/ep_dispatch.cuh>
#include <crossdock/layout/ep_expanded.cuh>
#include <crossdock/layout/ep_grouping.cuh>
#include <crossdock/layout/ep_packets.cuh>
#include <crossdock/layout/ep_small.cuh>
#include <crossdock/layout/ep_small_expanded.cuh>

#include "symm/kernel.hpp"

namespace crossdock::ep {

// Shared memory that one block may have on the GPUs these kernels are for.
inline constexpr device::u32 kMaxSharedBytes = 227 << 10;

// What a call is made of; the variant follows from it.
struct DispatchShape {
  device::u32 input_row_bytes = 0;
  bool cast = false;
  bool wide_ids = false;
  device::u32 world = 1;
  device::u32 experts = 1;
  device::u32 groups = 1;  // of 32 tokens in a block
  bool flags = false;      // of rows, for blocks that copy them as they come
};

// The scales of a cast row, padded to what a bulk store takes.
constexpr device::u32 cast_scale_bytes(device::u32 hidden, bool ue8m0 = false) {
  const device::u32 groups = device::ceil_div(hidden, device::kEpScaleGroup);
  return device::round_up(groups * (ue8m0 ? 1 : 4), 16u);
}

std::vector<device::EpDispatchConfig> dispatch_variants(bool flags = false);
// The first variant that fits; kUnsupported when none does.
Result<device::EpDispatchConfig> choose_dispatch(const DispatchShape& shape);
device::u32 dispatch_shared_bytes(const device::EpDispatchConfig& config,
                                  const DispatchShape& shape);
Result<symm::KernelRef<device::EpDispatchParams>> dispatch_kernel(
    const device::EpDispatchConfig& config);
Result<symm::KernelRef<device::EpExpandedDispatchParams>> expanded_dispatch_kernel(
    const device::EpDispatchConfig& config);

// Of few tokens: the most warps that fit.
Result<device::EpSmallConfig> choose_small_dispatch(device::u32 input_row_bytes, bool cast,
                                                    device::u32 world, device::u32 experts,
                                                    device::u32 tokens);
symm::KernelRef<device::EpSmallParams> small_dispatch_kernel(const device::EpSmallConfig& config);
symm::KernelRef<device::EpSmallExpandedParams> small_expanded_kernel(
    const device::EpSmallConfig& config);
symm::KernelRef<device::EpCombineParams> small_combine_kernel(
    device::EpPayload payload = device::EpPayload::kBf16);
symm::KernelRef<device::EpAwaitReadsParams> await_reads_kernel();
symm::KernelRef<device::EpMaskParams> mask_kernel();
inline constexpr device::u32 kPacketWarps = 8;
symm::KernelRef<device::EpPacketParams> packet_dispatch_kernel(bool cast);
device::u32 packet_shared_bytes(device::u32 experts);
symm::KernelRef<device::EpPacketCombineParams> packet_combine_kernel();

device::EpCombineConfig combine_variant(bool pushes);
symm::KernelRef<device::EpCombineParams> combine_kernel(bool pushes);

inline constexpr device::u32 kGroupThreads = 1024;
inline constexpr device::u32 kReduceWarps = 16;
symm::KernelRef<device::EpGroupRowsParams> group_rows_kernel();
symm::KernelRef<device::EpReduceRowsParams> reduce_rows_kernel(bool packs);
device::EpExpandRowsConfig expand_rows_variant();
symm::KernelRef<device::EpExpandRowsParams> expand_rows_kernel();

inline constexpr device::u32 kCopyThreads = 512;
symm::KernelRef<device::EpCopyRowsParams> copy_rows_kernel();

}  // namespace crossdock::ep
