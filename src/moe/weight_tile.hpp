// Preparation of 128 x 128 weights on the CPU: what the kernel prepare_weights does on GPUs, value
// by value, and what it is compared with. No state; any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include <crossdock/layout/weights.cuh>

namespace crossdock::moe {

struct WeightTile {
  device::u32 expert, block, group;
};
struct TileResult {
  device::u64 flaw = ~device::u64{0};  // see weight_flaw(); all ones: none
  device::u64 inexact = 0;             // e2m1: groups of 32 that changed
};

// Nothing is written where there is a flaw. `to` and `to_scales` have room for the whole matrix.
TileResult prepare_tile(const device::WeightMatrix& matrix, const WeightTile& tile);

}  // namespace crossdock::moe
