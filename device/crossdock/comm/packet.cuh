// Packets: 16 bytes that are valid by themselves, two words of data, each with the epoch in which
// it was written. For a handful of rows: no fence, no flag, no wait until a store has landed.
//
//   sender                                          receiver
//     packet = {a, epoch}, {b, epoch}  a store ---->  polls until both epochs are the awaited one
//
// Each 8 bytes carry their epoch, since no more than 8 bytes of a store are sure to be seen at
// once. Half of what travels is data. Packets are never zeroed: nobody writes one again before it
// has been read, which the protocol that uses them has to see to. A packet orders nothing but
// itself.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/epoch.cuh>
#include <crossdock/comm/masking.cuh>

namespace crossdock::device {

inline constexpr u32 kPacketWords = 2;

using Packet = ptx::U64x2;  // two epoch words
CROSSDOCK_HOST_DEVICE constexpr bool packet_is_of(const Packet& packet, u32 epoch) {
  return word_epoch(packet.x) == epoch && word_epoch(packet.y) == epoch;
}
CROSSDOCK_HOST_DEVICE constexpr u32 packet_word(const Packet& packet, u32 i) {
  return word_value(i == 0 ? packet.x : packet.y);
}

CROSSDOCK_DEVICE void put_packet(Packet* packet, u32 epoch, u32 a, u32 b CROSSDOCK_SITE) {
  ptx::st_relaxed_sys(packet,
                      Packet{epoch_word(epoch, a), epoch_word(epoch, b)} CROSSDOCK_PASS_SITE);
}

// Waits for `kCount` packets, all polled at once. One thread. `wanted`: a bit for each that there
// is; `peer_of(i)`: who sends it, for the fault record.
template <u32 kCount, class PeerOf>
CROSSDOCK_DEVICE bool wait_packets(const LaunchCommon& c, const Expected& expected,
                                   const Packet* const (&packets)[kCount], u32 wanted,
                                   Packet (&out)[kCount], const PeerOf& peer_of CROSSDOCK_SITE) {
  u32 left = wanted;
  u64 seen = 0;
  const WaitOutcome outcome = poll_until(
      c, expected.phase, seen,
      [&] {
        CROSSDOCK_UNROLL
        for (u32 i = 0; i < kCount; ++i)
          if ((left >> i & 1u) != 0) out[i] = ptx::ld_relaxed_sys(packets[i] CROSSDOCK_PASS_SITE);
        CROSSDOCK_UNROLL
        for (u32 i = 0; i < kCount; ++i)
          if ((left >> i & 1u) != 0 && packet_is_of(out[i], static_cast<u32>(expected.value)))
            left &= ~(1u << i);
        return u64{left};
      },
      [](u64 missing) { return missing == 0; } CROSSDOCK_PASS_SITE);
  if (outcome == WaitOutcome::kExpired)
    raise_fault(c, {expected.phase, peer_of(lowest_bit(left)), expected.value}, seen,
                deadline_of(c, expected.phase) CROSSDOCK_PASS_SITE);
  return outcome == WaitOutcome::kDone;
}
// All of one sender.
template <u32 kCount>
CROSSDOCK_DEVICE bool wait_packets(const LaunchCommon& c, const Expected& expected,
                                   const Packet* const (&packets)[kCount], u32 wanted,
                                   Packet (&out)[kCount] CROSSDOCK_SITE) {
  return wait_packets(c, expected, packets, wanted, out,
                      [&](u32) { return expected.peer; } CROSSDOCK_PASS_SITE);
}

}  // namespace crossdock::device
