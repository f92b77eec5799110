// Instantiates grouped_gemm for the twin, one list of variants. See variants_list.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "moe/variants_list.hpp"

namespace crossdock::moe {

FoundGemm find_e4m3_gemm(const device::GroupedGemmConfig& config) {
  return find_gemm<[] { return e4m3_gemms(false); }>(config);
}

}  // namespace crossdock::moe
