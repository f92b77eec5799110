// ep_packet_dispatch: dispatch of a handful of tokens, whose rows travel in packets that are valid
// by themselves: no barrier, no fence, no flag and no store that has to land first is waited for.
// The receiver takes packets apart and writes rows where ep_small_dispatch would have put them.
//
// Launch on every rank in place of ep_small_dispatch, with the same slots and epochs: grid =
// small.send_blocks that send (at least one), then receive_blocks and one that counts; block = 32 *
// kConfig.warps threads, shared memory `ep_packet_shared`. All blocks that send come first, so
// none of them waits for one that receives.
//
//   use e of the slot, rank r                             a peer
//     free[r] = e - 1                             ---->   may overwrite packets of e - 1 in e + 1
//     free[d] >= e - 2 (long true)
//     warp: ids of all tokens, a lane each -> who goes where, as which row
//     header {rows, shape}                        ---->   a lane a source
//     warp: a part of a row (cast) -> packets     ---->   warp: the same part -> rows, scales
//     warp: ids, weights, token number -> packets ---->   ids ...; a block counts experts
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/ep/packet_receive.cuh>
#include <crossdock/ep/packet_send.cuh>

namespace crossdock::device::kernel {

template <EpPacketConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.warps* kWarpSize, 1)
    ep_packet_dispatch(CROSSDOCK_PARAMS(EpPacketParams, p)) {
  const EpSmallParams& s = p.small;
  const ThreadGroup all = ThreadGroup::block();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  // Every warp for itself: nobody waits for a barrier before rows leave. All loads first, then what
  // comes of them.
  const bool aborted_before = aborted(s.common);
  const u32 launch = read_epoch(&s.state->dispatch);
  const u32 masked = masked_ranks(s.masking);
  const u32 epoch = ptx::uniform(launch - (s.sends ? 0 : 1));
  const bool stop = ptx::any(kFullMask, aborted_before);
  const u32 warp = ptx::uniform(warp_index());
  const u32 senders = s.sends ? s.send_blocks : 0;
  if (block_index() < senders) {
    EpPacketSender<kConfig>(p, epoch, masked, warp).run(stop);
  } else if (block_index() >= senders + p.receive_blocks) {
    ep_packet_count(p, epoch, masked, stop);
  } else if (!stop) {
    EpPacketReceiver<kConfig>(p, epoch, masked, warp).run(block_index() - senders);
  }
  all.sync();  // all warps have read the epoch
  if (all.leader() && s.sends) pass_epoch(&s.state->dispatch, epoch);
}

}  // namespace crossdock::device::kernel
