// What every launch carries and what a failed wait leaves behind. A wait in a kernel never traps:
// at its deadline one thread writes a `FaultRecord` to pinned host memory, the abort flag goes up,
// every role leaves, the kernel ends, and the host turns the record into an error. The flag stays
// up, so later launches on the same control block leave at once, until the host resets the group.
// Plain data, shared by host, kernels and twin.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device {

// Which kernel. Append only: the numbers appear in logs.
enum class KernelId : u32 {
  kNone = 0,
  kGridSyncBench = 1,
  kBarrier = 2,
  kAllGatherCounts = 3,
  kRingAllToAll = 4,
  kFlagPingPong = 5,
  kPushRows = 6,
  kPullRows = 7,
  kEpDispatch = 8,
  kEpCombine = 9,
  kEpGroupRows = 10,
  kEpReduceRows = 11,
  kEpCopyRows = 12,
  kEpExpandRows = 13,
  kGroupedGemm = 14,
  kEpSmallDispatch = 15,
  kFetchRows = 16,
  kAddParts = 17,
  kEpMask = 18,
  kEpPacketDispatch = 19,
  kEpPacketCombine = 20,
  kMoeCastRows = 21,
  kPrepareWeights = 22,
  kFirstFree = 23,
};
CROSSDOCK_HOST_DEVICE constexpr const char* kernel_name(KernelId id) {
  switch (id) {
    case KernelId::kGridSyncBench:
      return "grid_sync_bench";
    case KernelId::kBarrier:
      return "barrier";
    case KernelId::kAllGatherCounts:
      return "all_gather_counts";
    case KernelId::kRingAllToAll:
      return "ring_all_to_all";
    case KernelId::kFlagPingPong:
      return "flag_ping_pong";
    case KernelId::kPushRows:
      return "push_rows";
    case KernelId::kPullRows:
      return "pull_rows";
    case KernelId::kEpDispatch:
      return "ep_dispatch";
    case KernelId::kEpCombine:
      return "ep_combine";
    case KernelId::kEpGroupRows:
      return "ep_group_rows";
    case KernelId::kEpReduceRows:
      return "ep_reduce_rows";
    case KernelId::kEpCopyRows:
      return "ep_copy_rows";
    case KernelId::kEpExpandRows:
      return "ep_expand_rows";
    case KernelId::kGroupedGemm:
      return "grouped_gemm";
    case KernelId::kPrepareWeights:
      return "prepare_weights";
    case KernelId::kEpSmallDispatch:
      return "ep_small_dispatch";
    case KernelId::kFetchRows:
      return "fetch_rows";
    case KernelId::kAddParts:
      return "add_parts";
    case KernelId::kEpMask:
      return "ep_mask";
    case KernelId::kEpPacketDispatch:
      return "ep_packet_dispatch";
    case KernelId::kEpPacketCombine:
      return "ep_packet_combine";
    case KernelId::kMoeCastRows:
      return "moe_cast_rows";
    default:
      return "unknown kernel";
  }
}

// What was waited for. Append only.
enum class Phase : u32 {
  kNone = 0,
  kGridSync = 1,     // blocks of this rank; peer is kNoPeer
  kPeerBarrier = 2,  // expected and seen are the barrier's number
  kEpochWord = 3,    // expected and seen are epochs
  kArrival = 4,      // expected and seen are totals of rows
  kCredit = 5,       // as kArrival, of freed slots
  kFlag = 6,
  kStage = 7,        // an mbarrier: a copy or another role of this block
  kRouting = 8,      // not a wait: expert id `seen` of token `expected` is out of range
  kPeerRouting = 9,  // not a wait: rank `seen` has given up because of `peer`
  kSlotFree = 10,    // as kArrival: peers that have read what a slot held before
  kReuse = 11,       // not a wait: `peer` reuses another routing than this rank, or none
  kRoom = 12,        // not a wait: `seen` places are needed, there is room for `expected`
  kShape = 13,       // not a wait: `peer` has rows of `seen` bytes, this rank of `expected`
  kRowFlag = 14,     // expected and seen are epochs; what the row waits for may be another peer
  // Not a wait: the rows of an expert end at `seen`, beyond the buffer; `expected` has the expert
  // in its upper and the buffer's end in its lower half.
  kExpertRows = 15,
  kListedRow = 16,  // not a wait: place `expected` of a list names row `seen`, which does not exist
  kSourceFlag = 17,  // expected and seen are epochs; the source may first wait for another peer
};
CROSSDOCK_HOST_DEVICE constexpr const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kGridSync:
      return "grid sync";
    case Phase::kPeerBarrier:
      return "peer barrier";
    case Phase::kEpochWord:
      return "epoch word";
    case Phase::kArrival:
      return "arrival";
    case Phase::kCredit:
      return "credit";
    case Phase::kFlag:
      return "flag";
    case Phase::kStage:
      return "stage";
    case Phase::kRouting:
      return "expert id";
    case Phase::kPeerRouting:
      return "routing of a peer";
    case Phase::kSlotFree:
      return "slot in use";
    case Phase::kReuse:
      return "reuse of a routing";
    case Phase::kRoom:
      return "room for copies";
    case Phase::kShape:
      return "shape of rows";
    case Phase::kRowFlag:
      return "row of a peer";
    case Phase::kExpertRows:
      return "rows of an expert";
    case Phase::kListedRow:
      return "row of a list";
    case Phase::kSourceFlag:
      return "rows of a source";
    default:
      return "unknown phase";
  }
}

inline constexpr u32 kNoPeer = 0xffffffffu;

// The raised abort flag tells whose fault it is, so that it can be passed on.
CROSSDOCK_HOST_DEVICE constexpr u32 abort_word(u32 peer) {
  return peer == kNoPeer ? 1 : peer + 2;
}
CROSSDOCK_HOST_DEVICE constexpr u32 abort_peer(u32 word) {
  return word < 2 ? kNoPeer : word - 2;
}

// In pinned host memory, written once. `state` is stored last, with release at system scope; the
// host reads it with acquire and then the rest.
struct alignas(64) FaultRecord {
  static constexpr u32 kEmpty = 0;
  static constexpr u32 kWritten = 1;

  u32 state;
  KernelId kernel;
  Phase phase;
  u32 rank;
  u32 peer;
  u32 block;
  u64 expected;
  u64 seen;
  u64 waited_ns;
};

// One word to a 128-byte line: hot words of different waits must not slow each other down.
struct alignas(128) PaddedWord {
  u32 value;
};

inline constexpr u32 kGridSyncCounters = 4;

// This rank's own control block, in its device memory (not symmetric), zero before the first launch
// and after a reset; kernels that share it run one after the other.
struct ControlBlock {
  PaddedWord abort;                         // not zero: a wait has failed, leave; abort_word()
  PaddedWord grid_sync[kGridSyncCounters];  // comm/grid_sync.cuh
  PaddedWord barrier_turn;                  // peer barriers passed; comm/peer_barrier.cuh
};

// The part of the parameters that all kernels have.
struct LaunchCommon {
  u64 deadline_ns;        // the longest any single wait may take
  FaultRecord* fault;     // pinned host memory, visible to the device
  ControlBlock* control;  // device memory of this rank
  KernelId kernel;
  u32 rank;
};

}  // namespace crossdock::device
