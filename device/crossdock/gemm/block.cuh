// What the roles of grouped_gemm share: the block's shared memory and the ring of stages.
//
//   load warps                                        math warps
//     wait empty[s]
//     record of a tile, with its first stage
//     loads of input, its scales, weights -> full[s]    wait full[s]
//                                                       wgmma ... wait for it
//     wait empty[s]                         empty[s] <- one lane of each warp
//
// Outputs that are handed over (hand_over.cuh) take the place of the tile's last stage. It sits
// out a turn of the ring; before the loader uses it again it waits until they have been read, too.
//
// A record is read after the tile's last stage has been multiplied, when the loader may be
// `stages` tiles further: kGemmRecords are enough for that.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ptx/tensor.cuh>
#include <crossdock/sched/expert_tiles.cuh>

namespace crossdock::device {

// Where a role is in the ring: stage, and the parity of its turn.
template <u32 kStages, bool kSkips = false>
struct StageCursor {
  u32 stage = 0;
  u32 parity = 0;
  CROSSDOCK_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // The stage before.
  CROSSDOCK_DEVICE StageCursor last() const {
    return stage == 0 ? StageCursor{kStages - 1, parity ^ 1} : StageCursor{stage - 1, parity};
  }
};

// The same where a stage may sit out a turn, so that each has a parity of its own.
template <u32 kStages>
struct StageCursor<kStages, true> {
  u32 stage = 0;
  u32 parity = 0;
  u32 parities = 0;  // a bit of each stage
  CROSSDOCK_DEVICE void advance() {
    parities ^= 1u << stage;
    skip();
  }
  CROSSDOCK_DEVICE void skip() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity = parities >> stage & 1;
  }
  // The stage before, as it was.
  CROSSDOCK_DEVICE StageCursor last() const {
    const u32 before = stage == 0 ? kStages - 1 : stage - 1;
    return {before, (parities >> before & 1) ^ 1, parities};
  }
};

// A gathered row of the tile.
struct GemmSource {
  const u8* row;
  const float* scales;
};

template <GroupedGemmConfig kConfig>
struct GemmBlock {
  static constexpr GemmShared kShared = grouped_gemm_shared(kConfig);
  static constexpr u32 kWeightBytes = kShared.weight_bytes;
  static constexpr bool kUnpacksApart = gemm_unpacks_apart(kConfig);
  static constexpr u32 kGatherWarps = kUnpacksApart ? 2 : 3;
  static constexpr bool kHandsOver = kConfig.hand_over;
  static constexpr bool kLends = gemm_lends(kConfig);
  // Of a tile: the stage that would come where that of the tile before, lent to its outputs, sits
  // out its turn, and the one that is loaded there.
  static constexpr u32 kLent = kConfig.stages - 1;
  static constexpr u32 kReturned = 2 * kLent;
  static_assert(!kHandsOver || (kConfig.fp8 && !kConfig.fp4 && kConfig.tile_rows == 128));
  static_assert(kConfig.stages + 3 <= kGemmRecords);
  using Cursor = StageCursor<kConfig.stages, kLends>;
  using PackedCursor = StageCursor<kGemmPackedStages>;
  using Walk = TileWalk<kConfig.tile_rows>;

  const GroupedGemmParams& p;
  ExpertTable experts;

  CROSSDOCK_DEVICE explicit GemmBlock(const GroupedGemmParams& params)
      : p(params),
        experts(ExpertTable::at(dynamic_shared() + kShared.table, params.shape.experts)) {}

  CROSSDOCK_DEVICE static u8* input(u32 stage) {
    return dynamic_shared() + kShared.input + stage * kShared.input_bytes;
  }
  CROSSDOCK_DEVICE static u8* weights(u32 stage) {
    return dynamic_shared() + kShared.weights + stage * kWeightBytes;
  }
  CROSSDOCK_DEVICE static float* input_scales(u32 stage) {
    return reinterpret_cast<float*>(dynamic_shared() + kShared.input_scales +
                                    stage * kShared.input_scale_bytes);
  }
  CROSSDOCK_DEVICE static ptx::MBarrier* full(u32 stage) {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.full) + stage;
  }
  CROSSDOCK_DEVICE static ptx::MBarrier* empty(u32 stage) {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.empty) + stage;
  }
  CROSSDOCK_DEVICE static ptx::MBarrier* unpacked(u32 stage) {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.unpacked) + stage;
  }
  CROSSDOCK_DEVICE static U32x4* record(u32 tile) {
    return reinterpret_cast<U32x4*>(dynamic_shared() + kShared.records) + tile % kGemmRecords;
  }
  // 2 KiB of each math warp, for what leaves the block.
  CROSSDOCK_DEVICE static u8* staging(u32 warp) {
    return dynamic_shared() + kShared.staging + warp * 2048;
  }
  // Weights as they are in memory, where others than the math warps unpack them, which then arrive
  // at unpacked[s].
  CROSSDOCK_DEVICE static u8* packed(u32 stage) {
    return dynamic_shared() + kShared.packed + stage * kShared.packed_bytes;
  }
  CROSSDOCK_DEVICE static ptx::MBarrier* packed_full(u32 stage) {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.packed_full) + stage;
  }
  CROSSDOCK_DEVICE static ptx::MBarrier* packed_empty(u32 stage) {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.packed_empty) + stage;
  }
  // Of outputs that are handed over: the first or the other pieces of a warpgroup are there; those
  // in the tile's last stage have been read; all have been read.
  CROSSDOCK_DEVICE static ptx::MBarrier* handed(u32 group, u32 which) {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.handed) + group * 2 + which;
  }
  CROSSDOCK_DEVICE static ptx::MBarrier* returned() {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.returned);
  }
  CROSSDOCK_DEVICE static ptx::MBarrier* stored() {
    return reinterpret_cast<ptx::MBarrier*>(dynamic_shared() + kShared.stored);
  }
  // Of the warps that gather: the input's rows for those of the tile.
  CROSSDOCK_DEVICE static GemmSource* sources() {
    return reinterpret_cast<GemmSource*>(dynamic_shared() + kShared.sources);
  }
  // Of the math warps together: peaks of the rows, see GemmShared.
  CROSSDOCK_DEVICE static float* exchange() {
    return reinterpret_cast<float*>(dynamic_shared() + kShared.exchange);
  }
  // fp4: the e4m3 codes of the eight magnitudes, at each shift.
  CROSSDOCK_DEVICE static u8* fp4_table() { return dynamic_shared() + kShared.fp4_table; }
  CROSSDOCK_DEVICE static u64* begin() {
    return reinterpret_cast<u64*>(dynamic_shared() + kShared.begin);
  }
  CROSSDOCK_DEVICE void tell_cycles() const {
    if (p.cycles != nullptr) ptx::st_weak(p.cycles + block_index(), ptx::cycle_clock() - *begin());
  }
  CROSSDOCK_DEVICE bool gathers() const { return p.rows.list != nullptr; }
  CROSSDOCK_DEVICE bool hands_over() const { return kHandsOver && p.hands_over; }
  // Of one turn of full[s]: arrivals of the loader and of the warps that gather; and bytes of bulk
  // loads.
  CROSSDOCK_DEVICE u32 full_arrivals() const { return 1 + (gathers() ? kGatherWarps : 0); }
  CROSSDOCK_DEVICE u32 full_bytes() const {
    const u32 input = kShared.input_bytes + (kConfig.fp8 ? kConfig.tile_rows * 4 : 0);
    return (kUnpacksApart ? 0 : kWeightBytes) + (gathers() ? 0 : input);
  }
  CROSSDOCK_DEVICE u32 column_tiles() const { return ceil_div(p.shape.columns, kGemmColumns); }

  // By all threads. False when a count is wrong.
  CROSSDOCK_DEVICE bool prepare() const {
    if (thread_index() == 0) {
      *begin() = ptx::cycle_clock();
      if (!gathers()) ptx::prefetch_tensor_map(&p.input_map);
      if (!kConfig.fp4) ptx::prefetch_tensor_map(&p.weight_map);
      for (u32 s = 0; s < kConfig.stages; ++s) {
        ptx::mbarrier_init(full(s), full_arrivals());
        ptx::mbarrier_init(empty(s), kGemmMathWarps);
        if (kUnpacksApart) ptx::mbarrier_init(unpacked(s), kGemmUnpackWarps);
      }
      for (u32 i = 0; kHandsOver && i < 4; ++i)
        ptx::mbarrier_init(handed(0, i), kGemmMathWarps / 2);
      if (kHandsOver) {
        ptx::mbarrier_init(returned(), 1);
        ptx::mbarrier_init(stored(), 1);
        if (hands_over()) ptx::prefetch_tensor_map(&p.output_map);
      }
      for (u32 s = 0; kUnpacksApart && s < kGemmPackedStages; ++s) {
        ptx::mbarrier_init(packed_full(s), 1);
        ptx::mbarrier_init(packed_empty(s), kGemmUnpackWarps);
      }
      ptx::fence_mbarrier_init();
    }
    // After a fault a math warp may read a record that was never written: it has no rows.
    if (thread_index() < kGemmRecords) ptx::st_shared(record(thread_index()), U32x4{0, 0, 0, 0});
    if (kConfig.fp4 && thread_index() < kFp4Shifts)
      reinterpret_cast<u64*>(fp4_table())[thread_index()] =
          fp4_codes(kFp4SmallestShift + static_cast<i32>(thread_index()));
    const u32 begins_at = kConfig.fp8 && !gathers() ? kGemmScaledBegin : 1;
    return experts.build(p.common, p.rows, kConfig.tile_rows, column_tiles(), begins_at);
  }
  // Waits for the stage to be free. A wait that fails has raised a fault: the role leaves. It does
  // not fail where math warps only wait for loads (`wait_full`): past its deadline it has raised a
  // fault, and goes on, since those warps wait for what it would load.
  CROSSDOCK_DEVICE bool wait_empty(const Cursor& at CROSSDOCK_SITE) const {
    if constexpr (kUnpacksApart) {
      return wait_long(empty(at.stage), at.parity ^ 1 CROSSDOCK_PASS_SITE);
    } else {
      wait_on(empty(at.stage), at.parity ^ 1 CROSSDOCK_PASS_SITE);
      return true;
    }
  }
  CROSSDOCK_DEVICE bool wait_packed_empty(const PackedCursor& at CROSSDOCK_SITE) const {
    return wait_long(packed_empty(at.stage), at.parity ^ 1 CROSSDOCK_PASS_SITE);
  }
  // By warps without registers for a clock: the loader, which waits for them in turn, keeps the
  // deadline. What is loaded comes, whatever has failed elsewhere, so they look at nothing else:
  // the code for it would lie in the middle of the main loop. What others unpack may not come;
  // after a fault the block then runs on to its end on what is in the stages.
  CROSSDOCK_DEVICE void wait_full(const Cursor& at CROSSDOCK_SITE) const {
    if constexpr (kUnpacksApart) {
      wait_short(unpacked(at.stage), at.parity CROSSDOCK_PASS_SITE);
    } else {
      wait_without_clock(full(at.stage), at.parity CROSSDOCK_PASS_SITE);
    }
  }
  CROSSDOCK_DEVICE static void wait_without_clock(ptx::MBarrier* barrier,
                                                  u32 parity CROSSDOCK_SITE) {
    while (!ptx::mbarrier_try_wait(barrier, parity CROSSDOCK_PASS_SITE))
      ptx::spin("stage" CROSSDOCK_PASS_SITE);
  }
  // Of outputs, those of the block's tile number `tile`. All of these waits end when math warps go
  // on, so the loader's deadline is theirs too.
  CROSSDOCK_DEVICE void wait_returned(u32 tile CROSSDOCK_SITE) const {
    wait_on(returned(), tile % 2 CROSSDOCK_PASS_SITE);
  }
  CROSSDOCK_DEVICE static void wait_finished(const Cursor& last CROSSDOCK_SITE) {
    wait_without_clock(empty(last.stage), last.parity CROSSDOCK_PASS_SITE);
  }
  CROSSDOCK_DEVICE static void wait_stored_before(u32 tile CROSSDOCK_SITE) {
    wait_without_clock(stored(), tile % 2 ^ 1 CROSSDOCK_PASS_SITE);
  }
  // Asleep most of the time, like the loader.
  CROSSDOCK_DEVICE static void wait_handed(u32 group, u32 which, u32 tile CROSSDOCK_SITE) {
    while (
        !ptx::mbarrier_try_wait_for(handed(group, which), tile % 2, kSleepNs CROSSDOCK_PASS_SITE))
      ptx::spin("outputs" CROSSDOCK_PASS_SITE);
  }
  CROSSDOCK_DEVICE void wait_input(const Cursor& at CROSSDOCK_SITE) const {
    wait_short(full(at.stage), at.parity CROSSDOCK_PASS_SITE);
  }
  CROSSDOCK_DEVICE void wait_packed(const PackedCursor& at CROSSDOCK_SITE) const {
    wait_short(packed_full(at.stage), at.parity CROSSDOCK_PASS_SITE);
  }
  CROSSDOCK_DEVICE void wait_multiplied(const Cursor& at CROSSDOCK_SITE) const {
    wait_short(empty(at.stage), at.parity ^ 1 CROSSDOCK_PASS_SITE);
  }

 private:
  static constexpr u32 kSleepNs = 20000;
  // It is soon over in every stage but the last ones, so the clock is not asked at first.
  CROSSDOCK_DEVICE bool wait_long(ptx::MBarrier* barrier, u32 parity CROSSDOCK_SITE) const {
    constexpr u32 kTurns = CROSSDOCK_ON_GPU ? 32 : 1;
    for (u32 turn = 0; turn < kTurns; ++turn)
      if (ptx::mbarrier_try_wait(barrier, parity CROSSDOCK_PASS_SITE)) return true;
    return wait_stage(p.common, barrier, parity CROSSDOCK_PASS_SITE);
  }
  // Asleep most of the time: the loader shares a scheduler with math warps.
  CROSSDOCK_DEVICE void wait_on(ptx::MBarrier* barrier, u32 parity CROSSDOCK_SITE) const {
    constexpr u32 kTurns = CROSSDOCK_ON_GPU ? 32 : 1;
    CROSSDOCK_NO_UNROLL
    for (u32 turn = 0; turn < kTurns; ++turn)
      if (ptx::mbarrier_try_wait_for(barrier, parity, kSleepNs CROSSDOCK_PASS_SITE)) return;
    while (!wait_stage(p.common, barrier, parity CROSSDOCK_PASS_SITE))
      ptx::spin("stage" CROSSDOCK_PASS_SITE);
  }
  CROSSDOCK_DEVICE void wait_short(ptx::MBarrier* barrier, u32 parity CROSSDOCK_SITE) const {
    for (u32 turn = 1; !ptx::mbarrier_try_wait(barrier, parity CROSSDOCK_PASS_SITE); ++turn) {
      ptx::spin("stage" CROSSDOCK_PASS_SITE);
      if (turn % kTurnsPerCheck == 0 && aborted(p.common CROSSDOCK_PASS_SITE))
        return ptx::unordered_from_here(CROSSDOCK_PASS_SITE_ONLY);
    }
  }
};

}  // namespace crossdock::device
