// Core: a handful of tokens, whose rows travel in packets. See core.hpp and docs/design/ep.md.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ep/handle.hpp"

namespace crossdock::ep {
namespace {

constexpr u32 kMostBlocks = 32;  // of a kind, in a launch

u32 blocks_for(u32 units) {
  return std::clamp(device::ceil_div(units, kPacketWarps), 1u, kMostBlocks);
}

}  // namespace

Result<> Core::prepare_packets(Deadline deadline) {
  for (const bool cast : {false, true}) {
    if (cast && !options_.cast) continue;
    CROSSDOCK_TRY(kernel,
                  launcher_->prepare(packet_dispatch_kernel(cast),
                                     {.threads = kPacketWarps * device::kWarpSize,
                                      .shared_bytes = packet_shared_bytes(options_.experts)},
                                     deadline));
    packets_[cast].emplace(std::move(kernel));
  }
  CROSSDOCK_TRY(combine,
                launcher_->prepare(packet_combine_kernel(),
                                   {.threads = kPacketWarps * device::kWarpSize}, deadline));
  packet_combine_.emplace(std::move(combine));
  return {};
}

// All ranks have to agree, so only what they have in common decides.
bool Core::in_packets(u32 most, const Tokens& t) const {
  return options_.small_packets && !(t.cast && t.cast_ue8m0) && most <= window_.packet_tokens &&
         !options_.mask_late && packet_shared_bytes(options_.experts) <= kMaxSharedBytes;
}

Result<> Core::launch_packets(const device::EpSmallParams& small, const Handle::State& h,
                              StreamPtr stream) {
  device::EpPacketParams p{};
  p.small = small;
  p.small.common.kernel = device::KernelId::kEpPacketDispatch;
  p.areas = window_.packets[h.slot - options_.slots];
  p.message = {.row_words = h.output.row_bytes / 4,
               .scale_words = h.output.scale_bytes / 4,
               .top_k = options_.top_k,
               .cast = h.cast};
  const u32 units = h.most_tokens * (p.message.parts() + 1);
  p.small.send_blocks = small.sends ? blocks_for(units) : 0;
  p.receive_blocks = small.receives ? blocks_for(units * window_.world) : 0;
  const u32 blocks = p.small.send_blocks + p.receive_blocks + (small.receives ? 1 : 0);
  const symm::Rank& rank = group_->rank(h.rank);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, blocks, stream, kept));
  return launcher_->launch(rank, *packets_[h.cast], launch_shape, p);
}

Result<> Core::combine_packets(const Handle::State& h, const device::EpCombineParams& c,
                               StreamPtr stream) {
  device::EpPacketCombineParams p{};
  p.common = c.common;
  p.common.kernel = device::KernelId::kEpPacketCombine;
  p.view = c.view;
  p.areas = window_.packets[h.slot - options_.slots];
  p.tokens = h.tokens;
  p.stride = options_.small_tokens;
  p.top_k = options_.top_k;
  p.routes = c.routes;
  p.source_ends = c.source_ends;
  p.rows = static_cast<const u8*>(h.input.rows);
  p.weights = h.input.weights;
  p.row_words = options_.hidden / 2;
  p.output = c.output;
  p.state = c.state;
  p.masking = c.masking;
  p.rank_wait_ns = c.rank_wait_ns;
  p.input_words = c.areas.inputs;
  p.read_words = c.read_words;
  const u32 units = h.most_tokens * (device::ceil_div(p.row_words, device::kEpPartWords) + 1);
  p.send_blocks = c.tells ? blocks_for(units * window_.world) : 0;
  p.add_blocks = c.adds ? blocks_for(units) : 0;
  const symm::Rank& rank = group_->rank(h.rank);
  std::optional<cuda::Stream> kept;
  CROSSDOCK_TRY(launch_shape, shape(rank, p.send_blocks + p.add_blocks, stream, kept));
  return launcher_->launch(rank, *packet_combine_, launch_shape, p);
}

}  // namespace crossdock::ep
