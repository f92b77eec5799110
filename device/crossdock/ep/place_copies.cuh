// Copies of received rows at their places: the pipe of a warp that brings parts of rows through
// shared memory, one load and a store for each choice, and what else a place has. Nothing here
// waits
// for another block. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/layout/ep_grouping.cuh>
#include <crossdock/ptx/bulk.cuh>

namespace crossdock::device {

inline constexpr u64 kNoPlace = ~u64{0};

// A warp's stages. Parts are stored in the order in which they are loaded, one loaded ahead. By all
// lanes.
struct EpCopyPipe {
  const LaunchCommon& common;
  const EpReceivedRows& from;
  const EpExpanded& to;
  u8* stages;
  ptx::MBarrier* full;  // [stages]
  u32 stage_bytes;
  u32 part_bytes;  // of a row, the last may be shorter
  u32 loaded = 0;
  u32 stored = 0;

  template <u32 kStages>
  CROSSDOCK_DEVICE void prepare() const {
    if (lane_index() == 0) {
      for (u32 i = 0; i < kStages; ++i)
        ptx::mbarrier_init(full + i, 1);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_warp(kFullMask);
  }
  template <u32 kStages>
  CROSSDOCK_DEVICE void load(u32 row, u32 part) {
    static_assert(kStages >= 2);
    // All lanes' stores but the last few have read their stages.
    ptx::bulk_wait_read<kStages - 2>();
    ptx::sync_warp(kFullMask);
    const u32 stage = loaded++ % kStages;
    if (lane_index() != 0) return;
    ptx::mbarrier_arrive_expect_tx(full + stage, bytes_of(part));
    ptx::bulk_load(stages + stage * stage_bytes,
                   from.rows + u64{row} * from.row_bytes + u64{part} * part_bytes, bytes_of(part),
                   full + stage);
  }
  // The oldest part that has been loaded, to the lane's place. False when the rank aborts; the
  // lanes agree.
  template <u32 kStages>
  CROSSDOCK_DEVICE bool store(u64 place, u32 part) {
    const u32 stage = stored % kStages;
    const bool came = wait_stage(common, full + stage, stored / kStages & 1u);
    if (ptx::any(kFullMask, !came)) return false;
    if (place != kNoPlace && to.rows != nullptr)
      ptx::bulk_store(to.rows + place * to.row_stride + u64{part} * part_bytes,
                      stages + stage * stage_bytes, bytes_of(part));
    ptx::sync_warp(kFullMask);
    ptx::bulk_commit();
    ++stored;
    return true;
  }
  // Lets loads land that will not be stored.
  template <u32 kStages>
  CROSSDOCK_DEVICE void give_up() {
    for (; stored < loaded; ++stored)
      settle_stage(common, full + stored % kStages, stored / kStages & 1u);
  }

 private:
  CROSSDOCK_DEVICE u32 bytes_of(u32 part) const {
    return min_of(part_bytes, from.row_bytes - part * part_bytes);
  }
};

// Word `word` of a received row's scales.
CROSSDOCK_DEVICE u32 ep_scale_word(const EpReceivedRows& from, u32 row, u32 word) {
  const auto* words = reinterpret_cast<const u32*>(from.scales);
  const u64 at = from.scale_columns == 0 ? u64{row} * (from.scale_bytes / 4) + word
                                         : u64{word} * from.scale_columns + row;
  return ptx::ld_weak(words + at);
}
// The same of a place.
CROSSDOCK_DEVICE u32* ep_place_scale(const EpExpanded& to, u64 place, u32 word) {
  return to.scales_by_column
             ? reinterpret_cast<u32*>(to.scales) + u64{word} * to.scale_stride + place
             : reinterpret_cast<u32*>(to.scales + place * to.scale_stride) + word;
}
// The scales of several rows to their places, so that their loads are on their way together. By a
// warp.
template <u32 kRows>
struct EpScaleRows {
  u32 count;  // of the rows
  u32 rows[kRows]{};
  u64 places[kRows]{};  // of the lane's choice; kNoPlace: none

  CROSSDOCK_DEVICE void copy(const EpExpanded& to, const EpReceivedRows& from) const {
    const u32 words = from.scale_bytes / 4;
    for (u32 word = lane_index(); word - lane_index() < words; word += kWarpSize) {
      u32 values[kRows]{};
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kRows; ++j)
        if (j < count && word < words) values[j] = ep_scale_word(from, rows[j], word);
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kRows; ++j)
        put(to, places[j], word, word < words, values[j]);
    }
  }
  // The lane's word to all places of the row.
  CROSSDOCK_DEVICE static void put(const EpExpanded& to, u64 place, u32 word, bool inside,
                                   u32 value) {
    for (u32 left = ptx::ballot(kFullMask, place != kNoPlace); left != 0; left &= left - 1) {
      const u64 at = ptx::shuffle(kFullMask, place, lowest_bit(left));
      if (inside) ptx::st_weak(ep_place_scale(to, at, word), value);
    }
  }
};
// Zeroes the row of a place. By a warp.
CROSSDOCK_DEVICE void ep_clear_row(const EpExpanded& to, u64 place, u32 row_bytes) {
  if (to.rows == nullptr) return;
  auto* row = reinterpret_cast<U32x4*>(to.rows + place * to.row_stride);
  for (u32 i = lane_index(); i < row_bytes / sizeof(U32x4); i += kWarpSize)
    ptx::st_weak(row + i, U32x4{});
}

CROSSDOCK_DEVICE void ep_put_source(const EpExpanded& to, u64 place, EpSource source) {
  ptx::st_weak(&to.sources[place].rank, source.rank);
  ptx::st_weak(&to.sources[place].token, source.token);
}
// Zeroes all that a place has: it is padding. By a warp.
CROSSDOCK_DEVICE void ep_clear_place(const EpExpanded& to, const EpReceivedRows& from, u64 place) {
  ep_clear_row(to, place, from.row_bytes);
  const u32 words = to.scales == nullptr ? 0 : from.scale_bytes / 4;
  for (u32 word = lane_index(); word < words; word += kWarpSize)
    ptx::st_weak(ep_place_scale(to, place, word), 0u);
  if (lane_index() != 0) return;
  if (to.weights != nullptr) ptx::st_weak(to.weights + place, 0.0f);
  if (to.sources != nullptr) ep_put_source(to, place, {-1, -1});
}

}  // namespace crossdock::device
