// Any bytes as a KV control message: decode() must end in a message or an error, and what it
// accepts must survive a round trip unchanged.
// SPDX-License-Identifier: Apache-2.0
#include "fuzz.hpp"
#include "kv/message.hpp"

namespace crossdock::fuzz {
namespace {

namespace message = kv::message;

void run(wire::Bytes input) {
  const auto decoded = message::decode(wire::as_text(input));
  if (!decoded.ok()) return;
  const std::string bytes = message::encode(*decoded);
  const auto again = message::decode(bytes);
  CROSSDOCK_FUZZ_REQUIRE(again.ok());
  CROSSDOCK_FUZZ_REQUIRE(message::encode(*again) == bytes);
}

Seeds seeds() {
  message::Ticket ticket;
  ticket.request = 7;
  ticket.shape = kv::known_models().front();
  ticket.layout = {.num_pages = 64, .page_tokens = 16};
  ticket.total_pages = 3;
  ticket.pages = {1, 2, 63};
  return {message::encode(ticket),
          message::encode(message::Ready{7, 1, 0}),
          message::encode(message::Go{7, 1, 2, 3}),
          message::encode(message::Abort{7, 1, "gone"}),
          message::encode(message::Parts{7, 1, 0, {{0, 48, 0, 512}, {3, 1, 512, 4}}}),
          message::encode(message::Stopped{7, 1, 0, Code::kPeerLost, "lost"})};
}

CROSSDOCK_FUZZ_TARGET("kv_messages", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
