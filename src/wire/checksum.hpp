// XXH3-64, one-shot and streaming: frame checksums and the optional end-to-end checksum of a
// transfer. No heap; single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/codec.hpp"

namespace crossdock::wire {

[[nodiscard]] std::uint64_t xxh3_64(Bytes bytes, std::uint64_t seed = 0);

// The digest of slices fed in order equals xxh3_64 of their concatenation.
class StreamChecksum {
 public:
  StreamChecksum();
  void update(Bytes slice);
  [[nodiscard]] std::uint64_t digest() const;
  void reset();

 private:
  alignas(64) std::byte state_[576];  // an XXH3_state_t; size and alignment asserted in the .cpp
};

}  // namespace crossdock::wire
