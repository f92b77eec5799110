// Parameters and shared memory of ep_dispatch_expanded. Plain data and constexpr functions, shared
// by host, kernel and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_dispatch.cuh>
#include <crossdock/layout/ep_grouping.cuh>

namespace crossdock::device {

// Experts of a rank, at most: their places are known to every block that copies.
inline constexpr u32 kEpMostExpanded = kEpListRange;

// What one block tells those that copy: the sources that count, a bit each, as an epoch word.
enum class EpCopyWord : u32 {
  kAgreed,   // by the first of them, with late masks: whose selections have come
  kDecided,  // by block 0 of the dispatch: whose rows have
};
// Words in device memory, zero before the first launch: [EpCopyWord]; and twice, since with late
// masks lists may have to be made again: of each block that its lists are written, and choices in
// its piece [most experts].
struct EpCopyWords {
  u32 blocks;
  u32 most_experts;

  CROSSDOCK_HOST_DEVICE static constexpr u64 of(EpCopyWord word) { return static_cast<u32>(word); }
  CROSSDOCK_HOST_DEVICE constexpr u64 listed(u32 turn, u32 block) const {
    return 2 + u64{turn} * blocks + block;
  }
  CROSSDOCK_HOST_DEVICE constexpr u64 piece(u32 turn, u32 block) const {
    return listed(2, 0) + (u64{turn} * blocks + block) * most_experts;
  }
  CROSSDOCK_HOST_DEVICE constexpr u64 count() const { return piece(2, 0); }
};

struct EpExpandedDispatchParams {
  EpDispatchParams dispatch;
  EpGrouping grouping;  // written, as ep_group_rows would
  EpExpanded to;
  // With a routing that is used again: what the earlier dispatch has delivered. Else null.
  const i32* earlier_ids;
  const float* earlier_weights;
  const u32* earlier_tokens;
  u64* words;      // EpCopyWords
  u32 parts;       // of a row
  u32 part_bytes;  // ep_part_bytes; the last may be shorter
};

// Shared memory of a block that copies.
struct EpCopyShared {
  u32 barriers;  // [warps][stages] mbarriers, after as many stages
  u32 lists;     // ep_list_shared_bytes
  u32 ends;      // [world] words
  u32 epoch;     // one word
  u32 heard;     // one word
  u32 bytes;
};
CROSSDOCK_HOST_DEVICE constexpr EpCopyShared ep_copy_shared(EpDispatchConfig c, u32 world,
                                                            u32 experts) {
  EpCopyShared s{};
  const u32 stages = c.warps() * c.copy_stages;
  s.barriers = stages * c.copy_stage_bytes;
  s.lists = s.barriers + stages * 8;
  s.ends = s.lists + ep_list_shared_bytes(c.warps(), experts);
  s.epoch = s.ends + world * 4;
  s.heard = s.epoch + 4;
  s.bytes = round_up(s.heard + 4, 128u);
  return s;
}

}  // namespace crossdock::device
