// ep_packet_combine: combine of a handful of tokens. The ranks that have rows of others' tokens
// send them in packets, whole, as the experts have left them; every rank adds up what comes. There
// is no announcement, no fence and no load from a peer: a row is on its way as soon as it is read.
//
// Launch on every rank after a dispatch of at most kEpMaxPacketTokens tokens, the same number of
// times for each slot: grid = send_blocks, then add_blocks; block = 32 * kConfig.warps threads.
// Either half may be a launch of its own.
//
//   epoch e at rank r                                   a peer
//     warp: a part of a row of a peer's token    ---->    sums[e & 1][r][n]
//     warp: a part of a token of this rank: the packets of all ranks that had it, in their order;
//           biases first, in fp32, rounded once
//     a packet of each rank at least, also when it has nothing for this one
//
// A rank sends for e when it has got everything of e - 1, which a peer sends after it has read all
// of e - 2: two parities are enough.
//
// Combines by flags (ep_combine) and in packets count together and may alternate in a slot. Their
// words are written now and then here too (kEpPacketsFollowEvery), so that none of them is so old
// that it looks like one of a combine to come. Masked ranks are left out: one that has missed
// 65,000 calls takes a reset, since words of 16 bits may be mistaken then.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/ep/add_rows.cuh>
#include <crossdock/ep/packet_send.cuh>
#include <crossdock/ep/wait_clock.cuh>

namespace crossdock::device {

struct EpPacketCombine {
  static constexpr u32 kPart = EpMessage::packets_in(kEpPartWords);
  static constexpr u32 kRanksAtOnce = 4;
  using Sums = float[kEpSumPackets][kPacketWords][2];
  const EpPacketCombineParams& p;
  u32 epoch;
  u32 masked;
  u32 warp;  // among those of its kind, of the grid
  u32 warps;
  u32 lane;
  EpPacketPlaces places;

  CROSSDOCK_DEVICE EpPacketCombine(const EpPacketCombineParams& params, u32 of_epoch, u32 of_masked,
                                   u32 index, u32 count)
      : p(params),
        epoch(of_epoch),
        masked(of_masked),
        warp(index),
        warps(count),
        lane(lane_index()),
        places{p.areas, p.view, of_epoch & 1u} {}

  CROSSDOCK_DEVICE u32 parts() const { return ceil_div(p.row_words, kEpPartWords); }
  CROSSDOCK_DEVICE u32 words_of(u32 part) const {
    return part == parts() ? p.top_k : min_of(kEpPartWords, p.row_words - part * kEpPartWords);
  }
  CROSSDOCK_DEVICE bool talks_to(u32 peer) const { return !is_masked(masked, peer); }

  // ---- send -------------------------------------------------------------------------------------

  CROSSDOCK_DEVICE void send_all() const {
    // Weights are a part more.
    const u32 units = parts() + 1;
    u32 rows = 0;
    if (lane < p.view.world && talks_to(lane))
      rows = ptx::ld_weak(p.source_ends + lane) - lane * p.stride;
    u32 next = warp;
    for (u32 i = 0; i < p.view.world; ++i) {
      const u32 after = p.view.rank + 1 + i;
      const u32 source = after < p.view.world ? after : after - p.view.world;
      const u32 mine = ptx::shuffle(kFullMask, rows, source) * units;
      for (; next < mine; next += warps)
        send(source, next / units, next % units);
      next -= mine;
    }
    // A rank that has nothing from here is to know that this rank has come so far.
    if (warp == 0 && lane < p.view.world && talks_to(lane))
      put_packet(places.header(p.view.rank, lane) + headers(), epoch, rows, 0);
    if (warp != 0) return;
    // A combine by flags that comes next deals tokens by it.
    if (lane == 0) ptx::st_relaxed_gpu(&p.state->tickets[(epoch + 1) & 1u].value, 0u);
    if (epoch % kEpPacketsFollowEvery < 2) follow();
  }
  // What a combine by flags would have told: nobody waits for it, but what it replaces is older
  // than can be told from what is to come.
  CROSSDOCK_DEVICE void follow() const {
    if (lane >= p.view.world || !talks_to(lane)) return;
    const u64 index = u64{epoch & 1u} * p.view.world + p.view.rank;
    put_tagged_word(p.view.at<u64>(p.input_words + index * sizeof(u64), lane), epoch, 0);
    // What the combine before had to read came before in the stream.
    ptx::st_release_sys(p.view.map(p.view.at<u32>(p.read_words) + p.view.rank, lane), epoch - 1);
  }
  // Combine has headers of its own, behind those of dispatch.
  CROSSDOCK_DEVICE u64 headers() const { return u64{2} * p.view.world; }
  CROSSDOCK_DEVICE void send(u32 source, u32 n, u32 part) const {
    const u64 row = u64{source} * p.stride + n;
    const auto* from = part == parts() ? reinterpret_cast<const u32*>(p.weights) + row * p.top_k
                                       : reinterpret_cast<const u32*>(p.rows) + row * p.row_words +
                                             part * kEpPartWords;
    const u32 count = words_of(part);
    Packet* to = places.sum(p.view.rank, n, source) + part * kPart;
    u32 words[kEpSumPackets][kPacketWords];
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < kEpSumPackets; ++j)
      CROSSDOCK_UNROLL
    for (u32 k = 0; k < kPacketWords; ++k) {
      const u32 i = (lane + j * kWarpSize) * kPacketWords + k;
      words[j][k] = i < count ? ptx::ld_weak(from + i) : 0;
    }
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < kEpSumPackets; ++j) {
      const u32 i = lane + j * kWarpSize;
      if (i * kPacketWords < count) put_packet(to + i, epoch, words[j][0], words[j][1]);
    }
  }

  // ---- add --------------------------------------------------------------------------------------

  // False when the rank aborts; the lanes agree.
  CROSSDOCK_DEVICE bool add_all() const {
    const u32 units = parts() + (p.output.weights != nullptr ? 1 : 0);
    u32 route = 0;
    if (lane < p.view.world && talks_to(lane) && p.tokens.tokens != 0)
      route = ptx::ld_weak(reinterpret_cast<const u32*>(p.routes + lane));
    // By the warp with the fewest parts, before them: its waits are those that are kept.
    if (warp == warps - 1 && !wait_headers()) return false;
    for (u32 unit = warp; unit < p.tokens.tokens * units; unit += warps)
      if (!add(route, unit / units, unit % units)) return false;
    return true;
  }
  // So that no rank is more than an epoch ahead.
  CROSSDOCK_DEVICE bool wait_headers() const {
    EpWaitClock clock(p.rank_wait_ns);
    bool came = true;
    if (lane < p.view.world && talks_to(lane)) {
      const Packet* packet = places.header(lane, p.view.rank) + headers();
      came = wait_until(
          p.common, {Phase::kEpochWord, lane, epoch},
          [&] { return u64{packet_is_of(ptx::ld_relaxed_sys(packet), epoch)}; },
          [&](u64 is_here) { return clock.stamp(is_here != 0); });
      clock.add(lane);
    }
    return !ptx::any(kFullMask, !came);
  }
  // The part as it comes from the next few ranks of `left`, which are taken out of it: all polled
  // at once, added in their order.
  CROSSDOCK_DEVICE bool add_some(Sums& sums, u32& left, u32 route, u32 token, u32 part) const {
    const u32 count = words_of(part);
    const Packet* packets[kRanksAtOnce * kEpSumPackets];
    u32 ranks = 0;  // a byte each
    u32 wanted = 0;
    CROSSDOCK_UNROLL
    for (u32 r = 0; r < kRanksAtOnce; ++r) {
      const bool any = left != 0;
      const u32 rank = any ? lowest_bit(left) : 0;
      left &= left - (any ? 1u : 0u);
      const u32 n = popcount(ptx::shuffle(kFullMask, route, rank) & ((1u << token) - 1));
      const Packet* from = places.sum(rank, n, p.view.rank) + part * kPart;
      ranks |= rank << 8 * r;
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpSumPackets; ++j) {
        packets[r * kEpSumPackets + j] = from + lane + j * kWarpSize;
        if (any && (lane + j * kWarpSize) * kPacketWords < count)
          wanted |= 1u << (r * kEpSumPackets + j);
      }
    }
    Packet got[kRanksAtOnce * kEpSumPackets]{};
    const bool came =
        wait_packets(p.common, {Phase::kEpochWord, kNoPeer, epoch}, packets, wanted, got,
                     [&](u32 i) { return ranks >> 8 * (i / kEpSumPackets) & 0xffu; });
    if (ptx::any(kFullMask, !came)) return false;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kRanksAtOnce * kEpSumPackets; ++i) {
      if ((wanted >> i & 1u) == 0) continue;
      CROSSDOCK_UNROLL
      for (u32 k = 0; k < kPacketWords; ++k)
        accumulate(sums[i % kEpSumPackets][k], packet_word(got[i], k), part == parts());
    }
    return true;
  }
  // `route`: the tokens of this rank that the lane's rank had, a bit each.
  CROSSDOCK_DEVICE bool add(u32 route, u32 token, u32 part) const {
    const bool weights = part == parts();
    const u32 count = words_of(part);
    Sums sums{};
    if (!weights) add_biases(sums, token, part, count);
    u32 left = ptx::ballot(kFullMask, (route >> token & 1u) != 0);
    while (left != 0)
      if (!add_some(sums, left, route, token, part)) return false;
    store(sums, token, part, count);
    return true;
  }
  CROSSDOCK_DEVICE static void accumulate(float (&sum)[2], u32 word, bool weights) {
    if (weights) {
      sum[0] += bit_cast<float>(word);
      return;
    }
    const ptx::F32x2 two = ptx::f32_from_bf16x2(word);
    sum[0] += two.lo;
    sum[1] += two.hi;
  }
  CROSSDOCK_DEVICE void add_biases(Sums& sums, u32 token, u32 part, u32 count) const {
    for (u32 b = 0; b < 2; ++b) {
      if (p.output.bias[b] == nullptr) continue;
      const auto* from =
          reinterpret_cast<const u32*>(p.output.bias[b] + token * p.output.bias_stride[b]) +
          part * kEpPartWords;
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpSumPackets; ++j)
        CROSSDOCK_UNROLL
      for (u32 k = 0; k < kPacketWords; ++k) {
        const u32 i = (lane + j * kWarpSize) * kPacketWords + k;
        if (i < count) accumulate(sums[j][k], ptx::ld_weak(from + i), false);
      }
    }
  }
  CROSSDOCK_DEVICE void store(const Sums& sums, u32 token, u32 part, u32 count) const {
    const bool weights = part == parts();
    u32* to = weights ? reinterpret_cast<u32*>(p.output.weights + u64{token} * p.top_k)
                      : reinterpret_cast<u32*>(p.output.rows + token * p.output.row_stride) +
                            part * kEpPartWords;
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < kEpSumPackets; ++j) {
      const u32 i = (lane + j * kWarpSize) * kPacketWords;
      u32 words[kPacketWords];
      CROSSDOCK_UNROLL
      for (u32 k = 0; k < kPacketWords; ++k)
        words[k] = weights ? bit_cast<u32>(sums[j][k][0])
                           : ptx::bf16x2_from_f32(sums[j][k][0], sums[j][k][1]);
      if (!weights && i < count) {
        ptx::st_weak(reinterpret_cast<U32x2*>(to + i), U32x2{words[0], words[1]});
        continue;
      }
      CROSSDOCK_UNROLL
      for (u32 k = 0; k < kPacketWords; ++k)
        if (i + k < count) ptx::st_weak(to + i + k, words[k]);
    }
  }
};

namespace kernel {

template <EpPacketCombineConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    ep_packet_combine(CROSSDOCK_PARAMS(EpPacketCombineParams, p)) {
  const ThreadGroup all = ThreadGroup::block();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  // All loads first, then what comes of them.
  const bool sends = p.send_blocks != 0;
  const bool aborted_before = aborted(p.common);
  const u32 launch = read_epoch(&p.state->combine);
  const u32 masked = masked_ranks(p.masking);
  // Of the launch that has sent, if that was another one.
  const u32 epoch = ptx::uniform(launch - (sends ? 0 : 1));
  const bool stop = ptx::any(kFullMask, aborted_before);
  const u32 warp = ptx::uniform(warp_index());
  if (!stop && block_index() < p.send_blocks) {
    const u32 warps = p.send_blocks * kConfig.warps;
    EpPacketCombine(p, epoch, masked, warp * p.send_blocks + block_index(), warps).send_all();
  } else if (!stop) {
    const u32 block = block_index() - p.send_blocks;
    const u32 warps = p.add_blocks * kConfig.warps;
    (void)EpPacketCombine(p, epoch, masked, warp * p.add_blocks + block, warps).add_all();
  }
  all.sync();  // all warps have read the epoch
  if (all.leader() && sends) pass_epoch(&p.state->combine, epoch);
}

}  // namespace kernel
}  // namespace crossdock::device
