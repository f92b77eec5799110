// Packets: 16 bytes that are valid by themselves, three words of data and the epoch in which they
// were written. For a handful of rows: no fence, no flag, no wait until a store has landed.
//
//   sender                                     receiver
//     packet = {a, b, c, epoch}  one store ---->  polls until its tag is the epoch
//
// Packets are never zeroed: nobody writes one again before it has been read, which the protocol
// that uses them has to see to. A packet orders nothing but itself.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/comm/masking.cuh>

namespace crossdock::device {

inline constexpr u32 kPacketWords = 3;
CROSSDOCK_HOST_DEVICE constexpr u32 packets_of(u32 words) {
  return ceil_div(words, kPacketWords);
}

CROSSDOCK_DEVICE void put_packet(U32x4* packet, u32 epoch, u32 a, u32 b, u32 c CROSSDOCK_SITE) {
  ptx::st_relaxed_sys(packet, U32x4{a, b, c, epoch} CROSSDOCK_PASS_SITE);
}

// Waits for `kCount` packets of one sender, all polled at once. One thread. `wanted`: a bit for
// each that there is.
template <u32 kCount>
CROSSDOCK_DEVICE bool wait_packets(const LaunchCommon& c, const Expected& expected,
                                   const U32x4* const (&packets)[kCount], u32 wanted,
                                   U32x4 (&out)[kCount] CROSSDOCK_SITE) {
  u32 left = wanted;
  return wait_until(
      c, expected,
      [&] {
        CROSSDOCK_UNROLL
        for (u32 i = 0; i < kCount; ++i)
          if ((left >> i & 1u) != 0) out[i] = ptx::ld_relaxed_sys(packets[i] CROSSDOCK_PASS_SITE);
        CROSSDOCK_UNROLL
        for (u32 i = 0; i < kCount; ++i)
          if ((left >> i & 1u) != 0 && out[i].w == static_cast<u32>(expected.value))
            left &= ~(1u << i);
        return u64{left};
      },
      [](u64 missing) { return missing == 0; } CROSSDOCK_PASS_SITE);
}

}  // namespace crossdock::device
