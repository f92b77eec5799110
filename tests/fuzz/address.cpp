// Addresses as text: what parses must survive formatting and parsing again.
// SPDX-License-Identifier: Apache-2.0
#include "base/address.hpp"

#include "fuzz.hpp"

namespace crossdock::fuzz {
namespace {

void run(wire::Bytes input) {
  const auto parsed = base::parse_host_port(wire::as_text(input), 7000);
  if (!parsed.ok()) return;
  const auto again = base::parse_host_port(base::to_string(*parsed));
  CROSSDOCK_FUZZ_REQUIRE(again.ok());
  CROSSDOCK_FUZZ_REQUIRE(*again == *parsed);
}

Seeds seeds() {
  return {"10.0.0.1:7000", "node7:7000",       "[2001:db8::1]:7000",     "node7",     "::1",
          "[::1]",         "[fe80::1%eth0]:1", "[::ffff:1.2.3.4]:65535", "::1%e[0]:1"};
}

CROSSDOCK_FUZZ_TARGET("address", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
