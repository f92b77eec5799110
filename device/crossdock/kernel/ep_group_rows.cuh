// ep_group_rows: the choices of this rank's experts as a list of rows for each expert, in the order
// of the rows, each list beginning at a multiple of the alignment; for a grouped GEMM that gathers
// its rows, or for copying them apart. Nothing is copied here. A row that chose an expert twice is
// in its list twice. Launch on any rank after its dispatch: any grid (a block takes experts in
// turns), block = kConfig.threads (whole warps, at most 1024), 4 bytes of shared memory a warp.
//
//   each warp takes a contiguous piece of the choices: counts its matches, learns what the warps
//   before it have, and writes. Two passes over the ids, two barriers an expert.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/layout/ep_grouping.cuh>

namespace crossdock::device {

template <EpGroupRowsConfig kConfig>
struct EpExpertList {
  static constexpr u32 kWarps = kConfig.threads / kWarpSize;
  static constexpr u32 kBatch = 4;  // loads in flight of a thread
  static constexpr u32 kEach = 4;   // choices of a load
  static constexpr u32 kNoExpert = 0xffffffffu;
  const EpGroupRowsParams& p;
  u32 choices;  // of all rows, and of the gaps between them
  u32 warp;
  u32 lane;

  CROSSDOCK_DEVICE explicit EpExpertList(const EpGroupRowsParams& params)
      : p(params), warp(warp_index()), lane(lane_index()) {
    choices = p.arrived.bound() * p.arrived.top_k;
  }
  // Where the places of `expert` begin. By whole warps.
  CROSSDOCK_DEVICE u32 offset(u32 expert) const {
    u32 sum = 0;
    for (u32 i = lane; i < expert; i += kWarpSize)
      sum += round_up(ptx::ld_weak(p.arrived.expert_counts + i), p.grouping.alignment);
    return ptx::reduce_add(kFullMask, sum);
  }
  // Calls `found(choice, n)` for every match of the warp's piece, n counting up; returns their
  // number. A lane looks at four choices at a time: one by one, the loads' latency was most of a
  // launch.
  template <class Found>
  CROSSDOCK_DEVICE u32 scan(u32 expert, const Found& found) const {
    constexpr u32 kStep = kWarpSize * kEach;
    const u32 piece = round_up(ceil_div(choices, kWarps), kStep);
    const u32 end = min_of(choices, (warp + 1) * piece);
    u32 n = 0;
    for (u32 first = warp * piece; first < end; first += kStep * kBatch) {
      U32x4 ids[kBatch];
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j) {
        const u32 at = first + j * kStep + lane * kEach;
        ids[j] = at < end ? ptx::ld_weak(reinterpret_cast<const U32x4*>(p.arrived.ids + at))
                          : U32x4{kNoExpert, kNoExpert, kNoExpert, kNoExpert};
      }
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j)
        n += look(expert, first + j * kStep + lane * kEach, ids[j], n, found);
    }
    return n;
  }
  // By all threads of the block.
  CROSSDOCK_DEVICE void write(u32 expert) const {
    u32* counts = reinterpret_cast<u32*>(dynamic_shared());
    const ThreadGroup block = ThreadGroup::block();
    const u32 mine = scan(expert, [](u32, u32) {});
    if (lane == 0) counts[warp] = mine;
    block.sync();
    u32 before = 0, total = 0;
    for (u32 i = 0; i < kWarps; ++i) {
      if (i < warp) before += counts[i];
      total += counts[i];
    }
    const u32 begin = offset(expert);
    const u32 place = begin + before;
    scan(expert, [&](u32 choice, u32 n) {
      ptx::st_weak(p.grouping.rows + place + n, static_cast<i32>(choice / p.arrived.top_k));
      ptx::st_weak(p.grouping.positions + choice, place + n);
      if (p.grouping.weights != nullptr)
        ptx::st_weak(p.grouping.weights + place + n, ptx::ld_weak(p.arrived.weights + choice));
    });
    const u32 end = begin + round_up(total, p.grouping.alignment);
    for (u32 i = begin + total + thread_index(); i < end; i += kConfig.threads)
      ptx::st_weak(p.grouping.rows + i, -1);
    if (thread_index() == 0) {
      ptx::st_weak(p.grouping.offsets + expert, begin);
      ptx::st_weak(p.grouping.aligned + expert, end - begin);
      if (expert == p.arrived.experts - 1) ptx::st_weak(p.grouping.offsets + expert + 1, end);
    }
    block.sync();  // the counts may be overwritten
  }

 private:
  // The warp's next choices, four a lane from `at` on; returns how many match.
  template <class Found>
  CROSSDOCK_DEVICE u32 look(u32 expert, u32 at, U32x4 ids, u32 n, const Found& found) const {
    const u32 of[kEach] = {ids.x, ids.y, ids.z, ids.w};
    const u32 lower = (1u << lane) - 1;
    bool match[kEach];
    u32 before = 0, all = 0;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kEach; ++i) {
      match[i] = of[i] == expert && at + i < choices && is_row(at + i);
      const u32 voted = ptx::ballot(kFullMask, match[i]);
      before += popcount(voted & lower);
      all += popcount(voted);
    }
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kEach; ++i)
      if (match[i]) found(at + i, n + before++);
    return all;
  }
  // Only where there are gaps a choice may be none of a row.
  CROSSDOCK_DEVICE bool is_row(u32 choice) const {
    return p.arrived.stride == 0 || p.arrived.holds(choice / p.arrived.top_k);
  }
};

namespace kernel {

template <EpGroupRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1)
    ep_group_rows(CROSSDOCK_PARAMS(EpGroupRowsParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  const EpExpertList<kConfig> list(p);
  for (u32 expert = block_index(); expert < p.arrived.experts; expert += grid_size())
    list.write(expert);
}

}  // namespace kernel
}  // namespace crossdock::device
