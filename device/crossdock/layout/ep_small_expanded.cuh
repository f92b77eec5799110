// Parameters and shared memory of ep_small_expanded. Plain data and constexpr functions, shared by
// host, kernel and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/layout/ep_grouping.cuh>
#include <crossdock/layout/ep_small.cuh>

namespace crossdock::device {

// Of a warp that copies.
inline constexpr u32 kEpSmallCopyStages = 3;
inline constexpr u32 kEpSmallCopyStageBytes = 7168;

struct EpSmallExpandedParams {
  EpSmallParams small;  // masking.late is not for copies
  EpGrouping grouping;  // written, as ep_group_rows would
  EpExpanded to;
  u32 copy_blocks;  // the last of the grid: as many for each source; 0: nothing is copied
  u32 parts;        // of a row
  u32 part_bytes;   // a multiple of 16; the last may be shorter
};

// Shared memory of a block that copies. `headers` and `epoch` as in EpSmallShared.
struct EpSmallCopyShared {
  u32 barriers;  // [warps][stages] mbarriers, after as many stages
  u32 lists;     // ep_list_shared_bytes
  u32 known;     // [2][experts] words: choices of earlier sources, and of all
  u32 headers;
  u32 epoch;
  u32 bytes;
};
CROSSDOCK_HOST_DEVICE constexpr EpSmallCopyShared ep_small_copy_shared(EpSmallConfig c, u32 world,
                                                                       u32 experts) {
  EpSmallCopyShared s{};
  const u32 stages = c.warps * kEpSmallCopyStages;
  s.barriers = stages * kEpSmallCopyStageBytes;
  s.lists = s.barriers + stages * 8;
  s.known = s.lists + ep_list_shared_bytes(c.warps, experts);
  s.headers = s.known + 2 * experts * 4;
  s.epoch = s.headers + world * 4;
  s.bytes = round_up(s.epoch + 4, 128u);
  return s;
}

}  // namespace crossdock::device
