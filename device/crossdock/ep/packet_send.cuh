// The blocks of ep_packet_dispatch that send: a warp takes a part of a row at a time, for all ranks
// that it goes to. Nothing is shared between warps.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/packet.cuh>
#include <crossdock/ep/cast.cuh>
#include <crossdock/layout/ep_packets.cuh>

namespace crossdock::device {

// Of a warp: bf16 of a part, then what the cast makes of it.
CROSSDOCK_HOST_DEVICE constexpr u32 ep_packet_cast_bytes() {
  return kEpPartWords * 4 + round_up(kEpPartWords * 4 / kEpScaleGroup * 4, 128u);
}
CROSSDOCK_HOST_DEVICE constexpr u32 ep_packet_warp_bytes() {
  return kEpPartWords * 8 + ep_packet_cast_bytes();
}
CROSSDOCK_HOST_DEVICE constexpr u32 ep_packet_shared(u32 warps, u32 experts) {
  return max_of(warps * ep_packet_warp_bytes(), round_up(experts * 4 + 256, 128u));
}

// Where packets of `source` lie in the window of `peer`.
struct EpPacketPlaces {
  const EpPacketAreas& areas;
  const SymmetricView& view;
  u32 parity;

  CROSSDOCK_DEVICE u64 index(u32 source) const { return u64{parity} * view.world + source; }
  CROSSDOCK_DEVICE Packet* header(u32 source, u32 peer) const {
    return view.at<Packet>(areas.headers, peer) + index(source);
  }
  CROSSDOCK_DEVICE Packet* row(u32 source, u32 n, u32 peer) const {
    return view.at<Packet>(areas.rows, peer) +
           (index(source) * areas.tokens + n) * areas.row_packets;
  }
  CROSSDOCK_DEVICE Packet* sum(u32 rank, u32 n, u32 peer) const {
    return view.at<Packet>(areas.sums, peer) + (index(rank) * areas.tokens + n) * areas.sum_packets;
  }
};

template <EpPacketConfig kConfig>
struct EpPacketSender {
  static constexpr u32 kIdsAtOnce = 8;
  const EpPacketParams& p;
  const EpSmallParams& s;
  u32 epoch;
  u32 masked;
  u32 warp;
  u32 lane;
  EpPacketPlaces places;
  u32 ranks = 0;  // that the lane's token goes to

  CROSSDOCK_DEVICE EpPacketSender(const EpPacketParams& params, u32 of_epoch, u32 of_masked,
                                  u32 index)
      : p(params),
        s(params.small),
        epoch(of_epoch),
        masked(of_masked),
        warp(index),
        lane(lane_index()),
        places{p.areas, s.view, of_epoch & 1u} {}

  // `stop`: the rank has aborted already, perhaps in another block of this launch.
  CROSSDOCK_DEVICE void run(bool stop) {
    const bool first = block_index() == 0 && warp == 0;
    if (stop) {
      if (first) tell(true);
      return;
    }
    ask_for_first();
    Ids ids;
    load(ids, 0);
    const u32 freed = talks_to(lane) ? ptx::ld_acquire_sys(free_word(lane)) : 0;
    const bool valid = find_ranks(ids);
    const bool failed = ptx::any(kFullMask, !valid);
    ranks &= ~masked;
    const bool behind = ptx::any(kFullMask, talks_to(lane) && is_behind(freed));
    // Whom this rank waits for may wait for it: both have missed what was told while one was
    // masked.
    if (first && behind) release();
    if (!failed && behind && !wait_free()) {
      if (first) tell(true);  // or others would wait for this rank and blame it
      return;
    }
    if (first) tell(failed);
    if (failed) return;
    const u32 units = s.tokens * (p.message.parts() + 1);
    for (u32 unit = warp * s.send_blocks + block_index(); unit < units;
         unit += kConfig.warps * s.send_blocks)
      send(unit % s.tokens, unit / s.tokens);
    if (first && !behind) release();
  }

 private:
  CROSSDOCK_DEVICE bool talks_to(u32 peer) const {
    return peer < s.view.world && !is_masked(masked, peer);
  }
  CROSSDOCK_DEVICE u32* free_word(u32 destination) const {
    return s.view.at<u32>(s.areas.free) + destination;
  }
  CROSSDOCK_DEVICE i64 id(u64 index) const {
    if (s.wide_ids)
      return static_cast<i64>(ptx::ld_weak(static_cast<const u64*>(s.input.ids) + index));
    return ptx::ld_weak(static_cast<const i32*>(s.input.ids) + index);
  }

  // The first part of this warp, into L2, beside what the plan needs.
  CROSSDOCK_DEVICE void ask_for_first() const {
    const u32 unit = warp * s.send_blocks + block_index();
    if (unit >= s.tokens * p.message.parts()) return;
    constexpr u32 kPerWord = kConfig.cast ? 8 : 4;  // bytes of the input
    const u32 part = unit / s.tokens;
    const u8* from =
        s.input.rows + unit % s.tokens * s.input.row_stride + u64{part} * kEpPartWords * kPerWord;
    if (lane * 128 < p.message.words_of(part) * kPerWord) ptx::prefetch_l2(from + lane * 128);
  }

  // ---- plan: a lane a token ---------------------------------------------------------------------

  struct Ids {
    i64 of[kIdsAtOnce];
  };
  CROSSDOCK_DEVICE void load(Ids& ids, u32 k) const {
    const u64 begin = u64{lane} * s.input.top_k;
    CROSSDOCK_UNROLL
    for (u32 i = 0; i < kIdsAtOnce; ++i)
      ids.of[i] = lane < s.tokens && k + i < s.input.top_k ? id(begin + k + i) : -1;
  }
  CROSSDOCK_DEVICE bool find_ranks(Ids& ids) {
    i64 wrong = -1;
    for (u32 k = 0; k < s.input.top_k; k += kIdsAtOnce) {
      if (k != 0) load(ids, k);
      CROSSDOCK_UNROLL
      for (const i64 expert : ids.of) {
        const bool valid = expert >= 0 && expert < s.experts.experts;
        if (valid) ranks |= 1u << s.experts.owner(static_cast<u32>(expert));
        if (!valid && expert != -1) wrong = expert;
      }
    }
    if (wrong == -1) return true;
    raise_fault(s.common, {Phase::kRouting, s.view.rank, lane}, static_cast<u64>(wrong), 0);
    return false;
  }
  // The tokens that go to `destination`, a bit each. By the warp.
  CROSSDOCK_DEVICE u32 tokens_to(u32 destination) const {
    return ptx::ballot(kFullMask, (ranks >> destination & 1u) != 0);
  }
  // What the slot's packets of two uses ago held has been read: long true, since everybody says so
  // a use earlier.
  CROSSDOCK_DEVICE bool is_behind(u32 freed) const {
    return static_cast<i32>(freed - (epoch - 2)) < 0;
  }
  CROSSDOCK_DEVICE bool wait_free() const {
    bool free = true;
    if (talks_to(lane))
      free = wait_counter(s.common, free_word(lane), {Phase::kSlotFree, lane, epoch - 2});
    return !ptx::any(kFullMask, !free);
  }
  // Headers and routes.
  CROSSDOCK_DEVICE void tell(bool failed) const {
    u32 mine = 0;
    for (u32 d = 0; d < s.view.world; ++d) {
      const u32 tokens = tokens_to(d);
      if (lane == d) mine = tokens;
    }
    EpHeader header = EpHeader::make(popcount(mine), 0, s.output);
    if (failed) {
      u32* abort = &s.common.control->abort.value;
      header = EpHeader::give_up(abort_peer(ptx::atom_or_relaxed_gpu(abort, 0u)));
    }
    if (talks_to(lane)) put_packet(places.header(s.view.rank, lane), epoch, header.value, 0);
    if (!failed && lane < s.view.world)
      ptx::st_weak(reinterpret_cast<U32x2*>(s.result.routes + lane),
                   U32x2{mine, s.view.rank * s.stride});
  }
  // Whoever came before in the stream has read the slot.
  CROSSDOCK_DEVICE void release() const {
    ptx::fence_acq_rel_sys();
    if (talks_to(lane)) ptx::st_relaxed_sys(s.view.map(free_word(s.view.rank), lane), epoch - 1);
    if (lane == 0) ptx::st_weak(&s.state->released.value, epoch - 1);
  }

  // ---- rows -------------------------------------------------------------------------------------

  // Calls `body(destination, packets of the token's row there)` for every destination.
  template <class Body>
  CROSSDOCK_DEVICE void for_each_row(u32 token, const Body& body) const {
    const u32 to = ptx::shuffle(kFullMask, ranks, token);
    for (u32 i = 0; i < s.view.world; ++i) {
      const u32 after = s.view.rank + 1 + i;
      const u32 d = after < s.view.world ? after : after - s.view.world;
      const u32 tokens = tokens_to(d);
      if ((to >> d & 1u) != 0)
        body(d, places.row(s.view.rank, popcount(tokens & ((1u << token) - 1)), d));
    }
  }
  CROSSDOCK_DEVICE void send(u32 token, u32 part) const {
    if (part == p.message.parts()) return send_tail(token);
    const u8* row = s.input.rows + token * s.input.row_stride;
    u32 words[kEpPartPackets][kPacketWords];
    const u32 count = p.message.words_of(part) + p.message.scales_of(part);
    if constexpr (kConfig.cast) {
      u8* stage = dynamic_shared() + warp * ep_packet_warp_bytes();
      u8* out = stage + kEpPartWords * 8;
      cast(row + u64{part} * kEpPartWords * 8, stage, out, p.message.words_of(part) * 4);
      take(words, count,
           [&](u32 i) { return ptx::ld_shared(reinterpret_cast<const u32*>(out) + i); });
      ptx::sync_warp(kFullMask);
    } else {
      const auto* from = reinterpret_cast<const u32*>(row) + part * kEpPartWords;
      take(words, count, [&](u32 i) { return ptx::ld_weak(from + i); });
    }
    const u32 begin = part * p.message.part_packets();
    for_each_row(token, [&](u32, Packet* packets) {
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpPartPackets; ++j) {
        const u32 n = lane + j * kWarpSize;
        if (n * kPacketWords < count)
          put_packet(packets + begin + n, epoch, words[j][0], words[j][1]);
      }
    });
  }
  template <class Word>
  CROSSDOCK_DEVICE void take(u32 (&words)[kEpPartPackets][kPacketWords], u32 count,
                             const Word& word) const {
    CROSSDOCK_UNROLL
    for (u32 j = 0; j < kEpPartPackets; ++j)
      CROSSDOCK_UNROLL
    for (u32 k = 0; k < kPacketWords; ++k) {
      const u32 i = (lane + j * kWarpSize) * kPacketWords + k;
      words[j][k] = i < count ? word(i) : 0;
    }
  }
  CROSSDOCK_DEVICE void cast(const u8* from, u8* stage, u8* out, u32 values) const {
    for (u32 i = lane; i < values / 8; i += kWarpSize)
      ptx::st_shared(reinterpret_cast<U32x4*>(stage) + i,
                     ptx::ld_weak(reinterpret_cast<const U32x4*>(from) + i));
    ptx::sync_warp(kFullMask);
    (void)EpCast(stage, out, values, false).run([] {}, [] { return true; });
    ptx::sync_warp(kFullMask);
  }
  // Scales, ids as the destination numbers them, weights, token number.
  CROSSDOCK_DEVICE void send_tail(u32 token) const {
    const EpMessage& m = p.message;
    const u64 choice = u64{token} * m.top_k;
    const auto* scales =
        reinterpret_cast<const u32*>(s.input.scales + token * s.input.scale_stride);
    const u32 begin = m.parts() * m.part_packets();
    for_each_row(token, [&](u32 to, Packet* packets) {
      const auto word = [&](u32 i) -> u32 {
        if (i < m.tail_scales()) return ptx::ld_weak(scales + i);
        i -= m.tail_scales();
        if (i >= 2 * m.top_k) return token;
        const i64 expert = id(choice + i % m.top_k);
        const u32 local = static_cast<u32>(expert) - s.experts.first(to);
        const bool here = expert >= 0 && local < s.experts.count(to);
        if (i < m.top_k) return here ? local : static_cast<u32>(-1);
        if (!here || s.input.weights == nullptr) return 0;
        return bit_cast<u32>(ptx::ld_weak(s.input.weights + choice + (i - m.top_k)));
      };
      for (u32 n = lane; n * kPacketWords < m.tail_words(); n += kWarpSize) {
        u32 words[kPacketWords];
        CROSSDOCK_UNROLL
        for (u32 k = 0; k < kPacketWords; ++k) {
          const u32 i = n * kPacketWords + k;
          words[k] = i < m.tail_words() ? word(i) : 0;
        }
        put_packet(packets + begin + n, epoch, words[0], words[1]);
      }
    });
  }
};

}  // namespace crossdock::device
