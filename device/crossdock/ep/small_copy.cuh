// The blocks of ep_small_expanded that copy rows to the places of their choices: each has a piece
// of the rows of one source.
//
//   headers of all sources              how many rows there will be
//   counts of all sources (epoch words) what of each expert is before this source, and in all:
//                                       both while rows are on their way
//   flags of the source                 its rows are here, with ids, weights and token numbers
//   choices of the piece, and of the    -> places (expert_lists), as ep_group_rows gives them
//   source's rows before it
//   rows: bulk load -> stage -> a bulk store for each choice; scales, weights, sources; padding
//
// Places depend on counts alone, so no block waits for another of this rank: a source that is late
// keeps nobody from copying what the others sent. A masked source has no rows and no choices.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/expert_lists.cuh>
#include <crossdock/ep/place_copies.cuh>
#include <crossdock/ep/small_receive.cuh>
#include <crossdock/layout/ep_small_expanded.cuh>

namespace crossdock::device {

template <class Block>
struct EpSmallCopies {
  static constexpr EpSmallConfig kConfig = Block::kVariant;
  static constexpr u32 kWarps = kConfig.warps;
  static constexpr u32 kThreads = kConfig.threads();
  static constexpr u32 kStages = kEpSmallCopyStages;
  using Lists = EpExpertLists<kWarps>;

  const EpSmallExpandedParams& p;
  Block& b;
  EpSmallCopyShared shared;
  EpSmallReceiver<Block> receiver;
  EpArrived arrived{};
  EpReceivedRows from{};
  u32 index;   // of the block among those that copy
  u32 pieces;  // of a source
  u32 source;
  u32 first = 0, end = 0;  // rows of the block
  u32 warp, lane;

  CROSSDOCK_DEVICE EpSmallCopies(const EpSmallExpandedParams& params, Block& block)
      : p(params),
        b(block),
        shared(ep_small_copy_shared(kConfig, block.world(), params.small.experts.most())),
        receiver(block),
        index(block_index() - (grid_size() - params.copy_blocks)),
        pieces(params.copy_blocks / block.world()),
        source(index % block.world()),
        warp(ptx::uniform(warp_index())),
        lane(lane_index()) {
    b.shared.headers = shared.headers;
    b.shared.epoch = shared.epoch;
    const EpOutputLayout& out = p.small.output;
    const u8* here = b.output(b.rank());
    arrived.ids = reinterpret_cast<const i32*>(here + out.ids);
    arrived.weights = reinterpret_cast<const float*>(here + out.weights);
    arrived.world = b.world();
    arrived.experts = p.small.experts.count(b.rank());
    arrived.top_k = p.small.input.top_k;
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
    const ThreadGroup all = ThreadGroup::block();
    if (!b.join()) return;
    if (all.any(!receiver.wait_headers(warp))) return;
    if (all.any(!take_counts())) return;
    // Whole warps: what follows are votes of theirs.
    if (all.any(!wait_rows())) return;
    const u32 begin = source * p.small.stride, rows = receiver.rows_of(source);
    const u32 share = ceil_div(rows, pieces);
    first = begin + min_of(index / b.world() * share, rows);
    end = min_of(first + share, begin + rows);
    Lists lists(arrived, p.grouping, b.template at<u32>(shared.lists), first * arrived.top_k,
                end * arrived.top_k);
    lists.take(0);
    lists.count();
    tell_counts(lists, begin);
    lists.begin();
    lists.write_ends(index, p.copy_blocks);
    if (arrived.experts == 0 && index == 0 && all.leader()) lists.write_none();
    lists.write();
    all.sync();  // positions are known to all
    // Else the block that receives reports it when the dispatch has ended well.
    if (!has_room(lists)) return;
    clear_padding(lists);
    write_selections(lists);
    ptx::fence_proxy_async();  // rows that came by the source's bulk stores, bulk loads here
    copy_rows(lists, pipe);
  }

 private:
  CROSSDOCK_DEVICE EpCopyPipe make_pipe() const {
    return {.common = p.small.common,
            .from = from,
            .to = p.to,
            .stages = b.template at<u8>(warp * kStages * kEpSmallCopyStageBytes),
            .full = b.template at<ptx::MBarrier>(shared.barriers) + warp * kStages,
            .stage_bytes = kEpSmallCopyStageBytes,
            .part_bytes = p.part_bytes};
  }

  // ---- what the sources tell --------------------------------------------------------------------

  // A thread an expert. False when the rank aborts.
  CROSSDOCK_DEVICE bool take_counts() const {
    u32* known = b.template at<u32>(shared.known);
    for (u32 expert = thread_index(); expert < arrived.experts; expert += kThreads) {
      u32 before = 0, total = 0;
      for (u32 s = 0; s < b.world(); ++s) {
        u32 n = 0;
        if (!receiver.wait_count(s, expert, n)) return false;
        if (s < source) before += n;
        total += n;
      }
      ptx::st_shared(known + expert, before);
      ptx::st_shared(known + arrived.experts + expert, total);
    }
    return true;
  }
  CROSSDOCK_DEVICE bool wait_rows() const { return warp != 0 || receiver.wait_rows(source); }
  // To the lists, with the choices of the source's rows before the piece.
  CROSSDOCK_DEVICE void tell_counts(const Lists& lists, u32 begin) const {
    const u32* known = b.template at<u32>(shared.known);
    for (u32 expert = thread_index(); expert < arrived.experts; expert += kThreads) {
      ptx::red_add_shared(lists.before + expert, ptx::ld_shared(known + expert));
      ptx::red_add_shared(lists.total + expert, ptx::ld_shared(known + arrived.experts + expert));
    }
    for (u32 choice = begin * arrived.top_k + thread_index(); choice < first * arrived.top_k;
         choice += kThreads) {
      const auto expert = static_cast<u32>(ptx::ld_weak(arrived.ids + choice));
      if (expert < arrived.experts) ptx::red_add_shared(lists.before + expert, 1u);
    }
  }

  // ---- places -----------------------------------------------------------------------------------

  CROSSDOCK_DEVICE bool has_room(const Lists& lists) const {
    return p.to.rows_per_expert == 0 ? lists.begins[lists.turn] <= p.to.places
                                     : lists.most() <= p.to.rows_per_expert;
  }
  // Where a choice's copy goes.
  CROSSDOCK_DEVICE u64 place_of(const Lists& lists, u32 choice) const {
    const auto expert = static_cast<u32>(ptx::ld_weak(arrived.ids + choice));
    if (expert >= arrived.experts) return kNoPlace;
    return ep_target(ptx::ld_weak(p.grouping.positions + choice), expert, lists.begins[expert],
                     p.to.rows_per_expert);
  }
  CROSSDOCK_DEVICE u64 lane_place(const Lists& lists, u32 row) const {
    return lane < arrived.top_k ? place_of(lists, row * arrived.top_k + lane) : kNoPlace;
  }
  CROSSDOCK_DEVICE void write_selections(const Lists& lists) const {
    if (p.to.weights == nullptr && p.to.sources == nullptr) return;
    const u32 stop = end * arrived.top_k;
    for (u32 choice = first * arrived.top_k + thread_index(); choice < stop; choice += kThreads) {
      const u64 place = place_of(lists, choice);
      if (place == kNoPlace) continue;
      if (p.to.weights != nullptr)
        ptx::st_weak(p.to.weights + place, ptx::ld_weak(arrived.weights + choice));
      if (p.to.sources == nullptr) continue;
      const u32 token = ptx::ld_weak(from.tokens + choice / arrived.top_k);
      ep_put_source(p.to, place, {static_cast<i32>(source), static_cast<i32>(token)});
    }
  }
  // Of the experts dealt to this block.
  CROSSDOCK_DEVICE void clear_padding(const Lists& lists) const {
    for (u32 i = index + warp * p.copy_blocks; i < lists.turn; i += kWarps * p.copy_blocks) {
      u32 stop = lists.begins[i + 1];
      if (p.to.rows_per_expert != 0) stop = min_of(stop, lists.begins[i] + p.to.rows_per_expert);
      for (u32 at = lists.begins[i] + lists.total[i]; at < stop; ++at)
        ep_clear_place(p.to, from, ep_target(at, i, lists.begins[i], p.to.rows_per_expert));
    }
  }

  // ---- rows -------------------------------------------------------------------------------------

  // A warp takes every kWarps-th row; its scales while its parts are loaded.
  CROSSDOCK_DEVICE void copy_rows(const Lists& lists, EpCopyPipe& pipe) const {
    const u32 units = (end - first) * p.parts;
    const auto row_of = [&](u32 unit) { return first + unit / p.parts; };
    u32 unit = warp;
    if (unit < units) pipe.template load<kStages>(row_of(unit), unit % p.parts);
    bool ok = true;
    for (; ok && unit < units; unit += kWarps) {
      const u32 next = unit + kWarps;
      if (next < units) pipe.template load<kStages>(row_of(next), next % p.parts);
      const u64 place = lane_place(lists, row_of(unit));
      if (unit % p.parts == 0 && p.to.scales != nullptr)
        EpScaleRows<1>{1, {row_of(unit)}, {place}}.copy(p.to, from);
      ok = pipe.template store<kStages>(place, unit % p.parts);
    }
    pipe.template give_up<kStages>();  // what is still on its way after a fault
    ptx::bulk_wait<0>();
  }
};

}  // namespace crossdock::device
