// Moves rows from global memory through shared memory to global memory with bulk copies, several in
// flight. One thread (a lane of a warp) owns a pipe; source or destination may be a peer's memory.
// Row i uses stage i % kStages:
//
//   load(i)   stage free: the store of row i - kStages has read it   (bulk_wait_read)
//             expect bytes, bulk load                                -> full[stage]
//   store(i)  wait full[stage], bulk store, commit a group of its own
//   finish()  all stores are written (bulk_wait): only now may a flag announce the rows
//
// At most kAhead loads are outstanding beyond the stores. A pipe that waits for anything else first
// stores everything it has loaded, and one whose wait for a stage fails lets its loads come: so no
// copy is left behind that could write into the shared memory of the next block.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/wait.cuh>
#include <crossdock/ptx/bulk.cuh>

namespace crossdock::device {

// Shared memory of one pipe: kStages rows and as many mbarriers.
CROSSDOCK_HOST_DEVICE constexpr u32 row_pipe_rows_bytes(u32 stages, u32 row_bytes) {
  return stages * round_up(row_bytes, 128u);
}

template <u32 kStages>
class RowPipe {
 public:
  static_assert(kStages >= 2);
  // Loads ahead of stores: half of the stages load while the other half store.
  static constexpr u32 kAhead = kStages / 2;

  // `rows` is 128-byte aligned; `full` are the pipe's own mbarriers.
  CROSSDOCK_DEVICE RowPipe(const LaunchCommon& c, u8* rows, ptx::MBarrier* full, u32 row_bytes)
      : common_(c), rows_(rows), full_(full), row_bytes_(row_bytes) {}

  // Before first use, by the owner; then a fence and, if other threads look, a barrier.
  CROSSDOCK_DEVICE void init(CROSSDOCK_SITE_ONLY) {
    for (u32 i = 0; i < kStages; ++i)
      ptx::mbarrier_init(full_ + i, 1 CROSSDOCK_PASS_SITE);
    ptx::fence_mbarrier_init(CROSSDOCK_PASS_SITE_ONLY);
  }

  // Moves `n` rows; `source(i)` and `destination(i)` give the places of row i. Returns when all
  // rows have been read out of their sources; false when the rank aborts.
  template <class Source, class Destination>
  CROSSDOCK_DEVICE bool move(u32 n, const Source& source,
                             const Destination& destination CROSSDOCK_SITE) {
    for (u32 i = 0; i < n + kAhead; ++i) {
      if (i < n) load(source(i) CROSSDOCK_PASS_SITE);
      if (i >= kAhead && !store(destination(i - kAhead) CROSSDOCK_PASS_SITE)) {
        settle(CROSSDOCK_PASS_SITE_ONLY);
        return false;
      }
    }
    return true;
  }

  // Everything stored so far is written and may be announced.
  CROSSDOCK_DEVICE void finish(CROSSDOCK_SITE_ONLY) { ptx::bulk_wait<0>(CROSSDOCK_PASS_SITE_ONLY); }

 private:
  CROSSDOCK_DEVICE void load(const u8* source CROSSDOCK_SITE) {
    // Stores committed after the one that used this stage: at least kStages - 1 - kAhead.
    ptx::bulk_wait_read<kStages - 1 - kAhead>(CROSSDOCK_PASS_SITE_ONLY);
    const u32 stage = loaded_++ % kStages;
    ptx::mbarrier_arrive_expect_tx(full_ + stage, row_bytes_ CROSSDOCK_PASS_SITE);
    ptx::bulk_load(row(stage), source, row_bytes_, full_ + stage CROSSDOCK_PASS_SITE);
  }
  CROSSDOCK_DEVICE bool store(u8* destination CROSSDOCK_SITE) {
    const u32 stage = stored_ % kStages;
    const u32 parity = stored_ / kStages & 1u;
    if (!wait_stage(common_, full_ + stage, parity CROSSDOCK_PASS_SITE)) return false;
    ++stored_;
    ptx::bulk_store(destination, row(stage), row_bytes_ CROSSDOCK_PASS_SITE);
    ptx::bulk_commit(CROSSDOCK_PASS_SITE_ONLY);
    return true;
  }
  // After a failed wait: until what has been asked for is here, and nothing comes afterwards.
  CROSSDOCK_DEVICE void settle(CROSSDOCK_SITE_ONLY) {
    for (; stored_ < loaded_; ++stored_)
      settle_stage(common_, full_ + stored_ % kStages, stored_ / kStages & 1u CROSSDOCK_PASS_SITE);
  }
  CROSSDOCK_DEVICE u8* row(u32 stage) { return rows_ + stage * round_up(row_bytes_, 128u); }

  const LaunchCommon& common_;
  u8* rows_;
  ptx::MBarrier* full_;
  u32 row_bytes_;
  u32 loaded_ = 0;
  u32 stored_ = 0;
};

}  // namespace crossdock::device
