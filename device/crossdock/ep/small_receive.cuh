// The block of ep_small_dispatch that receives: until the rows of every source are here.
//
//   a warp a source
//     header (epoch word): rows, blocks; their shape is what this rank expects
//     a lane a block: flags[source][block] = epoch (acquire)
//   barrier
//     ends of the sources, selections of each expert; the host is told
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/small_block.cuh>

namespace crossdock::device {

template <class Block>
struct EpSmallReceiver {
  static constexpr EpSmallConfig kConfig = Block::kVariant;
  const Block& b;
  u32 lane;

  CROSSDOCK_DEVICE explicit EpSmallReceiver(const Block& block) : b(block), lane(lane_index()) {}

  // By all warps; each returns its own outcome, its lanes agree.
  CROSSDOCK_DEVICE bool wait(u32 warp) const {
    bool ok = true;
    for (u32 source = warp; source < b.world() && ok; source += kConfig.all_warps())
      ok = wait_source(source);
    return ok;
  }
  // By all threads, after a barrier.
  CROSSDOCK_DEVICE void finish() const {
    const u32* rows = b.template at<u32>(b.shared.ends);
    if (thread_index() < b.world())
      ptx::st_weak(b.p.result.source_ends + thread_index(),
                   thread_index() * b.p.stride + rows[thread_index()]);
    if (thread_index() == 0 && b.p.result.host_rows != nullptr) {
      u32 all = 0;
      for (u32 source = 0; source < b.world(); ++source)
        all += rows[source];
      put_epoch_word(b.p.result.host_rows, b.p.result.host_ticket, all);
    }
    for (u32 i = thread_index(); i < b.p.experts.count(b.rank()); i += kConfig.threads())
      take_expert(i);
  }

 private:
  CROSSDOCK_DEVICE bool refuse(u32 source, EpHeader header) const {
    if (header.given_up()) {
      const u32 culprit = header.culprit();
      raise_fault(b.p.common, {Phase::kPeerRouting, culprit == kNoPeer ? source : culprit, b.epoch},
                  source, 0);
    } else {
      raise_fault(b.p.common, {Phase::kShape, source, b.p.output.row_bytes}, header.row_bytes(), 0);
    }
    return false;
  }
  CROSSDOCK_DEVICE bool wait_source(u32 source) const {
    const u64 start = ptx::global_timer();
    EpHeader header{};
    bool came = true;
    if (lane == 0) {
      came = wait_epoch_word(b.p.common, b.header(source), b.epoch, source, header.value);
      if (came && (header.given_up() || header.shape() != EpHeader::shape_of(b.p.output)))
        came = refuse(source, header);
    }
    header.value = ptx::shuffle(kFullMask, header.value, 0);
    if (ptx::any(kFullMask, !came)) return false;
    if (lane < header.blocks()) came = wait_block(source);
    if (ptx::any(kFullMask, !came)) return false;
    if (lane == 0) b.template at<u32>(b.shared.ends)[source] = header.rows();
    u64* waited = b.p.statistics.source_wait_ns;
    if (lane == 0 && waited != nullptr)
      ptx::red_add_relaxed_gpu(waited + source, ptx::global_timer() - start);
    return true;
  }
  // The rows of the lane's block of `source` are here, or the source has given up meanwhile.
  CROSSDOCK_DEVICE bool wait_block(u32 source) const {
    const u32* flag = b.flags(source) + lane;
    EpHeader header{};
    const bool done = wait_until(
        b.p.common, {Phase::kSourceFlag, source, b.epoch},
        [&] {
          header.value = word_value(ptx::ld_relaxed_sys(b.header(source)));
          return u64{ptx::ld_acquire_sys(flag)};
        },
        [&](u64 seen) { return static_cast<u32>(seen) == b.epoch || header.given_up(); });
    if (done && header.given_up()) return refuse(source, header);
    return done;
  }
  CROSSDOCK_DEVICE void take_expert(u32 i) const {
    u32 selections = 0;
    for (u32 source = 0; source < b.world(); ++source)
      selections += ptx::ld_weak(b.counts(source) + i);
    ptx::st_weak(b.p.result.expert_counts + i, selections);
    u64* kept = b.p.statistics.expert_selections;
    if (kept != nullptr && selections != 0) ptx::red_add_relaxed_gpu(kept + i, u64{selections});
    if (b.p.result.host_experts != nullptr)
      put_epoch_word(b.p.result.host_experts + i, b.p.result.host_ticket, selections);
  }
};

}  // namespace crossdock::device
