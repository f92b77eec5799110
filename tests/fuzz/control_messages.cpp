// Every control message's decoder on raw payloads, without the frame checksum in the way. What
// decodes must encode to the same bytes again.
// SPDX-License-Identifier: Apache-2.0
#include "fuzz.hpp"
#include "support/wire_samples.hpp"

namespace crossdock::fuzz {
namespace {

using namespace wire;

void run(Bytes input) {
  if (input.empty()) return;
  const auto wanted = std::to_integer<std::uint16_t>(input[0]);
  const Bytes payload = input.subspan(1);
  test::for_each_sample([&]<class M>(const M&) {
    if (static_cast<std::uint16_t>(M::kType) != wanted) return;
    const auto message = decode<M>(payload);
    if (!message.ok()) return;
    const auto again = encode(*message);
    CROSSDOCK_FUZZ_REQUIRE(again.ok());
    CROSSDOCK_FUZZ_REQUIRE(as_text(*again) == as_text(payload));
  });
}

Seeds seeds() {
  Seeds out;
  test::for_each_sample([&]<class M>(const M& message) {
    out.push_back(static_cast<char>(M::kType) + text_of(encode(message).value()));
  });
  return out;
}

CROSSDOCK_FUZZ_TARGET("control_messages", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
