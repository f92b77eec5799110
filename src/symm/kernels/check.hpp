// Host side of wgmma_check and convert_check, which compare one GPU with plain definitions: each
// runs on one rank from input to verdict. No state between calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include <crossdock/layout/check.cuh>

#include "symm/launch.hpp"

namespace crossdock::symm {

// Multiplies small integers and compares every element with the plain product, which is exact.
// The number of wrong elements, of 64 * config.n.
Result<u32> check_wgmma(Launcher& launcher, Rank& rank, const device::WgmmaCheckConfig& config,
                        Deadline deadline);

struct ConvertRange {
  u32 first = 0;  // fp32 bit patterns first, first + stride, ...
  u32 stride = 1;
  u32 count = 1;
  u32 blocks = 1;
};
// Differences between the GPU's conversions and the definitions, by device::ConvertCheck.
using ConvertMismatches = std::array<u32, device::kConvertChecks>;
Result<ConvertMismatches> check_conversions(Launcher& launcher, Rank& rank,
                                            const ConvertRange& range, Deadline deadline);

}  // namespace crossdock::symm
