// What the figures of `crossdock bench ep` are compared with: aims, and the best that DeepEP gave
// on a host of 4 x H200 (1.2.1 or 2.1.0, whichever was faster; few tokens by its low-latency
// calls). Four ranks, a GPU each, hidden 7168, top-8 of 256 experts chosen evenly. Data, no code.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crossdock::tools::bench {

struct EpKnown {
  const char* name;
  std::uint32_t tokens;
  double deepep_us;  // 0: not known, or there is no such call
  double aim_us;     // 0: none
};
inline constexpr EpKnown kEpKnown[] = {{"dispatch_fp8_us", 4096, 366, 245},
                                       {"dispatch_fp8_cast_us", 4096, 0, 250},
                                       {"dispatch_bf16_us", 4096, 551, 465},
                                       {"combine_bf16_us", 4096, 597, 490}};
// On the path for few tokens. The aims are of launches that overlap and tell the host nothing
// (--overlap --no-host-counts); without those there are none.
inline constexpr EpKnown kEpKnownFew[] = {{"dispatch_fp8_us", 128, 22, 13.5},
                                          {"combine_bf16_us", 128, 57, 20},
                                          {"dispatch_cast_and_combine_us", 128, 96, 36},
                                          {"dispatch_fp8_us", 32, 17, 0},
                                          {"combine_bf16_us", 32, 22, 0},
                                          {"dispatch_fp8_us", 1, 0, 5.8},
                                          {"combine_bf16_us", 1, 0, 4.8}};

}  // namespace crossdock::tools::bench
