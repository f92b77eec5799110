// The warps of ep_combine: each takes tokens of this rank, loads their rows from the ranks that
// have them, and adds them up.
//
//   lane d owns rank d: its input block, and the bulk loads from it
//
//   issue   ticket -> token; routes -> rows; per part: one bulk load a row   -> full[stage]
//   add     wait full[stage]; bias + rows in order of their ranks, in fp32; bf16 to the output
//
// The order of the additions is that of the ranks, whatever arrives first: results are the same bit
// by bit in every run. Tickets are taken one at a time from one counter of the rank, ahead of their
// use.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/layout/ep_combine.cuh>
#include <crossdock/ptx/bulk.cuh>
#include <crossdock/ptx/convert.cuh>

namespace crossdock::device {

struct EpAccumulator {
  float of[8] = {};

  CROSSDOCK_DEVICE void add(U32x4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      const ptx::F32x2 two = ptx::f32_from_bf16x2(words[i]);
      of[2 * i] += two.lo;
      of[2 * i + 1] += two.hi;
    }
  }
  CROSSDOCK_DEVICE U32x4 rounded() const {
    return {ptx::bf16x2_from_f32(of[0], of[1]), ptx::bf16x2_from_f32(of[2], of[3]),
            ptx::bf16x2_from_f32(of[4], of[5]), ptx::bf16x2_from_f32(of[6], of[7])};
  }
};

template <EpCombineConfig kConfig>
struct EpPullWarp {
  const EpCombineParams& p;
  u32 epoch;
  u32 warp;
  u32 lane;
  const u8* input = nullptr;  // of the lane's rank
  u32 issued = 0;
  u32 added = 0;
  bool tokens_left = true;
  // Being issued, and what comes next.
  u32 token = 0, part = 0, fetch_after = 0, last_part = 0, row = kNoRow;
  u32 next_ticket = 0, next_row = kNoRow;
  u32 claimed = 0;  // lane 0: the answer to the last claim

  CROSSDOCK_DEVICE EpPullWarp(const EpCombineParams& params, u32 index)
      : p(params), epoch(0), warp(index), lane(lane_index()) {}

  CROSSDOCK_DEVICE void begin(u32 of_epoch) {
    epoch = of_epoch;
    claimed = claim();
    if (lane == 0) {
      for (u32 i = 0; i < kConfig.stages; ++i)
        ptx::mbarrier_init(full(i), 1);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_warp(kFullMask);
    fetch_next();
  }
  // False when the rank aborts; all lanes agree.
  CROSSDOCK_DEVICE bool run() {
    if (!wait_inputs()) return false;
    for (u32 i = 0; i < kConfig.stages && tokens_left; ++i)
      issue();
    bool ok = true;
    while (ok && added < issued) {
      ok = add();
      if (ok && tokens_left) issue();
    }
    for (; added < issued; ++added)
      settle_stage(p.common, full(added % kConfig.stages), parity(added));
    return ok;
  }

 private:
  CROSSDOCK_DEVICE u32 place(u32 stage) const { return warp * kConfig.stages + stage; }
  CROSSDOCK_DEVICE ptx::MBarrier* full(u32 stage) const {
    constexpr EpCombineShared kShared = ep_combine_shared(kConfig);
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.barriers) + place(stage);
  }
  CROSSDOCK_DEVICE EpStageNote& note(u32 stage) const {
    constexpr EpCombineShared kShared = ep_combine_shared(kConfig);
    return reinterpret_cast<EpStageNote*>(dynamic_shared() + kShared.notes)[place(stage)];
  }
  CROSSDOCK_DEVICE u8* rows(u32 stage) const {
    return dynamic_shared() + place(stage) * kConfig.stage_bytes;
  }
  CROSSDOCK_DEVICE static u32 parity(u32 n) { return n / kConfig.stages & 1u; }
  CROSSDOCK_DEVICE u32 part_bytes(u32 index) const {
    return min_of(p.parts.bytes, p.input.row_bytes - index * p.parts.bytes);
  }

  // ---- tokens -----------------------------------------------------------------------------------

  CROSSDOCK_DEVICE u32 claim() const {
    return lane == 0 ? ptx::atom_add_relaxed_gpu(&p.state->tickets[epoch & 1u].value, 1u) : 0;
  }
  // The next ticket's token and, per lane, its row at that rank.
  CROSSDOCK_DEVICE void fetch_next() {
    next_ticket = ptx::shuffle(kFullMask, claimed, 0);
    const u32 next = next_ticket / p.parts.tickets_per_token();
    next_row = kNoRow;
    if (next >= p.tokens.tokens || lane >= p.view.world) return;
    const u32 block = next / p.tokens.per_block;
    const u32 index = next % p.tokens.per_block;
    const u64 group = u64{block} * p.tokens.groups + index / kWarpSize;
    const auto* word = reinterpret_cast<const U32x2*>(p.routes + group * p.view.world + lane);
    const U32x2 route = ptx::ld_weak(word);
    next_row = EpRoute{route.x, route.y}.row_of(index % kWarpSize);
  }
  CROSSDOCK_DEVICE bool next_token() {
    const u32 per_token = p.parts.tickets_per_token();
    token = next_ticket / per_token;
    tokens_left = token < p.tokens.tokens;
    if (!tokens_left) return false;
    row = next_row;
    part = next_ticket % per_token * p.parts.per_ticket;
    last_part = min_of(part + p.parts.per_ticket, p.parts.count) - 1;
    fetch_after = (part + last_part) / 2;
    claimed = claim();
    return true;
  }
  CROSSDOCK_DEVICE bool wait_inputs() {
    bool told = true;
    if (lane < p.view.world) {
      const u64 index = u64{epoch & 1u} * p.view.world + lane;
      const u64* word = p.view.template at<u64>(p.areas.inputs + index * sizeof(u64));
      u64 offset = 0;
      told = wait_announced(p.common, word, epoch, lane, offset);
      input = p.view.template at<u8>(offset, lane);
      ptx::fence_proxy_async();  // ordinary stores of the peer, bulk loads here
    }
    return !ptx::any(kFullMask, !told);
  }

  // ---- the pipe ---------------------------------------------------------------------------------

  CROSSDOCK_DEVICE void issue() {
    if ((issued == 0 || part > last_part) && !next_token()) return;
    const u32 stage = issued++ % kConfig.stages;
    const u32 mask = ptx::ballot(kFullMask, row != kNoRow);
    const u32 bytes = part_bytes(part);
    if (lane == 0) {
      note(stage) = {token, part, popcount(mask), 0};
      ptx::mbarrier_arrive_expect_tx(full(stage), popcount(mask) * bytes);
    }
    ptx::sync_warp(kFullMask);
    if (row != kNoRow) {
      const u32 at = popcount(mask & ((1u << lane) - 1));
      const u8* from = input + p.input.rows + u64{row} * p.input.row_bytes + part * p.parts.bytes;
      ptx::bulk_load(rows(stage) + at * p.parts.bytes, from, bytes, full(stage));
    }
    if (part == 0 && p.output.weights != nullptr) add_weights(mask);
    if (part++ == fetch_after) fetch_next();
  }
  CROSSDOCK_DEVICE bool add() {
    const u32 stage = added % kConfig.stages;
    const bool came = wait_stage(p.common, full(stage), parity(added));
    if (ptx::any(kFullMask, !came)) return false;
    ++added;
    const EpStageNote what = note(stage);
    switch (what.rows) {
      case 1:
        add_rows<1>(what, stage);
        break;
      case 2:
        add_rows<2>(what, stage);
        break;
      case 3:
        add_rows<3>(what, stage);
        break;
      case 4:
        add_rows<4>(what, stage);
        break;
      default:
        add_rows<0>(what, stage);
    }
    ptx::sync_warp(kFullMask);  // the stage may be loaded again
    return true;
  }
  // kRows: known, so that their loads go out together; 0: any number.
  template <u32 kRows>
  CROSSDOCK_DEVICE void add_rows(const EpStageNote& what, u32 stage) const {
    const u32 vectors = part_bytes(what.part) / sizeof(U32x4);
    const u32 step = p.parts.bytes / sizeof(U32x4);  // from one row to the next
    const auto* from = reinterpret_cast<const U32x4*>(rows(stage));
    const u64 at = u64{what.part} * p.parts.bytes;
    auto* to = reinterpret_cast<U32x4*>(p.output.rows + what.token * p.output.row_stride + at);
    for (u32 i = lane; i < vectors; i += kWarpSize) {
      EpAccumulator sum;
      CROSSDOCK_UNROLL
      for (u32 k = 0; k < 2; ++k)
        if (p.output.bias[k] != nullptr)
          sum.add(ptx::ld_weak(reinterpret_cast<const U32x4*>(
                                   p.output.bias[k] + what.token * p.output.bias_stride[k] + at) +
                               i));
      if constexpr (kRows != 0) {
        U32x4 v[kRows];
        CROSSDOCK_UNROLL
        for (u32 r = 0; r < kRows; ++r)
          v[r] = ptx::ld_shared(from + r * step + i);
        CROSSDOCK_UNROLL
        for (u32 r = 0; r < kRows; ++r)
          sum.add(v[r]);
      } else {
        for (u32 r = 0; r < what.rows; ++r)
          sum.add(ptx::ld_shared(from + r * step + i));
      }
      ptx::st_weak_no_allocate(to + i, sum.rounded());
    }
  }
  // The sums of the weights that come with the rows; a lane a selection.
  CROSSDOCK_DEVICE void add_weights(u32 mask) const {
    float sum = 0;
    for (u32 left = mask; left != 0; left &= left - 1) {
      const u32 owner = lowest_bit(left);
      const u64 block = ptx::shuffle(kFullMask, reinterpret_cast<u64>(input), owner);
      const u64 at = u64{ptx::shuffle(kFullMask, row, owner)} * p.top_k + lane;
      if (lane < p.top_k)
        sum += ptx::ld_weak(reinterpret_cast<const float*>(block + p.input.weights) + at);
    }
    if (lane < p.top_k) ptx::st_weak(p.output.weights + u64{token} * p.top_k + lane, sum);
  }
};

}  // namespace crossdock::device
