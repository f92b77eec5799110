// The block of ep_small_dispatch that receives: until the rows of every source are here.
//
//   a warp a source: header (epoch word): rows, blocks; their shape is what this rank expects
//   barrier
//   a thread an expert: its selections by every source (epoch words)
//   a warp a source, a lane a block: flags[source][block] = epoch (acquire)
//   barrier
//   ends of the sources, selections of the experts; the host is told
//
// Selections are added up while rows are on their way: the end of a launch is what it costs. After
// a header its source may still be waiting for a third rank, so all else has half a deadline more.
// A source that is masked, or does not come and is masked now, has no rows here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/small_block.cuh>

namespace crossdock::device {

template <class Block>
struct EpSmallReceiver {
  static constexpr EpSmallConfig kConfig = Block::kVariant;
  const Block& b;
  u32 lane;
  u64 start = 0;
  bool late = false;  // this thread has masked a source

  CROSSDOCK_DEVICE explicit EpSmallReceiver(const Block& block) : b(block), lane(lane_index()) {}

  // By all warps; each returns its own outcome, its lanes agree.
  CROSSDOCK_DEVICE bool wait_headers(u32 warp) {
    start = ptx::global_timer();
    for (u32 source = warp; source < b.world(); source += kConfig.warps) {
      EpHeader header{};
      Came came = Came::kMasked;
      if (b.talks_to(source)) came = wait_header(source, header);
      if (came == Came::kAbort) return false;
      if (lane == 0) put_header(source, came == Came::kYes ? header.value : kNoHeader);
    }
    return true;
  }
  // After a barrier, by all threads. A source whose word does not come is masked.
  CROSSDOCK_DEVICE bool add_experts() {
    for (u32 i = thread_index(); i < experts(); i += kConfig.threads()) {
      u32 selections = 0;
      for (u32 source = 0; source < b.world(); ++source) {
        if (!comes(source)) continue;
        u32 more = 0;
        const Came came = wait_word(b.counts(source) + i, {Phase::kSourceFlag, source}, more);
        if (came == Came::kAbort) return false;
        if (came == Came::kMasked) drop(source);
        if (came == Came::kYes) selections += more;
      }
      ptx::st_shared(b.template at<u32>(b.shared.histogram) + i, selections);
    }
    return true;
  }
  // For blocks that copy, without late masks: rows of a source, by its header; choices of an expert
  // by it, one thread; until its rows are here, by a warp. False when the rank aborts.
  CROSSDOCK_DEVICE u32 rows_of(u32 source) const {
    return comes(source) ? header(source).rows() : 0;
  }
  CROSSDOCK_DEVICE bool wait_count(u32 source, u32 expert, u32& n) const {
    n = 0;
    return !comes(source) ||
           wait_word(b.counts(source) + expert, {Phase::kSourceFlag, source}, n) != Came::kAbort;
  }
  CROSSDOCK_DEVICE bool wait_rows(u32 source) const {
    return !comes(source) || wait_source(source) != Came::kAbort;
  }
  CROSSDOCK_DEVICE bool wait_flags(u32 warp) {
    for (u32 source = warp; source < b.world(); source += kConfig.warps) {
      if (!comes(source)) continue;
      const Came came = wait_source(source);
      if (came == Came::kAbort) return false;
      if (came == Came::kMasked && lane == 0) drop(source);
      u64* waited = b.p.statistics.source_wait_ns;
      if (lane == 0 && waited != nullptr)
        ptx::red_add_relaxed_gpu(waited + source, ptx::global_timer() - start);
    }
    return true;
  }
  // After a barrier, by all threads.
  CROSSDOCK_DEVICE void finish() const {
    for (u32 i = thread_index(); i < experts(); i += kConfig.threads())
      tell_expert(i, ptx::ld_shared(b.template at<u32>(b.shared.histogram) + i));
    const u32 source = thread_index();
    if (source < b.world())
      ptx::st_weak(b.p.result.source_ends + source, source * b.p.stride + rows_of(source));
    if (source != 0 || b.p.result.host_rows == nullptr) return;
    u32 all = 0;
    for (u32 s = 0; s < b.world(); ++s)
      all += rows_of(s);
    put_epoch_word(b.p.result.host_rows, b.p.result.host_ticket, all);
  }

 private:
  static constexpr u32 kNoHeader = EpHeader::kGivenUp;  // of a source that is masked

  CROSSDOCK_DEVICE u32 experts() const { return b.p.experts.count(b.rank()); }
  CROSSDOCK_DEVICE void put_header(u32 source, u32 value) const {
    ptx::st_shared(b.template at<u32>(b.shared.headers) + source, value);
  }
  CROSSDOCK_DEVICE EpHeader header(u32 source) const {
    return {ptx::ld_shared(b.template at<u32>(b.shared.headers) + source)};
  }
  CROSSDOCK_DEVICE bool comes(u32 source) const { return header(source).value != kNoHeader; }
  CROSSDOCK_DEVICE void drop(u32 source) {
    late = true;
    put_header(source, kNoHeader);
  }

  CROSSDOCK_DEVICE Came refuse(u32 source, EpHeader header) const {
    if (header.given_up()) {
      const u32 culprit = header.culprit();
      raise_fault(b.p.common, {Phase::kPeerRouting, culprit == kNoPeer ? source : culprit, b.epoch},
                  source, 0);
    } else {
      raise_fault(b.p.common, {Phase::kShape, source, b.p.output.row_bytes}, header.row_bytes(), 0);
    }
    return Came::kAbort;
  }
  // An epoch word of `source`. A later epoch in its place means that the ranks have run apart. How
  // old it may be is not bounded, since dispatches in packets write none.
  static constexpr u32 kMostAhead = 1u << 16;
  struct From {
    Phase phase;
    u32 source;
  };
  CROSSDOCK_DEVICE Came wait_word(const u64* word, const From& from, u32& value) const {
    const Expected expected{from.phase, from.source, b.epoch};
    u64 seen = 0;
    const Came came = wait_or_mask(
        b.p.common, b.p.masking, expected, [&] { return seen = ptx::ld_relaxed_sys(word); },
        [&](u64 w) { return word_epoch(w) - b.epoch < kMostAhead; });
    value = word_value(seen);
    if (came != Came::kYes || word_epoch(seen) == b.epoch) return came;
    raise_fault(b.p.common, expected, word_epoch(seen), 0);
    return Came::kAbort;
  }
  // The lanes agree.
  CROSSDOCK_DEVICE Came wait_header(u32 source, EpHeader& header) const {
    Came came = Came::kYes;
    if (lane == 0) {
      came = wait_word(b.header(source), {Phase::kEpochWord, source}, header.value);
      if (came == Came::kYes &&
          (header.given_up() || header.shape() != EpHeader::shape_of(b.p.output)))
        came = refuse(source, header);
    }
    return agreed(came);
  }
  // All rows of `source` are here. The lanes agree.
  CROSSDOCK_DEVICE Came wait_source(u32 source) const {
    return agreed(lane < header(source).blocks() ? wait_block(source) : Came::kYes);
  }
  CROSSDOCK_DEVICE static Came agreed(Came mine) {
    if (ptx::any(kFullMask, mine == Came::kAbort)) return Came::kAbort;
    const bool masked = ptx::any(kFullMask, mine == Came::kMasked);
    ptx::sync_warp(kFullMask);  // a vote orders no memory: what one lane has acquired is for all
    return masked ? Came::kMasked : Came::kYes;
  }
  // The rows of the lane's block of `source` are here, or the source has given up meanwhile.
  CROSSDOCK_DEVICE Came wait_block(u32 source) const {
    const u32* flag = b.flags(source) + lane;
    EpHeader told{};
    const Came came = wait_or_mask(
        b.p.common, b.p.masking, {Phase::kSourceFlag, source, b.epoch},
        [&] {
          told.value = word_value(ptx::ld_relaxed_sys(b.header(source)));
          return u64{ptx::ld_acquire_sys(flag)};
        },
        [&](u64 seen) { return static_cast<u32>(seen) == b.epoch || told.given_up(); });
    return came == Came::kYes && told.given_up() ? refuse(source, told) : came;
  }
  CROSSDOCK_DEVICE void tell_expert(u32 i, u32 selections) const {
    ptx::st_weak(b.p.result.expert_counts + i, selections);
    u64* kept = b.p.statistics.expert_selections;
    if (kept != nullptr && selections != 0) ptx::red_add_relaxed_gpu(kept + i, u64{selections});
    if (b.p.result.host_experts != nullptr)
      put_epoch_word(b.p.result.host_experts + i, b.p.result.host_ticket, selections);
  }
};

}  // namespace crossdock::device
