// Any bytes as a message of processes that make a symmetric group: decoding ends in a message or an
// error, what is accepted survives a round trip, and the judgement of any proposals ends too.
// SPDX-License-Identifier: Apache-2.0
#include "fuzz.hpp"
#include "symm/agreement.hpp"

namespace crossdock::fuzz {
namespace {

namespace message = symm::message;

void run(wire::Bytes input) {
  const auto text = std::string(wire::as_text(input));
  if (const auto proposal = message::decode_proposal(text);
      proposal.ok() && proposal->protocol == message::kProtocol) {
    const auto bytes = message::encode(*proposal);
    CROSSDOCK_FUZZ_REQUIRE(bytes.ok() && *bytes == text);
  }
  if (const auto outcome = message::decode_outcome(text); outcome.ok()) {
    const auto bytes = message::encode(*outcome);
    CROSSDOCK_FUZZ_REQUIRE(bytes.ok() && *bytes == text);
  }
  if (const auto windows = message::decode_windows(text); windows.ok()) {
    const auto bytes = message::encode(*windows);
    CROSSDOCK_FUZZ_REQUIRE(bytes.ok() && *bytes == text);
  }
  if (const auto attendee = message::decode_attendee(text); attendee.ok()) {
    const auto bytes = message::encode(*attendee);
    CROSSDOCK_FUZZ_REQUIRE(bytes.ok() && *bytes == text && !attendee->ranks.empty());
  }
  if (const auto roster = message::decode_roster(text); roster.ok()) {
    const auto bytes = message::encode(*roster);
    CROSSDOCK_FUZZ_REQUIRE(bytes.ok() && *bytes == text && !roster->attendees.empty());
  }
  (void)symm::agree({text});
  (void)symm::agree({text, text});
}

Seeds seeds() {
  message::Proposal proposal{.library = "0.1.0", .world = 2, .window_bytes = 4096, .host = "h"};
  proposal.areas = {{"data", 0, 4096}};
  proposal.ranks = {{0, "GPU-a", "NVIDIA H200", 90}, {1, "GPU-b", "NVIDIA H200", 90}};
  message::Proposal failed = proposal;
  failed.failure = message::Failure{9, 1, "no memory"};
  message::Outcome outcome{.agreement = 7, .step = 1, .allocated_bytes = 1 << 21};
  outcome.windows = {{0, std::string(64, 'f')}};
  message::Proposal elastic = proposal;
  elastic.elastic = 1;
  elastic.generation = 3;
  elastic.token = 77;
  const message::Attendee attendee{.token = 77, .ranks = {{0}, {1}}};
  const message::Roster roster{.generation = 3, .world = 4, .attendees = {attendee}};
  return {message::encode(proposal).value(),
          message::encode(failed).value(),
          message::encode(elastic).value(),
          message::encode(outcome).value(),
          message::encode(message::Windows{7, 1, {2, 3}}).value(),
          message::encode(attendee).value(),
          message::encode(roster).value()};
}

CROSSDOCK_FUZZ_TARGET("symm_messages", run, seeds);

}  // namespace
}  // namespace crossdock::fuzz
