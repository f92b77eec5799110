// ep_expand_rows: a copy of each received row at every place that it has (ep_group_rows), or at the
// same choice's row of a masked layout, with scales, weights and sources; padding becomes zero. So
// a row crosses the wire once and is replicated where it is needed. Launch on any rank after
// ep_group_rows: any grid, block = kConfig.threads(), shared memory kConfig.shared_bytes().
//
//   rows     a warp takes a part of a row: bulk load -> stage; lane k bulk-stores it to choice k's
//   place places   a lane takes a place: scales by column, weights, source; the warp fills its
//   padding
//
// More choices than there is room for are a fault, found before anything is written.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/place_copies.cuh>

namespace crossdock::device {

template <EpExpandRowsConfig kConfig>
struct EpExpandWarp {
  const EpExpandRowsParams& p;
  u32 warp;
  u32 lane;
  u32 rows;   // that have arrived, with the gaps between them
  u32 first;  // of this warp in the grid
  u32 warps;  // in the grid

  CROSSDOCK_DEVICE explicit EpExpandWarp(const EpExpandRowsParams& params)
      : p(params),
        warp(ptx::uniform(warp_index())),
        lane(lane_index()),
        rows(params.arrived.bound()),
        first(block_index() * kConfig.warps + warp),
        warps(grid_size() * kConfig.warps) {}

  // By all threads of the block; they agree. False: a fault has been raised.
  CROSSDOCK_DEVICE bool has_room() const {
    bool fits = true;
    if (p.to.rows_per_expert == 0) {
      const u32 end = ptx::ld_weak(p.grouping.offsets + p.arrived.experts);
      fits = end <= p.to.places || refuse(end, p.to.places);
    } else {
      for (u32 e = thread_index(); e < p.arrived.experts && fits; e += block_size()) {
        const u32 count = ptx::ld_weak(p.arrived.expert_counts + e);
        fits = count <= p.to.rows_per_expert || refuse(count, p.to.rows_per_expert);
      }
    }
    return !ThreadGroup::block().any(!fits);
  }
  // False when the rank aborts; all lanes agree.
  CROSSDOCK_DEVICE bool copy_rows() const {
    if (p.to.rows == nullptr) return true;
    constexpr u32 kStages = kConfig.stages;
    u8* barriers = dynamic_shared() + kConfig.warps * kStages * kConfig.stage_bytes;
    EpCopyPipe pipe{.common = p.common,
                    .from = p.from,
                    .to = p.to,
                    .stages = dynamic_shared() + warp * kStages * kConfig.stage_bytes,
                    .full = reinterpret_cast<ptx::MBarrier*>(barriers) + warp * kStages,
                    .stage_bytes = kConfig.stage_bytes,
                    .part_bytes = p.part_bytes};
    pipe.template prepare<kStages>();
    ptx::fence_proxy_async();  // rows may have been stored by an ordinary kernel
    ptx::sync_warp(kFullMask);
    const u32 units = rows * p.parts;  // a window has no room for 2^32 parts
    u32 next = held(first, units);
    if (next < units) pipe.template load<kStages>(next / p.parts, next % p.parts);
    while (next < units) {
      const u32 unit = next;
      next = held(unit + warps, units);
      if (next < units) pipe.template load<kStages>(next / p.parts, next % p.parts);
      const u64 target = target_of(unit / p.parts);
      if (pipe.template store<kStages>(target, unit % p.parts)) continue;
      pipe.template give_up<kStages>();
      return false;
    }
    ptx::bulk_wait<0>();
    return true;
  }
  CROSSDOCK_DEVICE void copy_row_scales() const {
    if (p.to.scales == nullptr || p.to.scales_by_column) return;
    for (u32 row = first; row < rows; row += warps) {
      if (!p.arrived.holds(row)) continue;
      const u64 mine = target_of(row);
      const u32 chosen = ptx::ballot(kFullMask, mine != kNoPlace);
      for (u32 at = 0; at < p.from.scale_bytes / 4; at += kWarpSize) {
        const u32 i = at + lane;
        const bool inside = i < p.from.scale_bytes / 4;
        const u32 word = inside ? ep_scale_word(p.from, row, i) : 0;
        for (u32 left = chosen; left != 0; left &= left - 1) {
          const u64 target = ptx::shuffle(kFullMask, mine, lowest_bit(left));
          if (inside)
            ptx::st_weak(reinterpret_cast<u32*>(p.to.scales + target * p.to.scale_stride) + i,
                         word);
        }
      }
    }
  }
  // What is not copied row by row, and the padding.
  CROSSDOCK_DEVICE void fill_places() const {
    const u32 end = ptx::ld_weak(p.grouping.offsets + p.arrived.experts);
    for (u32 at = first * kWarpSize; at < end; at += warps * kWarpSize) {
      const u32 place = at + lane;
      i32 row = 0;
      u64 target = kNoPlace;
      if (place < end) {
        const u32 expert = expert_of(place);
        const u32 begin = ptx::ld_weak(p.grouping.offsets + expert);
        row = ptx::ld_weak(p.grouping.rows + place);
        // Padding of a masked layout ends where the expert's rows end.
        if (p.to.rows_per_expert == 0 || place - begin < p.to.rows_per_expert)
          target = ep_target(place, expert, begin, p.to.rows_per_expert);
        if (target != kNoPlace) fill_place(place, row, target);
      }
      const bool padding = target != kNoPlace && row < 0;
      for (u32 left = ptx::ballot(kFullMask, padding); left != 0; left &= left - 1)
        clear(ptx::shuffle(kFullMask, target, lowest_bit(left)));
    }
  }

 private:
  CROSSDOCK_DEVICE bool refuse(u64 needed, u64 room) const {
    raise_fault(p.common, {Phase::kRoom, p.common.rank, room}, needed, 0);
    return false;
  }

  // ---- rows -------------------------------------------------------------------------------------

  // The warp's first unit from `unit` on that is of a row.
  CROSSDOCK_DEVICE u32 held(u32 unit, u32 units) const {
    while (unit < units && !p.arrived.holds(unit / p.parts))
      unit += warps;
    return unit;
  }
  // Where the copy of `row` for the lane's choice goes.
  CROSSDOCK_DEVICE u64 target_of(u32 row) const {
    const u64 choice = u64{row} * p.arrived.top_k + lane;
    const i32 expert = lane < p.arrived.top_k ? ptx::ld_weak(p.arrived.ids + choice) : -1;
    if (expert < 0) return kNoPlace;
    return ep_target(ptx::ld_weak(p.grouping.positions + choice), static_cast<u32>(expert),
                     ptx::ld_weak(p.grouping.offsets + expert), p.to.rows_per_expert);
  }

  // ---- places -----------------------------------------------------------------------------------

  // The last expert that begins at `place` or before: those without places share their beginning
  // with the next.
  CROSSDOCK_DEVICE u32 expert_of(u32 place) const {
    u32 low = 0, high = p.arrived.experts;
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      (ptx::ld_weak(p.grouping.offsets + middle) <= place ? low : high) = middle;
    }
    return low;
  }
  CROSSDOCK_DEVICE void fill_place(u32 place, i32 row, u64 target) const {
    if (p.to.weights != nullptr)
      ptx::st_weak(p.to.weights + target, row < 0 ? 0.0f : weight_of(place, row));
    if (p.to.sources != nullptr) {
      const EpSource source = row < 0 ? EpSource{-1, -1} : source_of(row);
      ptx::st_weak(&p.to.sources[target].rank, source.rank);
      ptx::st_weak(&p.to.sources[target].token, source.token);
    }
    if (p.to.scales == nullptr || !p.to.scales_by_column) return;
    auto* plane = reinterpret_cast<u32*>(p.to.scales) + target;
    constexpr u32 kBatch = 8;  // loads in flight of a lane
    const u32 words = p.from.scale_bytes / 4;
    for (u32 word = 0; word < words; word += kBatch) {
      u32 values[kBatch]{};
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j)
        if (row >= 0 && word + j < words) values[j] = ep_scale_word(p.from, row, word + j);
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kBatch; ++j)
        if (word + j < words) ptx::st_weak(plane + (word + j) * p.to.scale_stride, values[j]);
    }
  }
  CROSSDOCK_DEVICE float weight_of(u32 place, i32 row) const {
    const u64 begin = static_cast<u64>(row) * p.arrived.top_k;
    for (u64 at = begin; at < begin + p.arrived.top_k; ++at)
      if (ptx::ld_weak(p.arrived.ids + at) >= 0 && ptx::ld_weak(p.grouping.positions + at) == place)
        return ptx::ld_weak(p.arrived.weights + at);
    return 0;
  }
  CROSSDOCK_DEVICE EpSource source_of(i32 row) const {
    i32 rank = 0;
    if (p.arrived.stride != 0) rank = static_cast<i32>(static_cast<u32>(row) / p.arrived.stride);
    while (ptx::ld_weak(p.arrived.source_ends + rank) <= static_cast<u32>(row))
      ++rank;
    return {rank, static_cast<i32>(ptx::ld_weak(p.from.tokens + row))};
  }
  // Zeroes a row of padding and its scales. By the warp.
  CROSSDOCK_DEVICE void clear(u64 target) const {
    ep_clear_row(p.to, target, p.from.row_bytes);
    if (p.to.scales == nullptr || p.to.scales_by_column) return;
    auto* words = reinterpret_cast<u32*>(p.to.scales + target * p.to.scale_stride);
    for (u32 i = lane; i < p.from.scale_bytes / 4; i += kWarpSize)
      ptx::st_weak(words + i, 0u);
  }
};

namespace kernel {

template <EpExpandRowsConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads(), 1)
    ep_expand_rows(CROSSDOCK_PARAMS(EpExpandRowsParams, p)) {
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  const EpExpandWarp<kConfig> expand(p);
  if (!expand.has_room() || !expand.copy_rows()) return;
  expand.copy_row_scales();
  expand.fill_places();
}

}  // namespace kernel
}  // namespace crossdock::device
