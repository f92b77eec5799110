// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): what peer authentication needs and no more.
// Stateless; no heap.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/codec.hpp"

namespace crossdock::wire {

using Digest256 = std::array<std::byte, 32>;

class Sha256 {
 public:
  void update(Bytes bytes);
  // Ends the message; the object must not be used afterwards.
  [[nodiscard]] Digest256 finish();

 private:
  void block(const std::byte* chunk);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> pending_ = {};
  std::size_t num_pending_ = 0;
  std::uint64_t num_bytes_ = 0;
};

[[nodiscard]] Digest256 sha256(Bytes bytes);

class HmacSha256 {
 public:
  explicit HmacSha256(Bytes key);
  void update(Bytes bytes) { inner_.update(bytes); }
  [[nodiscard]] Digest256 finish();

 private:
  Sha256 inner_;
  Sha256 outer_;
};

[[nodiscard]] Digest256 hmac_sha256(Bytes key, Bytes bytes);

// Takes the same time wherever the two differ.
[[nodiscard]] bool equal_constant_time(const Digest256& a, const Digest256& b);

}  // namespace crossdock::wire
