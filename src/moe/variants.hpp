// The kernel variants of grouped_gemm (device/kernels.json), and which one a call takes. Only files
// that include variants_list.hpp see the kernel itself. No state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <crossdock/core/result.hpp>
#include <crossdock/layout/grouped_gemm.cuh>
#include <crossdock/moe/grouped_gemm.hpp>

#include "symm/kernel.hpp"

namespace crossdock::moe {

using device::u32;
using device::u64;
using device::u8;

std::vector<device::GroupedGemmConfig> gemm_variants();
// The variant that a call takes; kUnsupported when there is none.
Result<device::GroupedGemmConfig> choose_gemm(const GemmCall& call);
Result<symm::KernelRef<device::GroupedGemmParams>> gemm_kernel(
    const device::GroupedGemmConfig& config);
// "e4m3"; for messages.
const char* format_name(Format format);
bool same(const device::GroupedGemmConfig& a, const device::GroupedGemmConfig& b);

}  // namespace crossdock::moe
