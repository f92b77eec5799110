// Instantiates prepare_weights for the twin. See weight_kernel.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe/weight_kernel.hpp"

#include <crossdock/kernel/prepare_weights.cuh>

namespace crossdock::moe {

symm::KernelRef<device::PrepareWeightsParams> weight_kernel() {
  using C = device::PrepareWeightsConfig;
  constexpr C kConfig{.threads = device::kPrepareThreads};
  return symm::make_kernel<kConfig>(
      device::KernelId::kPrepareWeights, "prepare_weights", "PrepareWeightsConfig",
      &device::kernel::prepare_weights<kConfig>, symm::Member{"threads", &C::threads});
}
symm::BlockShape weight_kernel_block() {
  return {.threads = device::kPrepareThreads, .shared_bytes = device::kPrepareShared};
}

}  // namespace crossdock::moe
