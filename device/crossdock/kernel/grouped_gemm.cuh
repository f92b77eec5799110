// grouped_gemm: the rows of many experts times the weights of each, with an epilogue. Counts and
// offsets are read on the device, so the launch does not depend on them. Launch on any rank: any
// grid (blocks take tiles in turns; one a multiprocessor is best), block = gemm_threads(kConfig),
// shared memory grouped_gemm_shared(kConfig).bytes.
//
//   warpgroup 0   loads, one step ahead by as many stages as there are   gemm/load_role.cuh
//   warpgroups 1, 2   products and epilogue                              gemm/math_role.cuh
//   warpgroup 3   unpacks weights, in tiles of many rows with e2m1       gemm/unpack_role.cuh
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/gemm/load_role.cuh>
#include <crossdock/gemm/math_role.cuh>
#include <crossdock/gemm/unpack_role.cuh>

namespace crossdock::device::kernel {

template <GroupedGemmConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(gemm_threads(kConfig), 1)
    grouped_gemm(CROSSDOCK_PARAMS(GroupedGemmParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  const GemmBlock<kConfig> block(p);
  if (!block.prepare()) return;
  if constexpr (gemm_unpacks_apart(kConfig)) {
    run_roles<GemmLoadRole<kConfig>, GemmMathRole<kConfig>, GemmUnpackRole<kConfig>>(block);
  } else {
    run_roles<GemmLoadRole<kConfig>, GemmMathRole<kConfig>>(block);
  }
}

}  // namespace crossdock::device::kernel
