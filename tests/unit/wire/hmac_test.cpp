// Vectors: FIPS 180-4 examples (SHA-256), RFC 4231 (HMAC-SHA256).
// SPDX-License-Identifier: Apache-2.0
#include "wire/hmac.hpp"

#include <gtest/gtest.h>

#include "wire/auth.hpp"

namespace crossdock::wire {
namespace {

std::string hex(const Digest256& digest) {
  std::string out;
  for (const std::byte b : digest) {
    constexpr char kDigits[] = "0123456789abcdef";
    out += kDigits[std::to_integer<int>(b) >> 4];
    out += kDigits[std::to_integer<int>(b) & 15];
  }
  return out;
}

std::string mac_of(const std::string& key, const std::string& data) {
  return hex(hmac_sha256(as_bytes(key), as_bytes(data)));
}

TEST(Sha256, MatchesThePublishedVectors) {
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(as_bytes("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(as_bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(as_bytes(std::string(1'000'000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesGiveTheSameDigest) {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text += static_cast<char>(i);
  for (std::size_t cut = 0; cut <= text.size(); cut += 7) {
    Sha256 hash;
    hash.update(as_bytes(std::string_view(text).substr(0, cut)));
    hash.update(as_bytes(std::string_view(text).substr(cut)));
    ASSERT_EQ(hex(hash.finish()), hex(sha256(as_bytes(text)))) << cut;
  }
}

TEST(HmacSha256, MatchesTheVectorsOfRfc4231) {
  EXPECT_EQ(mac_of(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(mac_of("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(mac_of(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char c = 1; c <= 25; ++c)
    counting += c;
  EXPECT_EQ(mac_of(counting, std::string(50, '\xcd')),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(
      mac_of(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(mac_of(std::string(131, '\xaa'),
                   "This is a test using a larger than block-size key and a larger than "
                   "block-size data. The key needs to be hashed before being used by the HMAC "
                   "algorithm."),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(HmacSha256, ComparesEveryByte) {
  Digest256 a = sha256({});
  EXPECT_TRUE(equal_constant_time(a, a));
  for (std::size_t i = 0; i < a.size(); ++i) {
    Digest256 b = a;
    b[i] ^= std::byte{1};
    EXPECT_FALSE(equal_constant_time(a, b));
  }
}

TEST(Auth, OnlyTheRightKeyRoleAndExchangeVerify) {
  const Hello hello{.engine_name = "a", .instance_id = 1, .nonce = random_nonce().value()};
  const Challenge challenge{.nonce = random_nonce().value(), .instance_id = 2};
  const Bytes key = as_bytes("secret");
  const auto proof = prove(key, AuthRole::kClient, hello, challenge).value();
  EXPECT_TRUE(verify(key, AuthRole::kClient, hello, challenge, proof).ok());

  EXPECT_EQ(verify(as_bytes("other"), AuthRole::kClient, hello, challenge, proof).code(),
            Code::kDenied);
  EXPECT_EQ(verify(key, AuthRole::kServer, hello, challenge, proof).code(), Code::kDenied)
      << "a proof sent back must not pass";
  Hello data_lane = hello;
  data_lane.purpose = Purpose::kData;
  EXPECT_EQ(verify(key, AuthRole::kClient, data_lane, challenge, proof).code(), Code::kDenied);
  Challenge later = challenge;
  later.nonce = random_nonce().value();
  EXPECT_EQ(verify(key, AuthRole::kClient, hello, later, proof).code(), Code::kDenied)
      << "a replayed proof must not pass";
  Challenge restarted = challenge;
  restarted.instance_id = 3;
  EXPECT_EQ(verify(key, AuthRole::kClient, hello, restarted, proof).code(), Code::kDenied);
}

TEST(Auth, RandomNumbersDiffer) {
  EXPECT_NE(random_nonce().value(), random_nonce().value());
  EXPECT_NE(random_id().value(), random_id().value());
}

}  // namespace
}  // namespace crossdock::wire
