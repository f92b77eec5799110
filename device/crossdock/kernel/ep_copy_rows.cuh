// ep_copy_rows: as many rows as have arrived, with what goes with them, from one place of this
// rank's memory to another: out of the transit into memory that a handle owns; for combine, what
// the experts have made elsewhere, to where peers read it; ids, weights and token numbers of an
// earlier dispatch for one that reuses its routing. Launch on any rank: any grid, block =
// kConfig.threads (at least a warp), no shared memory.
//
//   to where peers read: pulled[source] >= free_at[source] (acquire) first, since they may still
//   read there what the combine before has left
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/wait_free.cuh>
#include <crossdock/layout/ep_copy.cuh>

namespace crossdock::device {

struct EpRowsCopy {
  static constexpr u32 kBatch = 4;  // loads in flight of a thread
  const EpCopyRowsParams& p;

  template <class T>
  CROSSDOCK_DEVICE static void copy(u8* to, const u8* from, u64 bytes) {
    const u64 count = bytes / sizeof(T);
    const u64 threads = u64{grid_size()} * block_size();
    const auto* source = reinterpret_cast<const T*>(from);
    auto* target = reinterpret_cast<T*>(to);
    for (u64 i = u64{block_index()} * block_size() + thread_index(); i < count;
         i += threads * kBatch) {
      T values[kBatch]{};
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j)
        if (i + j * threads < count) values[j] = ptx::ld_weak(source + i + j * threads);
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j)
        if (i + j * threads < count) ptx::st_weak(target + i + j * threads, values[j]);
    }
  }
  CROSSDOCK_DEVICE void copy_plane(const EpPlane& plane, u32 rows) const {
    const u64 bytes = u64{rows} * plane.row_bytes;
    for (u32 column = 0; column < plane.columns; ++column) {
      const u8* from = plane.from + column * plane.pitch;
      u8* to = plane.to + column * plane.pitch;
      // Columns begin on multiples of 16 bytes too.
      const u64 vectors = bytes / sizeof(U32x4) * sizeof(U32x4);
      copy<U32x4>(to, from, vectors);
      copy<u32>(to + vectors, from + vectors, bytes - vectors);
    }
  }
};

namespace kernel {

template <EpCopyRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    ep_copy_rows(CROSSDOCK_PARAMS(EpCopyRowsParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  const EpRowsCopy copy{p};
  if (!ep_wait_free(p.common, p.view, p.free)) return;
  const u32 rows = ptx::ld_weak(p.rows);
  for (u32 i = 0; i < p.num_planes; ++i)
    copy.copy_plane(p.planes[i], rows);
}

}  // namespace kernel
}  // namespace crossdock::device
