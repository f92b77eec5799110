// Proofs of the pre-shared key. See the header for the construction.
// SPDX-License-Identifier: Apache-2.0
#include "wire/auth.hpp"

#include <cerrno>
#include <sys/random.h>

#include "wire/hmac.hpp"

namespace crossdock::wire {
namespace {

// Keeps these MACs apart from any other use of the same key.
constexpr std::string_view kLabel = "crossdock control 1";

Result<> fill_random(std::span<std::byte> out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = ::getrandom(out.data() + done, out.size() - done, 0);
    if (n > 0) done += static_cast<std::size_t>(n);
    if (n < 0 && errno != EINTR) return errno_error(errno, "draw random bytes");
  }
  return {};
}

}  // namespace

Result<AuthProof> prove(Bytes key, AuthRole role, const Hello& hello, const Challenge& challenge) {
  CROSSDOCK_TRY(encoded, encode(hello));
  const Digest256 hello_digest = sha256(encoded);
  std::byte numbers[17];
  numbers[0] = static_cast<std::byte>(role);
  store_le(numbers + 1, hello.instance_id);
  store_le(numbers + 9, challenge.instance_id);
  HmacSha256 mac(key);
  mac.update(as_bytes(kLabel));
  mac.update(hello.nonce);
  mac.update(challenge.nonce);
  mac.update(numbers);
  mac.update(hello_digest);
  return AuthProof{mac.finish()};
}

Result<> verify(Bytes key, AuthRole role, const Hello& hello, const Challenge& challenge,
                const AuthProof& proof) {
  CROSSDOCK_TRY(wanted, prove(key, role, hello, challenge));
  if (!equal_constant_time(wanted.mac, proof.mac))
    return Error{.code = Code::kDenied,
                 .scope = Scope::kPeer,
                 .message = "authentication failed: both engines must be given the same key"};
  return {};
}

Result<Nonce> random_nonce() {
  Nonce nonce;
  CROSSDOCK_CHECK_OK(fill_random(nonce));
  return nonce;
}

Result<std::uint64_t> random_id() {
  std::uint64_t id = 0;
  while (id == 0) {
    std::byte raw[8];
    CROSSDOCK_CHECK_OK(fill_random(raw));
    id = load_le<std::uint64_t>(raw);
  }
  return id;
}

}  // namespace crossdock::wire
