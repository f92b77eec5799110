// Metadata of rows: what goes with a row besides its payload. A warp takes a group of 32 tokens and
// a destination at a time: the tokens that go there have consecutive rows, so ids, weights, token
// numbers and scales are stores to one run of memory each. Loads are made several at a time,
// because a warp that waits for each would be slower than the rows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/plan.cuh>

namespace crossdock::device {

template <class Block>
struct EpMetadata {
  static constexpr EpDispatchConfig kConfig = Block::kVariant;

  // A run: `n` tokens of this rank that have the rows from `row` on at `destination`.
  struct Run {
    u32 destination;
    u32 row;
    u32 n;
    u8* output;
  };

  const Block& b;
  u32 warp;
  u32 lane;
  u32* members;  // the tokens of the run

  CROSSDOCK_DEVICE EpMetadata(const Block& block, u32 index)
      : b(block),
        warp(index),
        lane(lane_index()),
        members(block.template at<u32>(block.shared.members) + index * kWarpSize) {}

  // What goes with the rows of this block: both kinds, or those asked for.
  CROSSDOCK_DEVICE void run(const EpPlan<Block>& plan, bool selections, bool scales) const {
    const u32 runs = b.groups() * b.world();
    for (u32 i = warp; i < runs; i += kConfig.notify_warps) {
      const u32 group = i / b.world();
      const u32 destination = (b.rank() + i) % b.world();
      const EpRoute route = b.route(group, destination);
      if (route.tokens == 0 || b.output(destination) == nullptr) continue;
      if ((route.tokens >> lane & 1u) != 0)
        members[popcount(route.tokens & ((1u << lane) - 1))] = b.first + group * kWarpSize + lane;
      ptx::sync_warp(kFullMask);
      write({destination, plan.base(destination) + route.row, popcount(route.tokens),
             b.output(destination)},
            selections, scales);
      ptx::sync_warp(kFullMask);
    }
  }

 private:
  CROSSDOCK_DEVICE void write(const Run& run, bool selections, bool scales) const {
    const EpOutputLayout& out = b.p.output;
    if (selections && !b.reuses()) {  // else the destination has them
      if (lane < run.n)
        ptx::st_weak(reinterpret_cast<u32*>(run.output + out.sources) + run.row + lane,
                     members[lane]);
      write_selections(run);
    }
    if (kConfig.cast || !scales || out.scale_bytes == 0) return;
    if (out.scale_columns != 0) {
      write_scale_columns(run);
    } else if (out.scale_bytes % sizeof(U32x4) == 0 &&
               b.p.input.scale_stride % sizeof(U32x4) == 0) {
      write_scale_rows<U32x4>(run);
    } else {
      write_scale_rows<u32>(run);
    }
  }
  // Expert ids as the destination numbers them, and weights.
  CROSSDOCK_DEVICE void write_selections(const Run& run) const {
    const u32 top_k = b.p.input.top_k;
    const u32 total = run.n * top_k;
    const u32 first = b.p.experts.first(run.destination);
    const u32 experts = b.p.experts.count(run.destination);
    const u64 at = u64{run.row} * top_k;
    auto* ids_there = reinterpret_cast<i32*>(run.output + b.p.output.ids) + at;
    auto* weights_there = reinterpret_cast<float*>(run.output + b.p.output.weights) + at;
    for (u32 i = lane; i < total; i += kWarpSize * kEpBatch) {
      i64 ids[kEpBatch];
      float weights[kEpBatch];
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpBatch; ++j) {
        const u32 x = i + j * kWarpSize;
        ids[j] = -1;
        weights[j] = 0;
        if (x >= total) continue;
        const u64 from = u64{members[x / top_k]} * top_k + x % top_k;
        ids[j] = ep_load_id<kConfig>(b.p.input, from);
        if (b.p.input.weights != nullptr) weights[j] = ptx::ld_weak(b.p.input.weights + from);
      }
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpBatch; ++j) {
        const u32 x = i + j * kWarpSize;
        if (x >= total) continue;
        const u32 local = static_cast<u32>(ids[j]) - first;
        const bool here = ids[j] >= 0 && local < experts;
        ptx::st_weak(ids_there + x, here ? static_cast<i32>(local) : -1);
        if (b.p.input.weights != nullptr) ptx::st_weak(weights_there + x, here ? weights[j] : 0.0f);
      }
    }
  }
  template <class T>
  CROSSDOCK_DEVICE void write_scale_rows(const Run& run) const {
    const u32 per_row = b.p.output.scale_bytes / sizeof(T);
    const u32 total = run.n * per_row;
    auto* there = reinterpret_cast<T*>(run.output + b.p.output.scales) + u64{run.row} * per_row;
    for (u32 i = lane; i < total; i += kWarpSize * kEpBatch) {
      T values[kEpBatch];
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpBatch; ++j) {
        const u32 x = i + j * kWarpSize;
        if (x < total) values[j] = ptx::ld_weak(scale_of<T>(members[x / per_row]) + x % per_row);
      }
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpBatch; ++j)
        if (i + j * kWarpSize < total) ptx::st_weak(there + i + j * kWarpSize, values[j]);
    }
  }
  // A lane a row: the rows of a run are neighbours in each column.
  CROSSDOCK_DEVICE void write_scale_columns(const Run& run) const {
    const u32 words = b.p.output.scale_bytes / 4;
    const u64 columns = b.p.output.scale_columns;
    if (lane >= run.n) return;
    const u32* from = scale_of<u32>(members[lane]);
    u32* there = reinterpret_cast<u32*>(run.output + b.p.output.scales) + run.row + lane;
    for (u32 i = 0; i < words; i += kEpBatch) {
      u32 values[kEpBatch]{};
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpBatch; ++j)
        if (i + j < words) values[j] = ptx::ld_weak(from + i + j);
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpBatch; ++j)
        if (i + j < words) ptx::st_weak(there + (i + j) * columns, values[j]);
    }
  }
  template <class T>
  CROSSDOCK_DEVICE const T* scale_of(u32 token) const {
    return reinterpret_cast<const T*>(b.p.input.scales + token * b.p.input.scale_stride);
  }
};

}  // namespace crossdock::device
