// What the roles of ep_dispatch share: a block's view of its launch. Built by every thread from the
// parameters; nothing here waits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/masking.cuh>
#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/layout/ep_dispatch.cuh>

namespace crossdock::device {

inline constexpr u32 kEpBatch = 8;  // loads in flight of a thread

template <EpDispatchConfig kConfig>
struct EpDispatchBlock {
  static constexpr EpDispatchConfig kVariant = kConfig;

  const EpDispatchParams& p;
  EpDispatchShared shared;
  u32 epoch;
  u32 block;
  u32 first;  // token of this rank
  u32 count;
  u32 masked = 0;  // ranks that this launch goes on without

  CROSSDOCK_DEVICE explicit EpDispatchBlock(const EpDispatchParams& params)
      : p(params),
        shared(ep_dispatch_shared(kConfig, params.input.row_bytes, params.view.world,
                                  params.experts.experts, params.tokens.groups)),
        epoch(0),
        block(block_index()),
        first(params.tokens.first(block_index())),
        count(params.tokens.count(block_index())) {}

  template <class T>
  CROSSDOCK_DEVICE T* at(u32 offset) const {
    return reinterpret_cast<T*>(dynamic_shared() + offset);
  }
  CROSSDOCK_DEVICE u32 world() const { return p.view.world; }
  CROSSDOCK_DEVICE u32 rank() const { return p.view.rank; }
  CROSSDOCK_DEVICE u32 groups() const { return ceil_div(count, kWarpSize); }
  // Whether places are fixed by source, so that any rank may be missing.
  CROSSDOCK_DEVICE bool fixed() const { return p.stride != 0; }
  CROSSDOCK_DEVICE bool talks_to(u32 peer) const {
    return peer < world() && !is_masked(masked, peer);
  }
  // Whether the routing is that of an earlier dispatch. The same for all threads.
  CROSSDOCK_DEVICE bool reuses() const { return p.reuse.routes != nullptr; }
  // Whether there are tokens that no warp was dealt.
  CROSSDOCK_DEVICE bool pooled() const {
    return ep_dealt(kConfig.dispatch_warps, p.tokens.per_block) < p.tokens.per_block;
  }
  // Nothing to do but to say so: no tokens, no pool, and the ends are another block's business.
  CROSSDOCK_DEVICE bool idle() const {
    return count == 0 && !pooled() && block != p.tokens.last_block();
  }
  // So few tokens that a launch is a chain of latencies: what the host wants to know waits until
  // the rows are here, and what can be done early is.
  CROSSDOCK_DEVICE bool few() const { return p.tokens.groups <= 1; }
  CROSSDOCK_DEVICE EpRoute& route(u32 group, u32 destination) const {
    return at<EpRoute>(shared.routes)[group * world() + destination];
  }

  // This rank's words of the epoch; `view.map` gives those of a peer.
  CROSSDOCK_DEVICE u64 parity_index(u32 index) const { return u64{epoch & 1u} * world() + index; }
  CROSSDOCK_DEVICE u64* count_words(u32 source, u32 of_block) const {
    const u64 index = parity_index(source) * p.areas.most_blocks + of_block;
    return p.view.at<u64>(p.areas.counts + index * ep_quads(world()) * sizeof(u64));
  }
  CROSSDOCK_DEVICE u64* end_word(u32 source) const {
    return p.view.at<u64>(p.areas.ends + parity_index(source) * sizeof(u64));
  }
  CROSSDOCK_DEVICE u64* output_word(u32 destination) const {
    return p.view.at<u64>(p.areas.outputs + parity_index(destination) * sizeof(u64));
  }
  CROSSDOCK_DEVICE u32* arrivals(u32 source) const {
    return p.view.at<u32>(p.areas.arrivals + source * sizeof(PaddedWord));
  }
  CROSSDOCK_DEVICE u64 total_index(u32 local) const {
    return u64{epoch & 1u} * p.areas.most_experts + local;
  }
  CROSSDOCK_DEVICE u32* expert_total(u32 local) const {
    return p.view.at<u32>(p.areas.expert_totals + total_index(local) * sizeof(u32));
  }
  CROSSDOCK_DEVICE u32* block_flag(u32 source, u32 of_block) const {
    return p.view.at<u32>(p.areas.block_flags) + source * p.areas.most_blocks + of_block;
  }
  // [most_blocks][most_experts] of a source.
  CROSSDOCK_DEVICE u64* block_experts(u32 source) const {
    const u64 words = u64{p.areas.most_blocks} * p.areas.most_experts;
    return p.view.at<u64>(p.areas.block_experts) + parity_index(source) * words;
  }
  CROSSDOCK_DEVICE EpRoute* global_route(u32 of_block, u32 group) const {
    return p.result.routes + (u64{of_block} * p.tokens.groups + group) * world();
  }

  CROSSDOCK_DEVICE u32* row_flag(u32 row) const {
    const u64 index = u64{epoch & 1u} * p.flags.capacity + row;
    return p.view.at<u32>(p.flags.rows + index * sizeof(u32));
  }
  CROSSDOCK_DEVICE u32* told_word(EpTold what, u32 source, u32 of_block) const {
    const u64 of = (epoch & 1u) * 2 + static_cast<u32>(what);
    const u64 index = (of * world() + source) * p.areas.most_blocks + of_block;
    return p.view.at<u32>(p.flags.told + index * sizeof(u32));
  }

  // What this rank tells instead of counts after a fault.
  CROSSDOCK_DEVICE u64 given_up(CROSSDOCK_SITE_ONLY) const {
    // An atomic: a load might still return the value from before another thread raised the flag.
    u32* abort = &p.common.control->abort.value;
    return ep_given_up(abort_peer(ptx::atom_or_relaxed_gpu(abort, 0u CROSSDOCK_PASS_SITE)));
  }
  // `source` has told so: a fault here too, with the culprit that it names. Returns false.
  CROSSDOCK_DEVICE bool pass_on(u32 source, u64 value CROSSDOCK_SITE) const {
    const u32 culprit = ep_culprit(value);
    raise_fault(p.common, {Phase::kPeerRouting, culprit == kNoPeer ? source : culprit, epoch},
                source, 0 CROSSDOCK_PASS_SITE);
    return false;
  }

  // All rows of this block for `peer` are there. A rank that has been masked meanwhile, perhaps by
  // this block, may lack some: it is not told. What all threads have done comes before.
  CROSSDOCK_DEVICE void signal_rows(u32 peer) const {
    if (!fixed()) return signal_counter(p.view.map(arrivals(rank()), peer), 1);
    if (p.masking.late && is_masked(masked_ranks(p.masking), peer)) return;
    ptx::st_release_sys(p.view.map(block_flag(rank(), block), peer), epoch);
  }

  // Waits for a tagged word of `peer`, which is masked if it does not come and may be late: then
  // `value` is kMaskedWord. False when the rank aborts. With kAcquires what came before the word is
  // visible afterwards.
  static constexpr u64 kMaskedWord = ~u64{0};
  template <bool kAcquires>
  CROSSDOCK_DEVICE bool wait_word(const u64* word, u32 peer, u64& value CROSSDOCK_SITE) const {
    if (!p.masking.late)
      return kAcquires ? wait_announced(p.common, word, epoch, peer, value CROSSDOCK_PASS_SITE)
                       : wait_tagged_word(p.common, word, epoch, peer, value CROSSDOCK_PASS_SITE);
    // Ends come from ranks that may themselves be waiting for one that is missing.
    const Phase of_peer = kAcquires ? Phase::kEpochWord : Phase::kSourceFlag;
    const Phase phase = peer == rank() ? Phase::kGridSync : of_peer;
    u64 seen = 0;
    const auto test = tagged_with(epoch);
    const auto gone = masked_meanwhile(p.masking, peer);
    const WaitOutcome outcome =
        kAcquires
            ? poll_unless(p.common, phase, seen, AcquireSys{word}, test, gone CROSSDOCK_PASS_SITE)
            : poll_unless(p.common, phase, seen, RelaxedSys{word}, test, gone CROSSDOCK_PASS_SITE);
    const Came came = came_of(outcome, p.common, p.masking, {phase, peer, epoch & 0xffffu},
                              seen CROSSDOCK_PASS_SITE);
    value = came == Came::kMasked ? kMaskedWord : seen & kTaggedValueMask;
    return came != Came::kAbort;
  }

  // Waits until `destination` has said where its rows of this epoch go, and what they look like.
  // One thread for the block: after a barrier `output` is known to all, whose stores and bulk
  // copies may follow.
  CROSSDOCK_DEVICE bool wait_output(u32 destination CROSSDOCK_SITE) const {
    EpPlaceWord word{kMaskedWord};
    bool told = !talks_to(destination) || wait_word<true>(output_word(destination), destination,
                                                          word.value CROSSDOCK_PASS_SITE);
    if (told && word.value == kMaskedWord) {
      at<u64>(shared.outputs)[destination] = 0;
      return true;
    }
    if (told && ep_is_given_up(word.value)) {
      told = pass_on(destination, word.value CROSSDOCK_PASS_SITE);
    } else if (told && word.shape() != EpPlaceWord::shape_of(p.output)) {
      raise_fault(p.common, {Phase::kShape, destination, p.output.row_bytes}, word.row_bytes(),
                  0 CROSSDOCK_PASS_SITE);
      told = false;
    }
    at<u64>(shared.outputs)[destination] =
        reinterpret_cast<u64>(p.view.at<u8>(word.offset(), destination));
    ptx::fence_proxy_async(CROSSDOCK_PASS_SITE_ONLY);
    return told;
  }
  // The output block of `destination`; null: it is masked.
  CROSSDOCK_DEVICE u8* output(u32 destination) const {
    return reinterpret_cast<u8*>(at<u64>(shared.outputs)[destination]);
  }
};

}  // namespace crossdock::device
