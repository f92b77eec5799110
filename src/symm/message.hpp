// What the processes of a group tell each other while it is made, and its codec: the only place of
// this layer that parses bytes from elsewhere. Little endian, every length checked before use.
//
//   Proposal   once, first: what each process asks for; agreement.hpp compares them
//   Outcome    after each step: how it went, and what others need for the next one
//   Windows    over a local socket, beside the descriptors of the sender's windows
//   Attendee   elastic groups: who has taken a seat; meeting.hpp
//   Roster     elastic groups: who makes a generation of the group
//
// Pure functions, any thread. Fuzzed by tests/fuzz/symm_messages.cpp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <crossdock/core/result.hpp>

#include "wire/codec.hpp"

namespace crossdock::symm::message {

inline constexpr std::uint16_t kProtocol = 3;
// Limits of one message.
inline constexpr std::uint32_t kMostRanks = 1024;
inline constexpr std::uint32_t kMostAreas = 64;
inline constexpr std::uint32_t kLongestText = 1024;
inline constexpr std::uint32_t kFabricBytes = 64;

// Why a process cannot go on. `rank` is one of its ranks.
struct Failure {
  std::uint16_t code = 0;  // of crossdock::Code
  std::uint32_t rank = 0;
  std::string text = {};
};

struct ProposedRank {
  static constexpr std::size_t kMinEncodedBytes = 16;
  std::uint32_t rank = 0;
  std::string device = {};  // UUID; empty on the CPU
  std::string model = {};   // "NVIDIA H200"
  std::uint32_t sm = 0;     // 90: its architecture
};

struct Area {
  static constexpr std::size_t kMinEncodedBytes = 20;
  std::string name = {};
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

struct Proposal {
  // These three are read whatever the protocol is.
  std::uint16_t protocol = kProtocol;
  std::string library = {};
  std::uint32_t first_rank = 0;

  std::uint32_t world = 0;
  std::uint8_t backend = 0;
  std::uint64_t window_bytes = 0;
  std::vector<Area> areas = {};
  std::vector<ProposedRank> ranks = {};
  std::string host = {};         // equal on processes that can pass descriptors to each other
  std::string socket = {};       // abstract name on which this process takes descriptors
  std::uint8_t fabric = 0;       // 1: all its GPUs have fabric handles
  std::uint8_t share_gpus = 0;   // 1: ranks may be on one GPU (symm.share_gpus)
  std::uint8_t elastic = 0;      // 1: seats may be vacant, and windows be kept from before
  std::uint64_t generation = 0;  // of an elastic group
  std::uint64_t token = 0;       // names the windows of the process
  std::optional<Failure> failure = {};
};

struct SharedWindow {
  static constexpr std::size_t kMinEncodedBytes = 8;
  std::uint32_t rank = 0;
  std::string fabric = {};  // the bytes of a fabric handle, or nothing
};

struct Outcome {
  std::uint64_t agreement = 0;  // digest of all proposals: which group this is about
  std::uint32_t step = 0;       // counts from 0 within the group
  std::uint64_t allocated_bytes = 0;
  std::vector<SharedWindow> windows = {};
  std::optional<Failure> failure = {};
};

struct Windows {
  std::uint64_t agreement = 0;
  std::uint32_t member = 0;
  std::vector<std::uint32_t> ranks = {};  // one descriptor each, in this order
};

struct RosterRank {
  static constexpr std::size_t kMinEncodedBytes = 4;
  std::uint32_t rank = 0;
};

// A process at a meeting, which its token names; at least one rank.
struct Attendee {
  static constexpr std::size_t kMinEncodedBytes = 12;
  std::uint64_t token = 0;
  std::vector<RosterRank> ranks = {};
};

// Who is there, by their first ranks; at least one.
struct Roster {
  std::uint64_t generation = 0;
  std::uint32_t world = 0;
  std::vector<Attendee> attendees = {};
};

// Texts longer than kLongestText are cut.
Result<std::string> encode(const Proposal& proposal);
Result<std::string> encode(const Outcome& outcome);
Result<std::string> encode(const Windows& windows);
Result<std::string> encode(const Attendee& attendee);
Result<std::string> encode(const Roster& roster);
// Of a proposal with another protocol only the first three fields are filled.
Result<Proposal> decode_proposal(std::string_view bytes);
Result<Outcome> decode_outcome(std::string_view bytes);
Result<Windows> decode_windows(std::string_view bytes);
Result<Attendee> decode_attendee(std::string_view bytes);
Result<Roster> decode_roster(std::string_view bytes);

}  // namespace crossdock::symm::message
