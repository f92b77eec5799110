// prepare_weights: a plain matrix of all experts becomes what grouped_gemm takes, on a GPU
// (gemm/weight_tile.cuh). Launch on any rank: any grid (blocks take tiles of 128 x 128 values in
// turns), block = kConfig.threads = 256, kPrepareShared bytes of shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/weight_tile.cuh>

namespace crossdock::device {

struct PrepareWeightsConfig {
  u32 threads;
};

}  // namespace crossdock::device

namespace crossdock::device::kernel {

template <PrepareWeightsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    prepare_weights(CROSSDOCK_PARAMS(PrepareWeightsParams, p)) {
  static_assert(kConfig.threads == kPrepareThreads);
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  const WeightMatrix& m = p.matrix;
  const u32 tiles = m.experts * m.blocks() * m.groups();
  CROSSDOCK_NO_UNROLL
  for (u32 tile = block_index(); tile < tiles; tile += grid_size())
    WeightTileBlock(p, tile).run();
}

}  // namespace crossdock::device::kernel
