// The only place that names xxHash in this layer. Inlined: its header then picks the vector code
// of the build and needs no symbol of the shared library.
// SPDX-License-Identifier: Apache-2.0
#include "wire/checksum.hpp"

#include <new>
#include <xxhash.h>

namespace crossdock::wire {
namespace {

XXH3_state_t* state_of(std::byte* raw) {
  return std::launder(reinterpret_cast<XXH3_state_t*>(raw));
}
const XXH3_state_t* state_of(const std::byte* raw) {
  return std::launder(reinterpret_cast<const XXH3_state_t*>(raw));
}

}  // namespace

std::uint64_t xxh3_64(Bytes bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

StreamChecksum::StreamChecksum() {
  static_assert(sizeof(XXH3_state_t) == sizeof(state_) && alignof(XXH3_state_t) <= 64);
  auto* state = new (state_) XXH3_state_t;
  XXH3_INITSTATE(state);
  reset();
}

void StreamChecksum::update(Bytes slice) {
  if (!slice.empty()) XXH3_64bits_update(state_of(state_), slice.data(), slice.size());
}

std::uint64_t StreamChecksum::digest() const {
  return XXH3_64bits_digest(state_of(state_));
}

void StreamChecksum::reset() {
  XXH3_64bits_reset(state_of(state_));
}

}  // namespace crossdock::wire
