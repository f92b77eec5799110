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
    CROSSDOCK_NO_UNROLL
    for (; stored < loaded; ++stored)
      settle_stage(common, full + stored % kStages, stored / kStages & 1u);
  }

 private:
  CROSSDOCK_DEVICE u32 bytes_of(u32 part) const {
    return min_of(part_bytes, from.row_bytes - part * part_bytes);
  }
};

// Where words of scales lie, by row or by column alike.
struct EpScaleWords {
  u64 row_bytes;   // from one row to the next
  u64 word_bytes;  // from one word of a row to the next

  // Of received rows, and of places.
  CROSSDOCK_DEVICE static EpScaleWords of(const EpReceivedRows& from) {
    return from.scale_columns == 0 ? EpScaleWords{from.scale_bytes, 4}
                                   : EpScaleWords{4, u64{from.scale_columns} * 4};
  }
  CROSSDOCK_DEVICE static EpScaleWords of(const EpExpanded& to) {
    return to.scales_by_column ? EpScaleWords{4, u64{to.scale_stride} * 4}
                               : EpScaleWords{to.scale_stride, 4};
  }
};
// Word `word` of a received row's scales.
CROSSDOCK_DEVICE u32 ep_scale_word(const EpReceivedRows& from, u32 row, u32 word) {
  const auto at = EpScaleWords::of(from);
  return ptx::ld_weak(
      reinterpret_cast<const u32*>(from.scales + row * at.row_bytes + word * at.word_bytes));
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
    const auto have = EpScaleWords::of(from), want = EpScaleWords::of(to);
    CROSSDOCK_NO_UNROLL
    for (u32 word = lane_index(); word - lane_index() < words; word += kWarpSize) {
      const bool inside = word < words;
      const u8* there = from.scales + word * have.word_bytes;
      u32 values[kRows]{};
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kRows; ++j)
        if (j < count && inside)
          values[j] = ptx::ld_weak(reinterpret_cast<const u32*>(there + rows[j] * have.row_bytes));
      u8* here = to.scales + word * want.word_bytes;
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kRows; ++j)
        put(here, places[j], want.row_bytes, inside, values[j]);
    }
  }
  // The lane's word to all places of the row.
  CROSSDOCK_DEVICE static void put(u8* first, u64 place, u64 bytes, bool inside, u32 value) {
    CROSSDOCK_NO_UNROLL
    for (u32 left = ptx::ballot(kFullMask, place != kNoPlace); left != 0; left &= left - 1) {
      const u64 at = ptx::shuffle(kFullMask, place, lowest_bit(left));
      if (inside) ptx::st_weak(reinterpret_cast<u32*>(first + at * bytes), value);
    }
  }
};
// Zeroes the row of a place. By a warp.
CROSSDOCK_DEVICE void ep_clear_row(const EpExpanded& to, u64 place, u32 row_bytes) {
  if (to.rows == nullptr) return;
  auto* row = reinterpret_cast<U32x4*>(to.rows + place * to.row_stride);
  CROSSDOCK_NO_UNROLL
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
  const auto at = EpScaleWords::of(to);
  CROSSDOCK_NO_UNROLL
  for (u32 word = lane_index(); word < words; word += kWarpSize)
    ptx::st_weak(reinterpret_cast<u32*>(to.scales + place * at.row_bytes + word * at.word_bytes),
                 0u);
  if (lane_index() != 0) return;
  if (to.weights != nullptr) ptx::st_weak(to.weights + place, 0.0f);
  if (to.sources != nullptr) ep_put_source(to, place, {-1, -1});
}

}  // namespace crossdock::device
