// The kernel that prepares weights on a rank. Only weight_kernel.cpp includes the kernel itself. No
// state. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/weights.cuh>

#include "symm/kernel.hpp"
#include "symm/launch.hpp"

namespace crossdock::moe {

symm::KernelRef<device::PrepareWeightsParams> weight_kernel();
symm::BlockShape weight_kernel_block();

}  // namespace crossdock::moe
