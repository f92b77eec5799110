// pull_rows: the bandwidth of bulk loads from peers: rows of random other ranks, or of one, to this
// rank. Launch on the ranks that move: any grid, block = 32 * kConfig.warps threads, shared memory
// `move_rows_shared_bytes`. Symmetric memory: the two areas of MoveRowsParams. Nothing is
// announced: the host, or a barrier kernel, decides when all ranks are done.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/kernel/move_rows.cuh>

namespace crossdock::device::kernel {

struct PullPlaces {
  const MoveRowsParams& p;
  CROSSDOCK_DEVICE const u8* source(u32 row) const {
    return p.view.at<u8>(p.source + u64{row % p.slots} * p.row_bytes, row_peer(p, row));
  }
  CROSSDOCK_DEVICE u8* destination(u32 row) const {
    return p.view.at<u8>(p.destination + u64{row % p.slots} * p.row_bytes);
  }
};

template <MoveRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    pull_rows(CROSSDOCK_PARAMS(MoveRowsParams, p)) {
  ptx::grid_dependency_wait();
  move_rows<kConfig>(p, PullPlaces{p});
}

}  // namespace crossdock::device::kernel
