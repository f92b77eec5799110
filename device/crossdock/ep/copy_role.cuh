// The blocks of ep_dispatch_expanded that copy rows to their places while others are on their way.
//
//   sources                          a block that copies
//     ends, told[kSelections]  ->    how many rows there will be, their ids, weights and token
//                                    numbers (copy_sources)
//                                    choices of a piece of the rows -> pieces[block] = {epoch, n of
//                                    each expert}; pieces of all blocks -> places of its choices
//                                    (expert_lists); listed[block] = epoch
//                                    weights and sources of the piece; padding
//                                    listed of all blocks
//     rows, flags[row]         ->    whatever has come of the rows dealt to it (rows_to_come):
//                                    bulk load -> stage -> bulk stores to places
//     told[kScales]            ->    scales of those rows, by warps of their own
//
// With a cast scales come with the rows, and are copied after them.
//
// With a routing that is used again ids, weights and token numbers are those of the earlier
// dispatch.
//
// Blocks that copy wait for each other's pieces, so all must be resident; nobody but the end of the
// launch waits for them. Rows come all the time, not in their order: sources send from all of their
// blocks at once. So a warp looks at the flags of all its rows and takes what is there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/copy_sources.cuh>
#include <crossdock/ep/expert_lists.cuh>
#include <crossdock/ep/place_copies.cuh>
#include <crossdock/ep/rows_to_come.cuh>

namespace crossdock::device {

template <class Block>
struct EpCopyBlock {
  static constexpr EpDispatchConfig kConfig = Block::kVariant;
  static constexpr u32 kWarps = kConfig.warps();
  static constexpr u32 kThreads = kConfig.threads();
  static constexpr u32 kStages = kConfig.copy_stages;
  // Of the warps, those that copy scales that come apart from the rows.
  static constexpr u32 kScaleWarps = max_of(kWarps * 3 / 10, 1u);
  using Lists = EpExpertLists<kWarps, EpArriving>;
  enum class Copied : u32 { kYes, kNoRoom, kAborted };

  const EpExpandedDispatchParams& p;
  Block& b;
  EpCopyShared shared;
  EpCopySources<Block> sources;
  EpArriving arrived{};
  EpReceivedRows from{};
  u32 index;               // of the block among those that copy
  u32 blocks;              // that copy
  u32 first = 0, end = 0;  // rows whose choices the block lists
  EpTurns turns{};         // of rows that it copies
  u64 needed = 0;          // places, or rows of an expert
  u32 warp, lane;

  CROSSDOCK_DEVICE EpCopyBlock(const EpExpandedDispatchParams& params, Block& block)
      : p(params),
        b(block),
        shared(ep_copy_shared(kConfig, block.world(), params.dispatch.experts.most())),
        sources{params, block, block.template at<u32>(shared.ends),
                block.template at<u32>(shared.heard),
                block_index() - params.dispatch.tokens.blocks},
        index(block_index() - params.dispatch.tokens.blocks),
        blocks(grid_size() - params.dispatch.tokens.blocks),
        warp(ptx::uniform(warp_index())),
        lane(lane_index()) {
    const EpOutputLayout& out = p.dispatch.output;
    const u8* here = p.dispatch.view.template at<u8>(p.dispatch.output_offset);
    const bool again = block.reuses();
    arrived.ids = again ? p.earlier_ids : reinterpret_cast<const i32*>(here + out.ids);
    arrived.weights =
        again ? p.earlier_weights : reinterpret_cast<const float*>(here + out.weights);
    arrived.world = b.world();
    arrived.experts = p.dispatch.experts.count(b.rank());
    arrived.top_k = p.dispatch.input.top_k;
    arrived.stride = p.dispatch.stride;
    arrived.ends = sources.ends;
    from = {.rows = here + out.rows,
            .scales = here + out.scales,
            .tokens = again ? p.earlier_tokens : reinterpret_cast<const u32*>(here + out.sources),
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
    if (ThreadGroup::block().any(leads && aborted(p.dispatch.common))) return;
    b.epoch = *epoch;
    b.masked = masked_ranks(p.dispatch.masking);
    if (!sources.find()) return;
    for (u32 turn = 0;; ++turn) {
      const Copied copied = copy(turn, pipe);
      if (copied == Copied::kAborted) return;
      // Who has come is asked for where it may have changed, and before a fault is raised: so that
      // no other rank suffers from a lack of room.
      const bool asks = sources.late() || (copied == Copied::kNoRoom && index == 0);
      u32 came = 0;
      if (!asks || !sources.hear(EpCopyWord::kDecided, came)) return;
      if (came != sources.taken) {
        sources.take_only(came);
        continue;
      }
      if (copied == Copied::kNoRoom && index == 0 && leads)
        raise_fault(p.dispatch.common, {Phase::kRoom, b.rank(), room()}, needed, 0);
      return;
    }
  }

 private:
  CROSSDOCK_DEVICE u64 room() const {
    return p.to.rows_per_expert == 0 ? p.to.places : p.to.rows_per_expert;
  }
  // Lists and copies of the sources that count. By all threads, which agree.
  CROSSDOCK_DEVICE Copied copy(u32 turn, EpCopyPipe& pipe) {
    const ThreadGroup all = ThreadGroup::block();
    const auto piece = sources.piece(blocks);
    first = piece.first;
    end = piece.end;
    turns = {index, blocks, sources.rows()};
    Lists lists(arrived, p.grouping, b.template at<u32>(shared.lists), first * arrived.top_k,
                end * arrived.top_k);
    lists.take(0);
    lists.count();
    if (all.any(!exchange(lists, turn))) return Copied::kAborted;
    lists.begin();
    lists.write_ends(index, blocks);
    if (arrived.experts == 0 && index == 0 && thread_index() == 0) lists.write_none();
    lists.write();
    all.sync();
    needed = p.to.rows_per_expert == 0 ? lists.begins[lists.turn] : lists.most();
    if (needed > room()) return Copied::kNoRoom;  // all blocks agree
    if (thread_index() == 0) ep_put_copy_word(p.words + words().listed(turn, index), b.epoch, 0);
    write_selections(lists);
    clear_padding(lists);
    if (all.any(!wait_listed(turn))) return Copied::kAborted;
    bool ok = true;
    if constexpr (kConfig.cast) {
      ok = copy_rows(lists, pipe, kWarps);
    } else {
      const u32 row_warps = kWarps - (p.to.scales == nullptr ? 0 : kScaleWarps);
      ok = warp < row_warps ? copy_rows(lists, pipe, row_warps)
                            : copy_told_scales(lists, warp - row_warps);
    }
    if (all.any(!ok)) return Copied::kAborted;
    if constexpr (kConfig.cast) copy_scales(lists, warp, kWarps);
    return Copied::kYes;
  }
  CROSSDOCK_DEVICE EpCopyPipe make_pipe() const {
    return {.common = p.dispatch.common,
            .from = from,
            .to = p.to,
            .stages = b.template at<u8>(warp * kStages * kConfig.copy_stage_bytes),
            .full = b.template at<ptx::MBarrier>(shared.barriers) + warp * kStages,
            .stage_bytes = kConfig.copy_stage_bytes,
            .part_bytes = p.part_bytes};
  }

  // ---- lists ------------------------------------------------------------------------------------

  // The counts of this piece to the other blocks, and theirs to the lists.
  CROSSDOCK_DEVICE bool exchange(const Lists& lists, u32 turn) const {
    // What blocks have copied in the turn before comes before what any copies in this one.
    if (turn != 0) ptx::fence_acq_rel_gpu();
    CROSSDOCK_NO_UNROLL
    for (u32 i = thread_index(); i < lists.turn; i += kThreads)
      put_epoch_word(p.words + words().piece(turn, index) + i, b.epoch, lists.in_piece(i));
    bool got = true;
    for (u32 i = thread_index(); i < blocks * lists.turn && got; i += kThreads) {
      const u32 piece = i / lists.turn, expert = i % lists.turn;
      const u64* word = p.words + words().piece(turn, piece) + expert;
      u64 seen = 0;
      got = wait_until(p.dispatch.common, {Phase::kGridSync, kNoPeer, b.epoch}, seen,
                       RelaxedSys{word}, UpperIs<32>{b.epoch});
      if (got) lists.tell(expert, word_value(seen), piece < index);
    }
    if (turn != 0) {
      ptx::fence_acq_rel_gpu();
      ptx::fence_proxy_async();
    }
    return got;
  }

  // Whatever any block has listed can be read after a barrier. False when the rank aborts.
  CROSSDOCK_DEVICE bool wait_listed(u32 turn) const {
    bool listed = true;
    u32 unused = 0;
    for (u32 i = thread_index(); i < blocks && listed; i += kThreads)
      listed =
          ep_wait_copy_word(p.dispatch.common, p.words + words().listed(turn, i), b.epoch, unused);
    return listed;
  }
  CROSSDOCK_DEVICE EpCopyWords words() const { return {blocks, p.dispatch.areas.most_experts}; }

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
      const u32 row = choice / arrived.top_k;
      const u64 place = arrived.holds(row) ? place_of(lists, choice) : kNoPlace;
      if (place == kNoPlace) continue;
      if (p.to.weights != nullptr)
        ptx::st_weak(p.to.weights + place, ptx::ld_weak(arrived.weights + choice));
      if (p.to.sources == nullptr) continue;
      ep_put_source(p.to, place,
                    {static_cast<i32>(arrived.source_of(row)),
                     static_cast<i32>(ptx::ld_weak(from.tokens + row))});
    }
  }
  // Of the experts dealt to this block.
  CROSSDOCK_DEVICE void clear_padding(const Lists& lists) const {
    for (u32 i = index + warp * blocks; i < lists.turn; i += kWarps * blocks) {
      u32 stop = lists.begins[i + 1];
      if (p.to.rows_per_expert != 0) stop = min_of(stop, lists.begins[i] + p.to.rows_per_expert);
      CROSSDOCK_NO_UNROLL
      for (u32 at = lists.begins[i] + lists.total[i]; at < stop; ++at)
        ep_clear_place(p.to, from, ep_target(at, i, lists.begins[i], p.to.rows_per_expert));
    }
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
    EpRowsToCome<Block> coming(sources, arrived, {turns, warp, warps});
    Unit now{kNoRow, 0};  // is loaded and not yet stored
    bool ok = true;
    while (ok) {
      // Whatever has come is loaded before what is loaded is stored.
      Unit next{now.row, now.part + 1};
      if (now.row == kNoRow || next.part == p.parts) next = {coming.next(now.row == kNoRow), 0};
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
    const bool told = sources.wait_told(EpTold::kScales, lane, kWarpSize);
    if (ptx::any(kFullMask, !told)) return false;
    ptx::sync_warp(kFullMask);  // what each lane has acquired is for all
    copy_scales(lists, of, kScaleWarps);
    return true;
  }
  // Of the block's rows, those of every `warps`-th turn.
  CROSSDOCK_DEVICE void copy_scales(const Lists& lists, u32 of, u32 warps) const {
    if (p.to.scales == nullptr) return;
    for (u32 turn = of; turn < turns.count(); turn += warps) {
      const u32 begin = turns.first(turn);
      const u32 count = begin < turns.rows ? min_of(turns.rows - begin, EpTurns::kRows) : 0;
      EpScaleRows<EpTurns::kRows> rows{.count = count};
      const u32 mine = lane < count ? sources.row_at(begin + lane) : 0;
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < EpTurns::kRows; ++j) {
        rows.rows[j] = ptx::shuffle(kFullMask, mine, j);
        rows.places[j] = j < count ? lane_place(lists, rows.rows[j]) : kNoPlace;
      }
      rows.copy(p.to, from);
    }
  }
};

}  // namespace crossdock::device
