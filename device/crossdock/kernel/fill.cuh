// Fills memory with a pattern that both sides can compute: word i of seed s is fill_word(s, i). For
// tests and benches that must know whether bytes arrived at the right place. Any grid; a
// grid-stride loop over 16-byte stores.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core.cuh>

namespace crossdock::device {

struct FillConfig {
  u32 threads;  // of a block
};

struct FillParams {
  U32x4* target;  // 16-byte aligned
  u64 quads;      // 16-byte units to write
  u32 seed;
};

// A mixing of seed and position, so that a word at the wrong place is a wrong word.
CROSSDOCK_HOST_DEVICE constexpr u32 fill_word(u32 seed, u64 index) {
  u32 x =
      static_cast<u32>(index) * 0x9e3779b9u + static_cast<u32>(index >> 32) * 0x85ebca6bu + seed;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  return x;
}

template <FillConfig kConfig>
CROSSDOCK_KERNEL CROSSDOCK_LAUNCH_BOUNDS(kConfig.threads, 1) fill(CROSSDOCK_PARAMS(FillParams, p)) {
  const u64 stride = static_cast<u64>(grid_size()) * kConfig.threads;
  for (u64 i = static_cast<u64>(block_index()) * kConfig.threads + thread_index(); i < p.quads;
       i += stride) {
    const u64 word = i * 4;
    p.target[i] = {fill_word(p.seed, word), fill_word(p.seed, word + 1),
                   fill_word(p.seed, word + 2), fill_word(p.seed, word + 3)};
  }
}

}  // namespace crossdock::device
