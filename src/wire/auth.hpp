// Mutual proof that both ends hold the pre-shared key, without sending it. Each end sends
//   HMAC-SHA256(key, label | role | client nonce | server nonce | client instance
//                    | server instance | SHA-256 of the encoded Hello)
// The role keeps an end from reflecting the other's proof, the nonces from replaying an old one,
// the Hello's digest from changing purpose, rail or token under way. Stateless.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <crossdock/core/result.hpp>

#include "wire/control.hpp"

namespace crossdock::wire {

enum class AuthRole : std::uint8_t { kClient = 1, kServer = 2 };

// The proof of `role` in the exchange that `hello` and `challenge` began.
[[nodiscard]] Result<AuthProof> prove(Bytes key, AuthRole role, const Hello& hello,
                                      const Challenge& challenge);

// Ok when `proof` is what `role` must send; kDenied otherwise, without telling more. Takes the same
// time for every wrong proof.
[[nodiscard]] Result<> verify(Bytes key, AuthRole role, const Hello& hello,
                              const Challenge& challenge, const AuthProof& proof);

// 16 bytes from the kernel's generator; an error when it has none.
[[nodiscard]] Result<Nonce> random_nonce();
// A random number that is never 0: instance ids, tokens.
[[nodiscard]] Result<std::uint64_t> random_id();

}  // namespace crossdock::wire
