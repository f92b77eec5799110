// What the roles of ep_dispatch share: a block's view of its launch. Built by every thread from the
// parameters; nothing here waits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/tagged_word.cuh>
#include <crossdock/layout/ep_dispatch.cuh>

namespace crossdock::device {

template <EpDispatchConfig kConfig>
struct EpDispatchBlock {
  static constexpr EpDispatchConfig kVariant = kConfig;

  const EpDispatchParams& p;
  EpDispatchShared shared;
  u32 epoch;
  u32 block;
  u32 first;  // token of this rank
  u32 count;

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
  CROSSDOCK_DEVICE u32* expert_total(u32 local) const {
    const u64 index = u64{epoch & 1u} * p.areas.most_experts + local;
    return p.view.at<u32>(p.areas.expert_totals + index * sizeof(u32));
  }
  CROSSDOCK_DEVICE EpRoute* global_route(u32 of_block, u32 group) const {
    return p.result.routes + (u64{of_block} * p.tokens.groups + group) * world();
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

  // Waits until `destination` has said where its rows of this epoch go, and what they look like.
  // One thread for the block: after a barrier `output` is known to all, whose stores and bulk
  // copies may follow.
  CROSSDOCK_DEVICE bool wait_output(u32 destination CROSSDOCK_SITE) const {
    EpPlaceWord word{};
    bool told = wait_announced(p.common, output_word(destination), epoch, destination,
                               word.value CROSSDOCK_PASS_SITE);
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
  // The output block of `destination`.
  CROSSDOCK_DEVICE u8* output(u32 destination) const {
    return reinterpret_cast<u8*>(at<u64>(shared.outputs)[destination]);
  }
};

}  // namespace crossdock::device
