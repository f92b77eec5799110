// The blocks of ep_dispatch_expanded that copy rows to their places while others are on their way.
//
//   sources                          a block that copies, with a piece of the rows
//     ends                     ->    how many rows there will be
//     told[kSelections]        ->    their ids, weights and token numbers are here
//                                    choices of the piece -> pieces[block] = {epoch, n of each
//                                    expert} pieces of all blocks -> places of its choices
//                                    (expert_lists) weights and sources of the piece; padding
//     rows, flags[row]         ->    whatever has come: bulk load -> stage -> bulk stores to places
//     told[kScales]            ->    scales of the piece, by warps of their own
//
// With a cast scales come with the rows, and are copied after them.
//
// Blocks that copy wait for each other's pieces, so all must be resident; nobody but the end of the
// launch waits for them. The rows of a piece come all the time, not in their order: sources send
// from all of their blocks at once. So a warp looks at the flags of all its rows and takes what is
// there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/epoch.cuh>
#include <crossdock/ep/dispatch_block.cuh>
#include <crossdock/ep/expert_lists.cuh>
#include <crossdock/ep/place_copies.cuh>
#include <crossdock/ep/rows_to_come.cuh>
#include <crossdock/layout/ep_expanded.cuh>

namespace crossdock::device {

template <class Block>
struct EpCopyBlock {
  static constexpr EpDispatchConfig kConfig = Block::kVariant;
  static constexpr u32 kWarps = kConfig.warps();
  static constexpr u32 kThreads = kConfig.threads();
  static constexpr u32 kStages = kConfig.copy_stages;
  static constexpr u32 kRowsAtOnce = 8;  // of scales, of a warp
  // Of the warps, those that copy scales that come apart from the rows.
  static constexpr u32 kScaleWarps = max_of(kWarps * 3 / 10, 1u);
  using Lists = EpExpertLists<kWarps>;

  const EpExpandedDispatchParams& p;
  Block& b;
  EpCopyShared shared;
  EpArrived arrived{};
  EpReceivedRows from{};
  u32 index;               // of the block among those that copy
  u32 blocks;              // that copy
  u32 first = 0, end = 0;  // rows of the block
  u32 warp, lane;

  CROSSDOCK_DEVICE EpCopyBlock(const EpExpandedDispatchParams& params, Block& block)
      : p(params),
        b(block),
        shared(ep_copy_shared(kConfig, block.world(), params.dispatch.experts.most())),
        index(block_index() - params.dispatch.tokens.blocks),
        blocks(grid_size() - params.dispatch.tokens.blocks),
        warp(ptx::uniform(warp_index())),
        lane(lane_index()) {
    const EpOutputLayout& out = p.dispatch.output;
    const u8* here = p.dispatch.view.template at<u8>(p.dispatch.output_offset);
    arrived.ids = reinterpret_cast<const i32*>(here + out.ids);
    arrived.weights = reinterpret_cast<const float*>(here + out.weights);
    arrived.world = b.world();
    arrived.experts = p.dispatch.experts.count(b.rank());
    arrived.top_k = p.dispatch.input.top_k;
    from = {.rows = here + out.rows,
            .scales = here + out.scales,
            .tokens = reinterpret_cast<const u32*>(here + out.sources),
            .row_bytes = out.row_bytes,
            .scale_bytes = out.scale_bytes,
            .scale_columns = out.scale_columns};
  }
  // By all threads of the block.
  CROSSDOCK_DEVICE void run() {
    EpCopyPipe pipe = make_pipe();
    pipe.template prepare<kStages>();
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    u32* epoch = b.template at<u32>(shared.epoch);
    const bool leads = thread_index() == 0;
    if (leads) *epoch = enter_epoch(&p.dispatch.state->dispatch);
    const ThreadGroup all = ThreadGroup::block();
    if (all.any(leads && aborted(p.dispatch.common))) return;
    b.epoch = *epoch;
    const bool ends_known = !all.any(!take_ends());
    if (!ends_known || all.any(!wait_told(EpTold::kSelections, thread_index(), kThreads))) return;
    const u32 rows = ends()[b.world() - 1];
    const u32 piece = ceil_div(rows, blocks);
    first = min_of(index * piece, rows);
    end = min_of(first + piece, rows);
    Lists lists(arrived, p.grouping, b.template at<u32>(shared.lists), first * arrived.top_k,
                end * arrived.top_k);
    lists.take(0);
    lists.count();
    if (all.any(!exchange(lists))) return;
    lists.begin();
    lists.write_ends(index, blocks);
    if (arrived.experts == 0 && index == 0 && leads) lists.write_none();
    lists.write();
    all.sync();  // positions are known to all
    // Otherwise ep_dispatch_expanded reports it when the dispatch has ended well.
    if (!ep_has_room(p.to, lists.begins[lists.turn], lists.turn,
                     [&](u32 expert) { return lists.total[expert]; }))
      return;
    write_selections(lists);
    clear_padding(lists);
    const u32 apart = kConfig.cast || p.to.scales == nullptr ? 0 : kScaleWarps;
    const u32 row_warps = kWarps - apart;
    const bool ok = warp < row_warps ? copy_rows(lists, pipe, row_warps)
                                     : copy_told_scales(lists, warp - row_warps);
    if (all.any(!ok) || !kConfig.cast) return;
    copy_scales(lists, warp, kWarps);
  }

 private:
  CROSSDOCK_DEVICE u32* ends() const { return b.template at<u32>(shared.ends); }
  CROSSDOCK_DEVICE EpCopyPipe make_pipe() const {
    return {.common = p.dispatch.common,
            .from = from,
            .to = p.to,
            .stages = b.template at<u8>(warp * kStages * kConfig.copy_stage_bytes),
            .full = b.template at<ptx::MBarrier>(shared.barriers) + warp * kStages,
            .stage_bytes = kConfig.copy_stage_bytes,
            .part_bytes = p.part_bytes};
  }

  // ---- what the sources tell --------------------------------------------------------------------

  // Where the rows of each source end. False when the rank aborts. A source may first wait for a
  // rank that is missing: with the longer deadline, the blocks that dispatch here find out which.
  CROSSDOCK_DEVICE bool take_ends() const {
    if (warp != 0 || lane >= b.world()) return true;
    u64 word = 0;
    const bool told = wait_until(
        p.dispatch.common, {Phase::kRowFlag, lane, b.epoch & 0xffffu},
        [&] { return word = ptx::ld_relaxed_sys(b.end_word(lane)); },
        [&](u64 seen) { return tagged_with(seen, b.epoch); });
    if (!told) return false;
    const u64 value = word & kTaggedValueMask;
    if (ep_is_given_up(value)) return b.pass_on(lane, value);
    ends()[lane] = static_cast<u32>(value);
    return true;
  }
  // All blocks of all sources have told it, those dealt to the calling one of so many threads; what
  // they wrote before is visible after a barrier.
  CROSSDOCK_DEVICE bool wait_told(EpTold what, u32 thread, u32 threads) const {
    const u32 most = p.dispatch.most_blocks;
    bool told = true;
    for (u32 i = thread; i < b.world() * most && told; i += threads) {
      const u32 source = i / most, block = i % most;
      if (block < p.dispatch.source_blocks[source])
        told = wait_flag(p.dispatch.common, b.told_word(what, source, block), b.epoch, source);
    }
    return told;
  }
  // The counts of this piece to the other blocks, and theirs to the lists.
  CROSSDOCK_DEVICE bool exchange(const Lists& lists) const {
    const u64 most = p.dispatch.areas.most_experts;
    for (u32 i = thread_index(); i < lists.turn; i += kThreads)
      put_epoch_word(p.pieces + index * most + i, b.epoch, lists.in_piece(i));
    bool got = true;
    for (u32 i = thread_index(); i < blocks * lists.turn && got; i += kThreads) {
      const u32 piece = i / lists.turn, expert = i % lists.turn;
      const u64* word = p.pieces + piece * most + expert;
      u64 seen = 0;
      got = wait_until(
          p.dispatch.common, {Phase::kGridSync, kNoPeer, b.epoch},
          [&] { return seen = ptx::ld_relaxed_sys(word); },
          [&](u64 now) { return word_epoch(now) == b.epoch; });
      if (got) lists.tell(expert, word_value(seen), piece < index);
    }
    return got;
  }

  // ---- what is known before the rows ------------------------------------------------------------

  // Where a choice's copy goes.
  CROSSDOCK_DEVICE u64 place_of(const Lists& lists, u32 choice) const {
    const auto expert = static_cast<u32>(ptx::ld_weak(arrived.ids + choice));
    if (expert >= arrived.experts) return kNoPlace;
    return ep_target(ptx::ld_weak(p.grouping.positions + choice), expert, lists.begins[expert],
                     p.to.rows_per_expert);
  }
  CROSSDOCK_DEVICE void write_selections(const Lists& lists) const {
    if (p.to.weights == nullptr && p.to.sources == nullptr) return;
    const u32 stop = end * arrived.top_k;
    for (u32 choice = first * arrived.top_k + thread_index(); choice < stop; choice += kThreads) {
      const u64 place = place_of(lists, choice);
      if (place == kNoPlace) continue;
      const u32 row = choice / arrived.top_k;
      if (p.to.weights != nullptr)
        ptx::st_weak(p.to.weights + place, ptx::ld_weak(arrived.weights + choice));
      if (p.to.sources == nullptr) continue;
      u32 source = 0;
      while (ends()[source] <= row)
        ++source;
      put_source(place,
                 {static_cast<i32>(source), static_cast<i32>(ptx::ld_weak(from.tokens + row))});
    }
  }
  CROSSDOCK_DEVICE void put_source(u64 place, EpSource source) const {
    ptx::st_weak(&p.to.sources[place].rank, source.rank);
    ptx::st_weak(&p.to.sources[place].token, source.token);
  }
  // Of the experts dealt to this block.
  CROSSDOCK_DEVICE void clear_padding(const Lists& lists) const {
    for (u32 i = index + warp * blocks; i < lists.turn; i += kWarps * blocks) {
      u32 stop = lists.begins[i + 1];
      if (p.to.rows_per_expert != 0) stop = min_of(stop, lists.begins[i] + p.to.rows_per_expert);
      for (u32 at = lists.begins[i] + lists.total[i]; at < stop; ++at)
        clear(ep_target(at, i, lists.begins[i], p.to.rows_per_expert));
    }
  }
  // By a warp.
  CROSSDOCK_DEVICE void clear(u64 place) const {
    ep_clear_row(p.to, place, from.row_bytes);
    for (u32 word = lane; p.to.scales != nullptr && word < from.scale_bytes / 4; word += kWarpSize)
      ptx::st_weak(ep_place_scale(p.to, place, word), 0u);
    if (lane != 0) return;
    if (p.to.weights != nullptr) ptx::st_weak(p.to.weights + place, 0.0f);
    if (p.to.sources != nullptr) put_source(place, {-1, -1});
  }

  // ---- rows -------------------------------------------------------------------------------------

  // The place of the row's copy for the lane's choice.
  CROSSDOCK_DEVICE u64 lane_place(const Lists& lists, u32 row) const {
    return lane < arrived.top_k ? place_of(lists, row * arrived.top_k + lane) : kNoPlace;
  }
  // False when the rank aborts; the lanes agree.
  CROSSDOCK_DEVICE bool copy_rows(const Lists& lists, EpCopyPipe& pipe, u32 warps) const {
    struct Unit {
      u32 row, part;
    };
    EpRowsToCome<Block> coming(b, ends(), {first + warp * EpRowsToCome<Block>::kTurn, end, warps});
    Unit now{kNoRow, 0};  // is loaded and not yet stored
    bool ok = true;
    while (ok) {
      // Whatever has come is loaded before what is loaded is stored.
      Unit next{now.row, now.part + 1};
      if (now.row == kNoRow || next.part == p.parts)
        next = {now.row == kNoRow ? coming.wait() : coming.look(), 0};
      if (next.row == kNoRow && now.row == kNoRow) break;
      if (next.row != kNoRow) pipe.template load<kStages>(next.row, next.part);
      if (now.row != kNoRow)
        ok = pipe.template store<kStages>(lane_place(lists, now.row), now.part);
      now = next;
    }
    pipe.template give_up<kStages>();  // what is still on its way after a fault
    ptx::bulk_wait<0>();
    return ok && !coming.failed;
  }

  // ---- scales -----------------------------------------------------------------------------------

  // By the `of`-th of the warps that do nothing else. False when the rank aborts; the lanes agree.
  CROSSDOCK_DEVICE bool copy_told_scales(const Lists& lists, u32 of) const {
    const bool told = wait_told(EpTold::kScales, lane, kWarpSize);
    if (ptx::any(kFullMask, !told)) return false;
    ptx::sync_warp(kFullMask);  // what each lane has acquired is for all
    copy_scales(lists, of, kScaleWarps);
    return true;
  }
  // Several rows of a warp at a time, so that their loads are on their way together.
  CROSSDOCK_DEVICE void copy_scales(const Lists& lists, u32 of, u32 warps) const {
    if (p.to.scales == nullptr) return;
    const u32 words = from.scale_bytes / 4;
    for (u32 row = first + of * kRowsAtOnce; row < end; row += warps * kRowsAtOnce) {
      u64 places[kRowsAtOnce];
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kRowsAtOnce; ++j)
        places[j] = row + j < end ? lane_place(lists, row + j) : kNoPlace;
      for (u32 at = 0; at < words; at += kWarpSize) {
        u32 values[kRowsAtOnce]{};
        CROSSDOCK_UNROLL
        for (u32 j = 0; j < kRowsAtOnce; ++j)
          if (row + j < end && at + lane < words)
            values[j] = ep_scale_word(from, row + j, at + lane);
        CROSSDOCK_UNROLL
        for (u32 j = 0; j < kRowsAtOnce; ++j)
          put_scales(places[j], at + lane, at + lane < words, values[j]);
      }
    }
  }
  // The lane's word to all places of the row.
  CROSSDOCK_DEVICE void put_scales(u64 place, u32 word, bool inside, u32 value) const {
    for (u32 left = ptx::ballot(kFullMask, place != kNoPlace); left != 0; left &= left - 1) {
      const u64 to = ptx::shuffle(kFullMask, place, lowest_bit(left));
      if (inside) ptx::st_weak(ep_place_scale(p.to, to, word), value);
    }
  }
};

}  // namespace crossdock::device
