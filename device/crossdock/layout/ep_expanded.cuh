// Parameters and shared memory of ep_dispatch_expanded. Plain data and constexpr functions, shared
// by host, kernel and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_dispatch.cuh>
#include <crossdock/layout/ep_grouping.cuh>

namespace crossdock::device {

// Experts of a rank, at most: their places are known to every block that copies.
inline constexpr u32 kEpMostExpanded = kEpListRange;

struct EpExpandedDispatchParams {
  EpDispatchParams dispatch;
  EpGrouping grouping;  // written, as ep_group_rows would
  EpExpanded to;
  u64* pieces;     // [blocks that copy][most experts] epoch words, zero before the first launch
  u32 parts;       // of a row
  u32 part_bytes;  // a multiple of 16; the last may be shorter
};

// Shared memory of a block that copies.
struct EpCopyShared {
  u32 barriers;  // [warps][stages] mbarriers, after as many stages
  u32 lists;     // ep_list_shared_bytes
  u32 ends;      // [world] words
  u32 epoch;     // one word
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
  s.bytes = round_up(s.epoch + 4, 128u);
  return s;
}

}  // namespace crossdock::device
