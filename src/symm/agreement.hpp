// Agreement: do all processes of a group ask for the same thing? Every process gives every other
// its proposal and judges all of them by the same rules in the same order, so that all come to the
// same verdict: an error that names both ranks and both values, or where each rank is and how
// windows travel. Pure functions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <crossdock/core/result.hpp>

#include "symm/message.hpp"

namespace crossdock::symm {

// How processes give each other their windows.
enum class Sharing : std::uint8_t {
  kNone,        // there is one process
  kDescriptor,  // by file descriptor: all on one host
  kFabric,      // by fabric handle: one NVLink domain across hosts
};

// The member of a rank that nobody is.
inline constexpr std::uint32_t kVacant = ~std::uint32_t{0};

// "rank 3", or "ranks 2, 3".
std::string name_ranks(const std::vector<std::uint32_t>& ranks);

struct Agreement {
  std::vector<message::Proposal> members;     // by member
  std::vector<std::uint32_t> member_of_rank;  // [world]; kVacant in elastic groups
  Sharing sharing = Sharing::kNone;
  std::uint64_t digest = 0;  // of all proposals: names this group

  // Of a member, as name_ranks().
  [[nodiscard]] std::string ranks_of(std::uint32_t member) const;
  // Names the window of a rank, as the process that has it does; 0: vacant.
  [[nodiscard]] std::uint64_t token_of(std::uint32_t rank) const;
};

// `parts` are the encoded proposals, by member. Errors: kIncompatible when members disagree,
// kInvalidArgument for a rank or a GPU that is given twice, the code of the failure when a member
// failed, kUnsupported when windows cannot travel.
Result<Agreement> agree(const std::vector<std::string>& parts);

// The error of a process that learns of another's failure.
Error failure_of_peer(const message::Failure& failure);
// `error` as others will be told of it.
message::Failure to_failure(const Error& error, std::uint32_t rank);

// Equal on processes that can pass descriptors to each other: the boot of the host and the network
// namespace, in which abstract socket names live.
std::string host_identity();

}  // namespace crossdock::symm
