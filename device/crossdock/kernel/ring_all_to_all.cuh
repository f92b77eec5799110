// ring_all_to_all: every rank sends rows to every rank through rings in the receiver's memory, with
// credits. A channel is a block; in each block `warp_pairs` sending and as many receiving warps.
// Launch on every rank: grid = ring.channels, block = 64 * warp_pairs threads, shared memory
// `ring_shared_bytes`. Symmetric memory: `add_ring` (slots a power of two and a multiple of the
// batch). Totals: zero after a reset.
//
//   step k of warp w (k = w, w + pairs, ...): rank r sends to r + k and receives from r - k, so
//   that at every step senders and receivers match, and no ring of full rings can wait for itself.
//
//   sending warp, lane 0                              receiving warp of the peer, lane 0
//     wait credits >= total + batch - slots   <----     (credits)
//     fence_proxy_async
//     input rows -> shared -> peer's ring
//     bulk_wait: written
//     tails += batch (release sys)            ---->     wait tails >= total + batch (acquire)
//                                                       fence_proxy_async
//                                                       ring rows -> shared -> output
//                                                       all rows read:
//                                             <----     credits += batch (release sys)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/counter.cuh>
#include <crossdock/comm/row_pipe.cuh>
#include <crossdock/layout/exchange.cuh>
#include <crossdock/role/role.cuh>

namespace crossdock::device::kernel {

// Shared memory: the mbarriers of all pipes, then the rows of all pipes.
CROSSDOCK_HOST_DEVICE constexpr u32 ring_barriers_bytes(RingAllToAllConfig c) {
  return round_up(2 * c.warp_pairs * c.stages * 8u, 128u);
}
CROSSDOCK_HOST_DEVICE constexpr u32 ring_shared_bytes(RingAllToAllConfig c, u32 row_bytes) {
  return ring_barriers_bytes(c) + 2 * c.warp_pairs * row_pipe_rows_bytes(c.stages, row_bytes);
}

template <RingAllToAllConfig kConfig>
struct RingRoles {
  using Pipe = RowPipe<kConfig.stages>;
  using Params = RingAllToAllParams;

  // `index`: 0 .. 2 * warp_pairs - 1 over both roles.
  CROSSDOCK_DEVICE static Pipe make_pipe(const Params& p, u32 index) {
    u8* shared = dynamic_shared();
    auto* barriers = reinterpret_cast<ptx::MBarrier*>(shared) + index * kConfig.stages;
    u8* rows = shared + ring_barriers_bytes(kConfig) +
               index * row_pipe_rows_bytes(kConfig.stages, p.ring.row_bytes);
    Pipe pipe(p.common, rows, barriers, p.ring.row_bytes);
    pipe.init();
    return pipe;
  }
  CROSSDOCK_DEVICE static u32* counter(const Params& p, u64 area, u32 peer) {
    const u64 index = ring_index(p.ring, peer, block_index());
    return p.view.at<u32>(area + index * sizeof(PaddedWord));
  }
  // Row `total` of the ring that `sender` fills, in this rank's window.
  CROSSDOCK_DEVICE static u8* slot(const Params& p, u32 sender, u32 total) {
    const u64 ring = ring_index(p.ring, sender, block_index());
    const u64 row = ring * p.ring.slots + total % p.ring.slots;
    return p.view.at<u8>(p.ring.rings + row * p.ring.row_bytes);
  }
  // Byte offset of the channel's row `i` of `peer`'s part in input and output.
  CROSSDOCK_DEVICE static u64 place(const Params& p, u32 peer, u32 i) {
    const u64 row = u64{peer} * p.max_rows + block_index() + u64{i} * p.ring.channels;
    return row * p.ring.row_bytes;
  }

  struct Send {
    static constexpr u32 kWarps = kConfig.warp_pairs;
    static constexpr u32 kRegisters = 0;

    CROSSDOCK_DEVICE static void run(const Params& p, u32 warp) {
      if (lane_index() != 0) return;
      Pipe pipe = make_pipe(p, warp);
      for (u32 step = warp; step < p.view.world; step += kWarps)
        if (!send_to(p, pipe, (p.view.rank + step) % p.view.world)) break;
      pipe.finish();
    }
    CROSSDOCK_DEVICE static bool send_to(const Params& p, Pipe& pipe, u32 peer) {
      const u32 rows = channel_rows(p.ring, ptx::ld_weak(p.send_rows + peer), block_index());
      u32* kept = p.totals.sent + ring_index(p.ring, peer, block_index());
      u32 total = ptx::ld_weak(kept);
      const CreditWindow window{counter(p, p.ring.credits, peer), p.ring.slots, peer};
      u32* tail = p.view.map(counter(p, p.ring.tails, p.view.rank), peer);
      for (u32 done = 0; done < rows;) {
        const u32 n = min_of(kConfig.batch, rows - done);
        if (!window.wait(p.common, total + n)) return false;
        ptx::fence_proxy_async();  // the slots were read by the peer's bulk copies
        const bool moved = pipe.move(
            n, [&](u32 i) { return p.input + place(p, peer, done + i); },
            [&](u32 i) { return p.view.map(slot(p, p.view.rank, total + i), peer); });
        if (!moved) return false;
        pipe.finish();
        signal_counter(tail, n);
        total += n;
        done += n;
      }
      ptx::st_weak(kept, total);
      return true;
    }
  };

  struct Receive {
    static constexpr u32 kWarps = kConfig.warp_pairs;
    static constexpr u32 kRegisters = 0;

    CROSSDOCK_DEVICE static void run(const Params& p, u32 warp) {
      if (lane_index() != 0) return;
      Pipe pipe = make_pipe(p, kConfig.warp_pairs + warp);
      const u32 world = p.view.world;
      for (u32 step = warp; step < world; step += kWarps)
        if (!receive_from(p, pipe, (p.view.rank + world - step) % world)) break;
      pipe.finish();
    }
    CROSSDOCK_DEVICE static bool receive_from(const Params& p, Pipe& pipe, u32 peer) {
      const u32 rows = channel_rows(p.ring, ptx::ld_weak(p.receive_rows + peer), block_index());
      u32* kept = p.totals.received + ring_index(p.ring, peer, block_index());
      u32 total = ptx::ld_weak(kept);
      const u32* tail = counter(p, p.ring.tails, peer);
      u32* credit = p.view.map(counter(p, p.ring.credits, p.view.rank), peer);
      for (u32 done = 0; done < rows;) {
        const u32 n = min_of(kConfig.batch, rows - done);
        if (!wait_arrival(p.common, tail, total + n, peer)) return false;
        ptx::fence_proxy_async();  // the peer's rows are read by bulk copies here
        const bool moved = pipe.move(
            n, [&](u32 i) { return slot(p, peer, total + i); },
            [&](u32 i) { return p.output + place(p, peer, done + i); });
        if (!moved) return false;
        signal_counter(credit, n);
        total += n;
        done += n;
      }
      ptx::st_weak(kept, total);
      return true;
    }
  };
};

template <RingAllToAllConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(2 * kConfig.warp_pairs * kWarpSize, 1)
    ring_all_to_all(CROSSDOCK_PARAMS(RingAllToAllParams, p)) {
  using Roles = RingRoles<kConfig>;
  ptx::grid_dependency_wait();
  if (!may_start(p.common)) return;
  run_roles<typename Roles::Send, typename Roles::Receive>(p);
}

}  // namespace crossdock::device::kernel
