// All-gathers of proposals and outcomes. See steps.hpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/steps.hpp"

#include <fmt/format.h>
#include <utility>

namespace crossdock::symm {
namespace {

// Where the members' numbers are not those of their ranks, a message that names members needs both.
std::string who_is_who(const std::vector<std::vector<std::uint32_t>>& ranks) {
  constexpr std::size_t kMost = 32;
  std::string text;
  bool same = true;
  for (std::uint32_t m = 0; m < ranks.size() && m < kMost; ++m) {
    same = same && ranks[m] == std::vector<std::uint32_t>{m};
    text += fmt::format("{}process {} has {}", m == 0 ? " (" : "; ", m, name_ranks(ranks[m]));
  }
  return same ? std::string() : text + ")";
}

// A process's own error, except when all it saw is that a peer went away and the peer says why.
Result<> judge(const Result<>& mine, const std::vector<message::Outcome>& outcomes) {
  if (!mine.ok() && mine.code() != Code::kPeerLost) return mine;
  constexpr auto kLost = static_cast<std::uint16_t>(Code::kPeerLost);
  for (const message::Outcome& outcome : outcomes)
    if (outcome.failure && outcome.failure->code != kLost) return failure_of_peer(*outcome.failure);
  if (!mine.ok()) return mine;
  for (const message::Outcome& outcome : outcomes)
    if (outcome.failure) return failure_of_peer(*outcome.failure);
  return {};
}

}  // namespace

Steps::Steps(std::shared_ptr<Exchange> exchange, std::vector<std::vector<std::uint32_t>> ranks)
    : exchange_(std::move(exchange)), ranks_(std::move(ranks)) {
  if (exchange_) membership_ = exchange_->membership();
}

Result<std::vector<std::string>> Steps::all_gather(const std::string& bytes, const char* what,
                                                   Deadline deadline) {
  if (!exchange_) return std::vector<std::string>{bytes};
  auto parts = exchange_->all_gather(bytes, deadline);
  if (!parts.ok()) {
    Error error = std::move(parts).error();
    error.scope = Scope::kPeer;
    error.message = fmt::format(
        "the {} processes of a symmetric group could not tell each other "
        "that they can {} ({}): {}{}",
        membership_.members, what, exchange_->describe(), error.message, who_is_who(ranks_));
    return error;
  }
  if (parts->size() != membership_.members)
    return make_error(Code::kInternal,
                      fmt::format("{} returned {} parts for {} processes", exchange_->describe(),
                                  parts->size(), membership_.members));
  return parts;
}

Result<> Steps::propose(const message::Proposal& proposal, Deadline deadline) {
  CROSSDOCK_TRY(bytes, message::encode(proposal));
  CROSSDOCK_TRY(parts, all_gather(bytes, "begin", deadline));
  CROSSDOCK_TRY(agreement, agree(parts));
  agreement_ = std::move(agreement);
  ranks_.clear();
  for (const message::Proposal& member : agreement_.members) {
    auto& ranks = ranks_.emplace_back();
    for (const message::ProposedRank& r : member.ranks)
      ranks.push_back(r.rank);
  }
  return {};
}

Result<std::vector<message::Outcome>> Steps::conclude(const Result<>& mine, std::uint32_t rank,
                                                      const char* what, const Yield& yield,
                                                      Deadline deadline) {
  message::Outcome own{.agreement = agreement_.digest,
                       .step = step_++,
                       .allocated_bytes = yield.allocated_bytes,
                       .windows = yield.windows};
  if (!mine.ok()) own.failure = to_failure(mine.error(), rank);
  CROSSDOCK_TRY(bytes, message::encode(own));
  // Who lost a peer need not wait for it here; a moment is left for the others to say why.
  if (mine.code() == Code::kPeerLost)
    deadline = earlier(deadline, Deadline::in(std::chrono::seconds(2)));
  auto parts = all_gather(bytes, what, deadline);
  if (!parts.ok()) return mine.ok() ? std::move(parts).error() : mine.error();
  std::vector<message::Outcome> outcomes;
  for (std::uint32_t member = 0; member < parts->size(); ++member) {
    CROSSDOCK_TRY(outcome, read_outcome((*parts)[member], member, own));
    outcomes.push_back(std::move(outcome));
  }
  if (const Result<> verdict = judge(mine, outcomes); !verdict.ok()) return verdict.error();
  return outcomes;
}

Result<message::Outcome> Steps::read_outcome(const std::string& part, std::uint32_t member,
                                             const message::Outcome& own) const {
  CROSSDOCK_TRY(outcome, message::decode_outcome(part));
  if (outcome.agreement == own.agreement && outcome.step == own.step) return outcome;
  return make_error(
      Code::kIncompatible,
      fmt::format("the process of {} is at step {} of group {:x}, this one at step {} of {:x}: two "
                  "groups share one name or exchange",
                  agreement_.ranks_of(member), outcome.step, outcome.agreement, own.step,
                  own.agreement));
}

}  // namespace crossdock::symm
