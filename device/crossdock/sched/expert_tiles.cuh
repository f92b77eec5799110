// The tiles of all experts, shared out among the blocks of a persistent grid by counts that only
// the device knows. Every block reads the counts once and keeps a table in shared memory; each role
// then walks the same tiles by itself, so that nobody has to be asked.
//
//   experts 0, 1, ...; inside an expert column by column, and down the rows inside a column: the
//   blocks that run side by side share the weights of a column.
//   block b has tiles b, b + grid, ...
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/layout/grouped_gemm.cuh>

namespace crossdock::device {

// In shared memory; written by build(), then read by anybody.
struct ExpertTable {
  u32* first_tile;  // [experts + 1]
  u32* begin;       // [experts]: first place
  u32* rows;        // [experts]
  u32 experts;

  CROSSDOCK_DEVICE static ExpertTable at(u8* memory, u32 of_experts) {
    u32* words = reinterpret_cast<u32*>(memory);
    return {words, words + kGemmMaxExperts + 1, words + 2 * kGemmMaxExperts + 1, of_experts};
  }
  CROSSDOCK_DEVICE u32 tiles() const { return first_tile[experts]; }
  // Of this block.
  CROSSDOCK_DEVICE u32 own_tiles() const {
    const u32 all = tiles();
    return all <= block_index() ? 0 : ceil_div(all - block_index(), grid_size());
  }

  // By all threads of the block. False, for all of them, when an expert has more rows than there is
  // room for, or rows that do not begin at a multiple of `begins_at`; a fault then says which.
  CROSSDOCK_DEVICE bool build(const LaunchCommon& common, const GemmRows& from, u32 tile_rows,
                              u32 column_tiles, u32 begins_at) const {
    bool fits = true;
    for (u32 e = thread_index(); e < experts; e += block_size())
      fits = read(common, from, e, begins_at) && fits;
    const ThreadGroup block = ThreadGroup::block();
    if (block.any(!fits)) return false;
    if (thread_index() < kWarpSize) number(tile_rows, column_tiles);
    block.sync();
    return true;
  }

 private:
  CROSSDOCK_DEVICE bool read(const LaunchCommon& common, const GemmRows& from, u32 e,
                             u32 begins_at) const {
    const bool packed = from.offsets != nullptr;
    const u32 first = packed ? ptx::ld_weak(from.offsets + e) : e * from.expert_rows;
    const u32 count = from.counts != nullptr ? ptx::ld_weak(from.counts + e)
                                             : ptx::ld_weak(from.offsets + e + 1) - first;
    begin[e] = first;
    rows[e] = count;
    const u64 end = u64{first} + count;
    const u64 room = packed ? from.places : u64{first} + from.expert_rows;
    const bool placed = first % begins_at == 0;
    if (count == 0 || (end <= room && placed)) return true;
    const u32 limit = end <= room ? kGemmMisplaced : static_cast<u32>(room);
    raise_fault(common, {Phase::kExpertRows, kNoPeer, u64{e} << 32 | limit},
                end <= room ? first : end, 0);
    return false;
  }
  // By one warp: each lane adds up some experts, then the lanes before it.
  CROSSDOCK_DEVICE void number(u32 tile_rows, u32 column_tiles) const {
    const u32 lane = lane_index();
    const u32 share = ceil_div(experts, kWarpSize);
    const u32 from = min_of(lane * share, experts);
    const u32 to = min_of(from + share, experts);
    u32 sum = 0;
    for (u32 e = from; e < to; ++e)
      sum += ceil_div(rows[e], tile_rows) * column_tiles;
    u32 before = sum;
    for (u32 distance = 1; distance < kWarpSize; distance *= 2) {
      const u32 other = ptx::shuffle_up(kFullMask, before, distance);
      if (lane >= distance) before += other;
    }
    if (lane == kWarpSize - 1) first_tile[experts] = before;
    before -= sum;
    for (u32 e = from; e < to; ++e) {
      first_tile[e] = before;
      before += ceil_div(rows[e], tile_rows) * column_tiles;
    }
  }
};

struct Tile {
  u32 expert;
  u32 row;     // first place
  u32 rows;    // valid ones
  u32 column;  // number of the column of tiles
};

// One role's way through the tiles of its block.
template <u32 kTileRows>
struct TileWalk {
  ExpertTable table;
  u32 number;
  u32 total;
  u32 expert = 0;

  CROSSDOCK_DEVICE explicit TileWalk(const ExpertTable& of)
      : table(of), number(block_index()), total(of.tiles()) {
    find();
  }
  CROSSDOCK_DEVICE bool valid() const { return number < total; }
  CROSSDOCK_DEVICE void next() {
    number += grid_size();
    find();
  }
  CROSSDOCK_DEVICE Tile tile() const {
    const u32 rows = table.rows[expert];
    const u32 down = ceil_div(rows, kTileRows);
    const u32 mine = number - table.first_tile[expert];
    const u32 column = mine / down;
    const u32 first = (mine - column * down) * kTileRows;
    return {expert, table.begin[expert] + first, min_of(rows - first, kTileRows), column};
  }

 private:
  CROSSDOCK_DEVICE void find() {
    if (!valid()) return;
    while (number >= table.first_tile[expert + 1])
      ++expert;
  }
};

}  // namespace crossdock::device
