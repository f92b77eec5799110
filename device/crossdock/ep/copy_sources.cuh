// Whose rows the blocks that copy have to do with: where the rows of each source end, what the
// sources have told, and who is left out. By all threads of a block, which agree.
//
//   sources that are not masked
//     ends, told[kSelections]                  ->    every block
//
// A routing that is used again is known before: nobody is waited for.
//
// With late masks a source may be masked while it is waited for, and blocks might see that or not.
// So one decides for all, and what has begun with a source that did not end well is done again:
//
//   the first block that copies                      the others
//     ends and told[kSelections], or masked
//     agreed = {epoch, sources that came}      ->    the same, whose words are there
//   block 0 of the dispatch, at its end
//     decided = {epoch, sources that came}     ->    the same as agreed, or lists and copies anew
//
// A launch only ever adds to the mask, so `decided` has no source that is not in `agreed`.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/epoch.cuh>
#include <crossdock/ep/copy_wait.cuh>
#include <crossdock/ep/dispatch_block.cuh>
#include <crossdock/layout/ep_expanded.cuh>

namespace crossdock::device {

namespace detail {
// Where places are fixed by source: whether there is a row at one.
CROSSDOCK_COLD bool is_row_of(const u32* ends, u32 stride, u32 row) {
  return row < ends[row / stride];
}
}  // namespace detail

// What has arrived of a dispatch that has not ended.
struct EpArriving : EpArrived {
  const u32* ends;  // shared: of the rows of each source

  CROSSDOCK_DEVICE bool holds(u32 row) const {
    return stride == 0 || detail::is_row_of(ends, stride, row);
  }
  // The source of a row.
  CROSSDOCK_DEVICE u32 source_of(u32 row) const {
    u32 source = 0;
    CROSSDOCK_NO_UNROLL
    while (ends[source] <= row)
      ++source;
    return source;
  }
};

template <class Block>
struct EpCopySources {
  const EpExpandedDispatchParams& p;
  const Block& b;
  u32* ends;      // shared [world]
  u32* heard;     // shared, a word
  u32 index;      // of the block among those that copy
  u32 taken = 0;  // sources whose rows count

  CROSSDOCK_DEVICE bool late() const { return p.dispatch.masking.late; }
  CROSSDOCK_DEVICE bool takes(u32 source) const { return (taken >> source & 1u) != 0; }
  // Sources that nobody waits for any more.
  CROSSDOCK_DEVICE u32 gone() const { return late() ? masked_ranks(p.dispatch.masking) : 0; }

  // The ends of the sources, whose selections are there. False when the rank aborts.
  CROSSDOCK_DEVICE bool find() {
    const ThreadGroup all = ThreadGroup::block();
    const bool leads = late() && index == 0;
    taken = (kFullMask >> (kWarpSize - b.world())) & ~b.masked;
    if (late() && !leads && !hear(EpCopyWord::kAgreed, taken)) return false;
    if (all.any(!take_end())) return false;
    if (!b.reuses() && all.any(!wait_told(EpTold::kSelections, thread_index(), block_size())))
      return false;
    // Whom a thread has stopped waiting for is in the mask by now.
    if (leads) {
      if (thread_index() == 0) *heard = taken & ~gone();
      all.sync();
      taken = *heard;
      if (thread_index() == 0)
        ep_put_copy_word(p.words + EpCopyWords::of(EpCopyWord::kAgreed), b.epoch, taken);
    }
    take_only(taken);
    return true;
  }
  // From now on only these sources count.
  CROSSDOCK_DEVICE void take_only(u32 sources) {
    taken = sources;
    const u32 source = thread_index();
    if (source < b.world() && !takes(source)) ends[source] = source * p.dispatch.stride;
    ThreadGroup::block().sync();
  }
  // What one block tells all that copy. False when the rank aborts.
  CROSSDOCK_DEVICE bool hear(EpCopyWord what, u32& sources) const {
    bool ok = true;
    if (thread_index() == 0)
      ok = ep_wait_copy_word(p.dispatch.common, p.words + EpCopyWords::of(what), b.epoch, *heard);
    if (ThreadGroup::block().any(!ok)) return false;
    sources = *heard;
    return true;
  }
  // All blocks of all sources have told it, those dealt to the calling one of so many threads, or
  // are gone; what they wrote before is visible after a barrier.
  CROSSDOCK_DEVICE bool wait_told(EpTold what, u32 thread, u32 threads) const {
    const u32 most = p.dispatch.most_blocks;
    bool told = true;
    for (u32 i = thread; i < b.world() * most && told; i += threads) {
      const u32 source = i / most, block = i % most;
      if (block >= p.dispatch.source_blocks[source] || !takes(source)) continue;
      told = ep_wait_told(p.dispatch.common, b.told_word(what, source, block),
                          {Phase::kRowFlag, source, b.epoch}, mask());
    }
    return told;
  }
  // How many rows there are.
  CROSSDOCK_DEVICE u32 rows() const {
    if (p.dispatch.stride == 0) return ends[b.world() - 1];
    u32 sum = 0;
    CROSSDOCK_NO_UNROLL
    for (u32 source = 0; source < b.world(); ++source)
      sum += ends[source] - source * p.dispatch.stride;
    return sum;
  }
  // The `n`-th of them; where places are fixed by source there are gaps.
  CROSSDOCK_DEVICE u32 row_at(u32 n) const {
    if (p.dispatch.stride == 0) return n;
    u32 source = 0;
    CROSSDOCK_NO_UNROLL
    for (; n >= ends[source] - source * p.dispatch.stride; ++source)
      n -= ends[source] - source * p.dispatch.stride;
    return source * p.dispatch.stride + n;
  }
  // The rows whose choices this of so many blocks lists, with gaps that begin inside; each block
  // has as many rows.
  struct Piece {
    u32 first, end;
  };
  CROSSDOCK_DEVICE Piece piece(u32 blocks) const {
    const u32 all = rows();
    const u32 share = ceil_div(all, blocks);
    const u32 first = min_of(index * share, all);
    const u32 end = min_of(first + share, all);
    if (first == end) return {0, 0};
    return {row_at(first), row_at(end - 1) + 1};
  }

 private:
  // Where it is found out whether a source is gone; null: it never is.
  CROSSDOCK_DEVICE const u32* mask() const {
    return late() ? &p.dispatch.masking.mask->ranks : nullptr;
  }
  // A source may first wait for a rank that is missing: with the longer deadline, the blocks that
  // dispatch here find out which.
  CROSSDOCK_DEVICE bool take_end() const {
    const u32 source = lane_index();
    if (warp_index() != 0 || source >= b.world() || !takes(source)) return true;
    if (b.reuses()) {
      ends[source] = ptx::ld_weak(p.dispatch.reuse.source_ends + source);
      return true;
    }
    u64 word = 0;
    const bool told = wait_until(p.dispatch.common, {Phase::kRowFlag, source, b.epoch & 0xffffu},
                                 word, RelaxedSys{b.end_word(source)},
                                 OrMasked<UpperIs<48>>{tagged_with(b.epoch), mask(), source});
    if (!told || !tagged_with(word, b.epoch)) return told;
    const u64 value = word & kTaggedValueMask;
    if (ep_is_given_up(value)) return b.pass_on(source, value);
    ends[source] = static_cast<u32>(value);
    return true;
  }
};

}  // namespace crossdock::device
