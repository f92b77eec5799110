// The generator behind every choice of a run: small, fast, the same on every machine.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crossdock::twin {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed + 0x632BE59BD9B4E019ull) | 1) {}

  // xorshift64*: 64 well mixed bits (the low ones least, so callers get the high ones).
  std::uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Dull;
  }
  // 0 .. n-1; n > 0.
  std::uint32_t below(std::uint32_t n) {
    return static_cast<std::uint32_t>(((next() >> 32) * n) >> 32);
  }
  bool one_in(std::uint32_t n) { return below(n) == 0; }

  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

 private:
  std::uint64_t state_;
};

}  // namespace crossdock::twin
