// A handful of tokens: rows travel in packets (comm/packet.cuh) to a staging area of the receiver,
// which takes them apart. Parameters and the layout of messages. Plain data and constexpr
// functions, shared by host, kernels and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_combine.cuh>
#include <crossdock/layout/ep_small.cuh>

namespace crossdock::device {

inline constexpr u32 kEpMaxPacketTokens = 32;  // of a rank: a lane each
inline constexpr u32 kEpPartWords = 128;       // of a row in one part: what a warp takes
inline constexpr u32 kEpPartPackets = 3;       // of a part, of a lane
inline constexpr u32 kEpSumPackets = 2;        // of a part of a sum, which has no scales

// One row in packets: its parts, then what goes with it. With a cast the scales of a part follow
// its values, else all scales are in the tail.
struct EpMessage {
  u32 row_words;
  u32 scale_words;
  u32 top_k;
  bool cast;

  CROSSDOCK_HOST_DEVICE constexpr u32 parts() const { return ceil_div(row_words, kEpPartWords); }
  CROSSDOCK_HOST_DEVICE constexpr u32 words_of(u32 part) const {
    return min_of(kEpPartWords, row_words - part * kEpPartWords);
  }
  // Scales of a part: one for 128 values of e4m3.
  CROSSDOCK_HOST_DEVICE constexpr u32 scales_of(u32 part) const {
    return cast ? words_of(part) * 4 / kEpScaleGroup : 0;
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 part_packets() const {
    return packets_in(kEpPartWords + (cast ? kEpPartWords * 4 / kEpScaleGroup : 0));
  }
  CROSSDOCK_HOST_DEVICE constexpr u32 tail_scales() const { return cast ? 0 : scale_words; }
  // Scales, ids, weights, token number.
  CROSSDOCK_HOST_DEVICE constexpr u32 tail_words() const { return tail_scales() + 2 * top_k + 1; }
  CROSSDOCK_HOST_DEVICE constexpr u32 packets() const {
    return parts() * part_packets() + packets_in(tail_words());
  }
  CROSSDOCK_HOST_DEVICE static constexpr u32 packets_in(u32 words) { return ceil_div(words, 2u); }
};
static_assert(kEpPartPackets * kWarpSize * 2 >= kEpPartWords + kEpPartWords * 4 / kEpScaleGroup,
              "a warp has room for its part and the scales");
static_assert(kEpSumPackets * kWarpSize * 2 == kEpPartWords);

// Of one slot: offsets in every rank's window. [2] is the parity of the epoch.
struct EpPacketAreas {
  u64 headers;      // [2][source] packets: what comes; then as many of combine
  u64 rows;         // [2][source][tokens][row_packets]
  u64 sums;         // [2][rank][tokens][sum_packets]: rows of combine
  u32 tokens;       // of a rank
  u32 row_packets;  // room of a row
  u32 sum_packets;
};
CROSSDOCK_HOST_DEVICE constexpr EpPacketAreas add_ep_packets(SymmetricLayout& layout, u32 world,
                                                             u32 tokens, EpMessage largest,
                                                             u32 combine_words) {
  EpPacketAreas out{};
  out.tokens = tokens;
  // A cast adds scales to every part; without one they are in the tail.
  EpMessage cast = largest;
  cast.cast = true;
  out.row_packets = max_of(largest.packets(), cast.packets());
  out.sum_packets = ceil_div(combine_words, kEpPartWords) * EpMessage::packets_in(kEpPartWords) +
                    EpMessage::packets_in(largest.top_k);
  const u64 rows = u64{2} * world * tokens;
  SymmetricLayout block;
  out.headers = block.add("headers", u64{4} * world * 16);
  out.rows = block.add("rows", rows * out.row_packets * 16);
  out.sums = block.add("sums", rows * out.sum_packets * 16);
  const u64 at = layout.add("ep.packets", block.bytes);
  out.headers += at;
  out.rows += at;
  out.sums += at;
  return out;
}

struct EpPacketConfig {
  u32 warps;  // of a block
  bool cast;
};
struct EpPacketParams {
  EpSmallParams small;  // masking.late is not for packets
  EpPacketAreas areas;
  EpMessage message;
  u32 receive_blocks;  // 0: this launch only sends; after them one that counts
};

// Combines in packets have no use for the words of those by flags in the same slot, but leave them
// behind: announcements carry 16 bits of the epoch, and reads are compared by their distance. So a
// rank writes them too in the first two of so many combines, one of each parity.
inline constexpr u32 kEpPacketsFollowEvery = 1u << 14;
static_assert(2 * kEpPacketsFollowEvery < 1u << 16);

struct EpPacketCombineConfig {
  u32 warps;
};
struct EpPacketCombineParams {
  LaunchCommon common;
  SymmetricView view;
  EpPacketAreas areas;
  EpTokens tokens;
  u32 stride;
  u32 top_k;
  const EpRoute* routes;
  const u32* source_ends;
  const u8* rows;        // of the experts, [place] of row_words
  const float* weights;  // [place][top_k]
  u32 row_words;
  EpCombineOutput output;
  u32 send_blocks;
  u32 add_blocks;
  EpState* state;
  EpMasking masking;
  u64* rank_wait_ns;  // as EpCombineParams
  // Of combines by flags in this slot, in every rank's window.
  u64 input_words;  // EpSmallAreas::inputs
  u64 read_words;   // EpSmallAreas::reads
};

}  // namespace crossdock::device
