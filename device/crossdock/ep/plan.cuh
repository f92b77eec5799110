// The plan of ep_dispatch: which tokens of a block go where, and in which row. By the threads of
// the block before its roles begin, in steps with a barrier between them:
//
//   route     all threads       which ranks each token goes to
//   publish   warp 0            how many tokens go to each, to everybody
//   gather    dispatch warps    what comes before this block's; then base() is known to all
//   ends      one warp          where this rank's rows end
//
//   block b of rank r, epoch e                         every rank
//     ids -> destinations of each token (a bit mask)
//     ballots -> route words {tokens of the group, row within the block}
//     counts[e & 1][r][b] = {e, counts per rank} ----->  polled by the blocks that come after:
//   base of destination d =                              all blocks of later ranks, later blocks
//       counts of earlier ranks for d                    of this rank
//     + counts of earlier blocks of this rank for d
//   the last block of r: ends[e & 1][r] of d = {e, base + own count} ----> number of rows at d
//
// So the order of rows is (source rank, token) whatever the schedule, and no block waits for one
// that comes later. With the routing of an earlier dispatch (EpReuse) route words and ends are read
// instead of made; counts are published all the same, so that no word grows old. A block that fails
// puts ep_given_up() in place of its counts, and the last block in place of the ends, so that every
// rank learns of it, and of whose fault it is, at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/dispatch_block.cuh>

namespace crossdock::device {

template <EpDispatchConfig kConfig>
CROSSDOCK_DEVICE i64 ep_load_id(const EpDispatchInput& input, u64 index) {
  if constexpr (kConfig.wide_ids) {
    return static_cast<i64>(ptx::ld_weak(static_cast<const u64*>(input.ids) + index));
  } else {
    return ptx::ld_weak(static_cast<const i32*>(input.ids) + index);
  }
}

template <class Block>
struct EpPlan {
  static constexpr EpDispatchConfig kConfig = Block::kVariant;
  static constexpr u32 kIdsAtOnce = 8;  // loads in flight of a thread
  struct Sum4 {
    u32 of[4] = {};
  };
  const Block& b;

  // The ranks of each token as route words. False: an id is out of range, a fault has been raised.
  CROSSDOCK_DEVICE bool route() const {
    if (b.reuses()) return load_routes();
    bool valid = true;
    // Not from warp 0 on: it has the first row to load.
    const u32 warp = (warp_index() + kConfig.warps() - 1) % kConfig.warps();
    for (u32 group = warp; group < b.groups(); group += kConfig.warps()) {
      const u32 token = group * kWarpSize + lane_index();
      u32 ranks = 0;
      if (token < b.count) valid &= destinations(b.first + token, ranks);
      ranks &= ~b.masked;
      u32 mine = 0;
      CROSSDOCK_NO_UNROLL
      for (u32 d = 0; d < b.world(); ++d) {
        const u32 tokens = ptx::ballot(kFullMask, (ranks >> d & 1u) != 0);
        if (lane_index() == d) mine = tokens;
      }
      if (lane_index() < b.world()) b.route(group, lane_index()) = {mine, 0};
    }
    return valid;
  }
  // The block's counts, or that it has given up. Completes the route words relative to the block.
  CROSSDOCK_DEVICE void publish(bool failed) const {
    const u32 total = failed ? 0 : count();
    const u32 lane = lane_index();
    const u32 quads = ep_quads(b.world());
    const u64 given_up = failed ? b.given_up() : 0;
    u64* here = b.count_words(b.rank(), b.block);
    CROSSDOCK_NO_UNROLL
    for (u32 quad = 0; quad < quads; ++quad) {
      u64 word = given_up;
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < 4; ++i)
        word |= u64{ptx::shuffle(kFullMask, total, quad * 4 + i)} << (kEpCountBits * i);
      if (lane >= b.world()) continue;
      const u32 after = b.rank() + lane;
      const u32 peer = after < b.world() ? after : after - b.world();
      if (b.talks_to(peer)) put_tagged_word(b.p.view.map(here, peer) + quad, b.epoch, word);
    }
  }
  // The words of all earlier blocks dealt to the threads; each warp leaves its sum for every
  // destination in `partial`. False: a word did not come, or another rank has given up.
  CROSSDOCK_DEVICE bool gather() const {
    constexpr u32 kThreads = kConfig.dispatch_warps * kWarpSize;
    if (b.reuses()) {
      b.template at<u32>(b.shared.partial)[thread_index()] = 0;
      return true;
    }
    const u32 quads = ep_quads(b.world());
    const u32 quad = thread_index() % quads;
    const u32 words = (b.rank() * b.p.most_blocks + b.block) * quads;
    // With fixed places only those of this rank count.
    const u32 begin = b.fixed() ? b.rank() * b.p.most_blocks * quads : 0;
    Sum4 sum;
    bool got = true;
    CROSSDOCK_NO_UNROLL
    for (u32 i = begin + thread_index(); i < words && got; i += kThreads) {
      const u32 source = i / quads / b.p.most_blocks;
      const u32 of_block = i / quads % b.p.most_blocks;
      if (of_block < b.p.source_blocks[source]) got = add_word(source, of_block, quad, sum);
    }
    u32 mine = 0;
    CROSSDOCK_NO_UNROLL
    for (u32 q = 0; q < quads; ++q)
      CROSSDOCK_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      const u32 total = ptx::reduce_add(kFullMask, quad == q ? sum.of[i] : 0);
      if (lane_index() == q * 4 + i) mine = total;
    }
    b.template at<u32>(b.shared.partial)[thread_index()] = mine;
    return got;
  }
  // Of the last block with tokens: where this rank's rows end at each destination.
  CROSSDOCK_DEVICE void publish_ends(bool failed) const {
    const u32 destination = lane_index();
    if (b.block != b.p.tokens.last_block() || destination >= b.world()) return;
    if (!b.talks_to(destination)) {
      // It has none, also for a dispatch that uses the routing again when it is back.
      ptx::st_weak(b.p.result.sent_ends + destination, b.rank() * b.p.stride);
      return;
    }
    u64 end = 0;
    if (failed) {
      end = b.given_up();
    } else {
      end = own_end(destination);
      ptx::st_weak(b.p.result.sent_ends + destination, static_cast<u32>(end));
      if (b.reuses()) end |= kEpReused;
    }
    put_tagged_word(b.p.view.map(b.end_word(b.rank()), destination), b.epoch, end);
  }
  // The row of the block's first token at `destination`, after gather(). Any thread.
  CROSSDOCK_DEVICE u32 base(u32 destination) const {
    const u32* partial = b.template at<u32>(b.shared.partial);
    u32 sum = b.reuses() ? 0 : b.rank() * b.p.stride;
    CROSSDOCK_UNROLL
    for (u32 warp = 0; warp < kConfig.dispatch_warps; ++warp)
      sum += partial[warp * kWarpSize + destination];
    return sum;
  }

 private:
  // ---- tokens ---------------------------------------------------------------------------------

  // The ranks that token `token` of this rank goes to. False: an id is out of range.
  CROSSDOCK_DEVICE bool destinations(u32 token, u32& ranks) const {
    const u32 top_k = b.p.input.top_k;
    const u64 first = u64{token} * top_k;
    i64 wrong = -1;
    ranks = 0;
    for (u32 k = 0; k < top_k; k += kIdsAtOnce) {
      i64 ids[kIdsAtOnce];
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kIdsAtOnce; ++i)
        ids[i] = k + i < top_k ? ep_load_id<kConfig>(b.p.input, first + k + i) : -1;
      CROSSDOCK_UNROLL
      for (u32 i = 0; i < kIdsAtOnce; ++i) {
        const bool valid = ids[i] >= 0 && ids[i] < b.p.experts.experts;
        if (valid) ranks |= 1u << b.p.experts.owner(static_cast<u32>(ids[i]));
        if (!valid && ids[i] != -1) wrong = ids[i];
      }
    }
    // Raised at one place: launches of few tokens feel every line of code they have to fetch.
    if (wrong == -1) return true;
    raise_fault(b.p.common, {Phase::kRouting, b.rank(), token}, static_cast<u64>(wrong), 0);
    return false;
  }

  // The route words of the earlier dispatch, whose rows are those at the destination.
  CROSSDOCK_DEVICE bool load_routes() const {
    const u64 first = u64{b.block} * b.p.tokens.groups * b.world();
    const auto* words = reinterpret_cast<const U32x2*>(b.p.reuse.routes + first);
    for (u32 i = thread_index(); i < b.groups() * b.world(); i += block_size()) {
      const U32x2 word = ptx::ld_weak(words + i);
      b.route(i / b.world(), i % b.world()) = {b.talks_to(i % b.world()) ? word.x : 0u, word.y};
    }
    return true;
  }

  // ---- counts ---------------------------------------------------------------------------------

  // Where this rank's rows end at `destination`. In the last block with tokens.
  CROSSDOCK_DEVICE u32 own_end(u32 destination) const {
    if (b.reuses()) return ptx::ld_weak(b.p.reuse.sent_ends + destination);
    u32 end = base(destination);
    if (b.groups() != 0) {
      const EpRoute last = b.route(b.groups() - 1, destination);
      end += last.row + popcount(last.tokens);
    }
    return end;
  }
  // By warp 0: rows within the block; a lane a destination, whose tokens it returns.
  CROSSDOCK_DEVICE u32 count() const {
    u32 total = 0;
    if (lane_index() >= b.world()) return total;
    CROSSDOCK_NO_UNROLL
    for (u32 group = 0; group < b.groups(); ++group) {
      EpRoute& route = b.route(group, lane_index());
      if (!b.reuses()) route.row = total;
      total += popcount(route.tokens);
    }
    return total;
  }
  // One word of an earlier block; false when it cannot be had.
  CROSSDOCK_DEVICE bool add_word(u32 source, u32 of_block, u32 quad, Sum4& sum) const {
    u64 value = 0;
    const u64* word = b.count_words(source, of_block) + quad;
    if (!wait_tagged_word(b.p.common, word, b.epoch, source, value)) return false;
    if (ep_is_given_up(value)) return b.pass_on(source, value);
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < 4; ++i)
      sum.of[i] += static_cast<u32>(value >> (kEpCountBits * i)) & ((1u << kEpCountBits) - 1);
    return true;
  }
};

}  // namespace crossdock::device
