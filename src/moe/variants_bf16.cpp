// Instantiates grouped_gemm for the twin, one list of variants. See variants_list.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe/variants_list.hpp"

namespace crossdock::moe {

FoundGemm find_bf16_gemm(const device::GroupedGemmConfig& config) {
  return find_gemm<[] { return bf16_gemms(); }>(config);
}

}  // namespace crossdock::moe
