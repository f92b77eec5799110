// SHA-256 and HMAC-SHA256, written from FIPS 180-4 and RFC 2104. No table lookup or branch depends
// on secret bytes.
// SPDX-License-Identifier: Apache-2.0
#include "wire/hmac.hpp"

#include <bit>
#include <cstring>

namespace crossdock::wire {
namespace {

// First 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS
// 180-4, 4.2.2).
constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_be32(const std::byte* in) {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i)
    value = (value << 8) | std::to_integer<std::uint32_t>(in[i]);
  return value;
}

void store_be(std::byte* out, std::uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i)
    out[i] = static_cast<std::byte>(value >> (8 * (num_bytes - 1 - i)));
}

}  // namespace

void Sha256::block(const std::byte* chunk) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i)
    w[i] = load_be32(chunk + 4 * i);
  for (std::size_t i = 16; i < 64; ++i) {
    const auto s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const auto s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < 64; ++i) {
    const auto s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const auto t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const auto s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const auto t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1;
    d = c, c = b, b = a, a = t1 + t2;
  }
  const std::array<std::uint32_t, 8> add = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i)
    state_[i] += add[i];
}

void Sha256::update(Bytes bytes) {
  num_bytes_ += bytes.size();
  while (!bytes.empty()) {
    const std::size_t n = std::min(pending_.size() - num_pending_, bytes.size());
    std::memcpy(pending_.data() + num_pending_, bytes.data(), n);
    num_pending_ += n;
    bytes = bytes.subspan(n);
    if (num_pending_ < pending_.size()) return;
    block(pending_.data());
    num_pending_ = 0;
  }
}

Digest256 Sha256::finish() {
  const std::uint64_t num_bits = num_bytes_ * 8;
  constexpr std::byte kEnd[1] = {std::byte{0x80}};
  constexpr std::byte kZero[1] = {};
  update(kEnd);
  while (num_pending_ != 56)
    update(kZero);
  std::byte length[8];
  store_be(length, num_bits, 8);
  update(length);
  Digest256 out;
  for (std::size_t i = 0; i < 8; ++i)
    store_be(out.data() + 4 * i, state_[i], 4);
  return out;
}

Digest256 sha256(Bytes bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish();
}

HmacSha256::HmacSha256(Bytes key) {
  std::array<std::byte, 64> block = {};
  if (key.size() > block.size()) {
    const Digest256 short_key = sha256(key);
    std::memcpy(block.data(), short_key.data(), short_key.size());
  } else if (!key.empty()) {
    std::memcpy(block.data(), key.data(), key.size());
  }
  for (std::byte& b : block)
    b ^= std::byte{0x36};
  inner_.update(block);
  for (std::byte& b : block)
    b ^= std::byte{0x36 ^ 0x5c};
  outer_.update(block);
}

Digest256 HmacSha256::finish() {
  const Digest256 inner = inner_.finish();
  outer_.update(inner);
  return outer_.finish();
}

Digest256 hmac_sha256(Bytes key, Bytes bytes) {
  HmacSha256 mac(key);
  mac.update(bytes);
  return mac.finish();
}

bool equal_constant_time(const Digest256& a, const Digest256& b) {
  // volatile: the compiler must not turn this back into a loop that stops early.
  volatile unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference =
        static_cast<unsigned char>(difference | std::to_integer<unsigned char>(a[i] ^ b[i]));
  return difference == 0;
}

}  // namespace crossdock::wire
