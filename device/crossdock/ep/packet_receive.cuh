// The blocks of ep_packet_dispatch that receive: a warp takes a part of a row that comes, and
// writes it where it belongs; the last block counts rows and selections.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/packet_send.cuh>
#include <crossdock/ep/wait_clock.cuh>

namespace crossdock::device {

// Waits for the headers of all sources, a lane each: rows that come. By a warp. `waits`: where the
// times are added, or null. False when the rank aborts; the lanes agree.
CROSSDOCK_DEVICE bool ep_packet_headers(const EpPacketParams& p, const EpPacketPlaces& places,
                                        u32 epoch, u32 masked, u32& rows, u64* waits = nullptr) {
  const EpSmallParams& s = p.small;
  const u32 source = lane_index();
  rows = 0;
  bool came = true;
  if (source < s.view.world && !is_masked(masked, source)) {
    const Packet* const packets[1] = {places.header(source, s.view.rank)};
    const Expected expected{Phase::kEpochWord, source, epoch};
    if (waits != nullptr) {
      EpWaitClock clock(waits);
      came = wait_until(
          s.common, expected,
          [&] { return u64{packet_is_of(ptx::ld_relaxed_sys(packets[0]), epoch)}; },
          [&](u64 is_here) { return clock.stamp(is_here != 0); });
      clock.add(source);
    }
    Packet got[1]{};
    came = came && wait_packets(s.common, expected, packets, 1u, got);
    const EpHeader header{packet_word(got[0], 0)};
    if (came && header.given_up()) {
      const u32 culprit = header.culprit();
      raise_fault(s.common, {Phase::kPeerRouting, culprit == kNoPeer ? source : culprit, epoch},
                  source, 0);
      came = false;
    } else if (came && header.shape() != EpHeader::shape_of(s.output)) {
      raise_fault(s.common, {Phase::kShape, source, s.output.row_bytes}, header.row_bytes(), 0);
      came = false;
    }
    if (came) rows = header.rows();
  }
  return !ptx::any(kFullMask, !came);
}

template <EpPacketConfig kConfig>
struct EpPacketReceiver {
  const EpPacketParams& p;
  const EpSmallParams& s;
  u32 epoch;
  u32 masked;
  u32 warp;
  u32 lane;
  EpPacketPlaces places;
  u8* output;

  CROSSDOCK_DEVICE EpPacketReceiver(const EpPacketParams& params, u32 of_epoch, u32 of_masked,
                                    u32 index)
      : p(params),
        s(params.small),
        epoch(of_epoch),
        masked(of_masked),
        warp(index),
        lane(lane_index()),
        places{p.areas, s.view, of_epoch & 1u},
        output(s.view.at<u8>(s.output_offset)) {}

  // `block`: number among those that receive.
  CROSSDOCK_DEVICE void run(u32 block) const {
    u32 rows = 0;
    if (!ep_packet_headers(p, places, epoch, masked, rows)) return;
    const u32 parts = p.message.parts() + 1;
    const u32 warps = p.receive_blocks * kConfig.warps;
    // Units in the order of sources, rows, parts, as many as come; dealt to the warps in turns.
    u32 next = warp * p.receive_blocks + block;
    for (u32 source = 0; source < s.view.world; ++source) {
      const u32 units = ptx::shuffle(kFullMask, rows, source) * parts;
      for (; next < units; next += warps)
        if (!receive(source, next / parts, next % parts)) return;
      next -= units;
    }
  }

 private:
  // False when the rank aborts; all lanes agree.
  CROSSDOCK_DEVICE bool receive(u32 source, u32 n, u32 part) const {
    const EpMessage& m = p.message;
    const Packet* from = places.row(source, n, s.view.rank) + part * m.part_packets();
    const bool tail = part == m.parts();
    const u32 count = tail ? m.tail_words() : m.words_of(part) + m.scales_of(part);
    const u64 row = u64{source} * s.stride + n;
    for (u32 first = 0; first * kPacketWords < count; first += kEpPartPackets * kWarpSize) {
      const Packet* packets[kEpPartPackets];
      u32 wanted = 0;
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpPartPackets; ++j) {
        const u32 i = first + lane + j * kWarpSize;
        packets[j] = from + i;
        if (i * kPacketWords < count) wanted |= 1u << j;
      }
      Packet got[kEpPartPackets]{};
      const bool came =
          wait_packets(s.common, {Phase::kSourceFlag, source, epoch}, packets, wanted, got);
      if (ptx::any(kFullMask, !came)) return false;
      CROSSDOCK_UNROLL
      for (u32 j = 0; j < kEpPartPackets; ++j) {
        const u32 i = (first + lane + j * kWarpSize) * kPacketWords;
        if (!tail && i < m.words_of(part)) {  // both words: rows are multiples of 16 bytes
          put_pair(row, part, i, got[j]);
          continue;
        }
        CROSSDOCK_UNROLL
        for (u32 k = 0; k < kPacketWords; ++k)
          if (i + k < count) put(row, part, i + k, packet_word(got[j], k));
      }
    }
    return true;
  }
  CROSSDOCK_DEVICE u32* words_at(u64 row, u32 part, u32 i) const {
    auto* to = reinterpret_cast<u32*>(output + s.output.rows + row * s.output.row_bytes);
    return to + part * kEpPartWords + i;
  }
  CROSSDOCK_DEVICE void put_pair(u64 row, u32 part, u32 i, const Packet& packet) const {
    ptx::st_weak(reinterpret_cast<U32x2*>(words_at(row, part, i)),
                 U32x2{packet_word(packet, 0), packet_word(packet, 1)});
  }
  // Word `i` of a part that is not of its row, or of the tail.
  CROSSDOCK_DEVICE void put(u64 row, u32 part, u32 i, u32 word) const {
    const EpMessage& m = p.message;
    const EpOutputLayout& out = s.output;
    if (part < m.parts()) {
      const u32 scale = part * (kEpPartWords * 4 / kEpScaleGroup);
      return put_scale(row, scale + i - m.words_of(part), word);
    }
    if (i < m.tail_scales()) return put_scale(row, i, word);
    i -= m.tail_scales();
    if (i < m.top_k)
      return ptx::st_weak(reinterpret_cast<u32*>(output + out.ids) + row * m.top_k + i, word);
    if (i >= 2 * m.top_k)
      return ptx::st_weak(reinterpret_cast<u32*>(output + out.sources) + row, word);
    if (s.input.weights != nullptr)
      ptx::st_weak(reinterpret_cast<u32*>(output + out.weights) + row * m.top_k + i - m.top_k,
                   word);
  }
  CROSSDOCK_DEVICE void put_scale(u64 row, u32 i, u32 word) const {
    const EpOutputLayout& out = s.output;
    auto* scales = reinterpret_cast<u32*>(output + out.scales);
    const u64 at =
        out.scale_columns != 0 ? u64{i} * out.scale_columns + row : row * (out.scale_bytes / 4) + i;
    ptx::st_weak(scales + at, word);
  }
};

// By all threads of the last block: where the rows of each source end, and how often each expert
// was chosen, from the packets with ids.
CROSSDOCK_DEVICE void ep_packet_count(const EpPacketParams& p, u32 epoch, u32 masked, bool stop) {
  const EpSmallParams& s = p.small;
  const ThreadGroup all = ThreadGroup::block();
  const EpMessage& m = p.message;
  const u32 experts = s.experts.count(s.view.rank);
  auto* histogram = reinterpret_cast<u32*>(dynamic_shared());
  for (u32 i = thread_index(); i < experts; i += block_size())
    histogram[i] = 0;
  const EpPacketPlaces places{p.areas, s.view, epoch & 1u};
  u32 rows = 0;
  // By one warp: its waits are those that are kept.
  u64* waits = warp_index() == 0 ? s.statistics.source_wait_ns : nullptr;
  const bool came = !stop && ep_packet_headers(p, places, epoch, masked, rows, waits);
  if (all.any(!came)) return;
  bool ok = true;
  for (u32 source = 0; source < s.view.world && ok; ++source) {
    const u32 choices = ptx::shuffle(kFullMask, rows, source) * m.top_k;
    for (u32 c = thread_index(); c < choices && ok; c += block_size()) {
      const u32 word = m.tail_scales() + c % m.top_k;
      const Packet* const packets[1] = {places.row(source, c / m.top_k, s.view.rank) +
                                        m.parts() * m.part_packets() + word / kPacketWords};
      Packet got[1]{};
      ok = wait_packets(s.common, {Phase::kSourceFlag, source, epoch}, packets, 1u, got);
      const u32 expert = packet_word(got[0], word % kPacketWords);
      if (ok && expert < experts) ptx::red_add_shared(histogram + expert, 1u);
    }
    ptx::sync_warp(kFullMask);
  }
  if (all.any(!ok)) return;
  for (u32 i = thread_index(); i < experts; i += block_size()) {
    const u32 selections = histogram[i];
    ptx::st_weak(s.result.expert_counts + i, selections);
    u64* kept = s.statistics.expert_selections;
    if (kept != nullptr && selections != 0) ptx::red_add_relaxed_gpu(kept + i, u64{selections});
    if (s.result.host_experts != nullptr)
      put_epoch_word(s.result.host_experts + i, s.result.host_ticket, selections);
  }
  if (warp_index() != 0) return;
  const u32 source = lane_index();
  if (source < s.view.world) ptx::st_weak(s.result.source_ends + source, source * s.stride + rows);
  const u32 total = ptx::reduce_add(kFullMask, rows);
  if (source == 0 && s.result.host_rows != nullptr)
    put_epoch_word(s.result.host_rows, s.result.host_ticket, total);
}

}  // namespace crossdock::device
