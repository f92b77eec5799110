// Steps: how the processes of a group go on together. They first give each other their proposals,
// then do step after step and tell each other the outcome, so that all of them go on or none:
//
//   process 0            exchange            process 1
//   proposal  ----------> all <------------  proposal       all judge alike: agree() or the error
//   allocate                                 allocate (out of memory)
//   outcome ok ---------> all <------------  outcome: rank 1 failed, why
//   error naming rank 1                      its own error            each frees what it has
//
// Without an exchange there is one process, which agrees with itself. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>
#include <crossdock/symm/exchange.hpp>

#include "symm/agreement.hpp"

namespace crossdock::symm {

class Steps {
 public:
  // `ranks` of each member, where they are known beforehand: names for those that do not propose.
  explicit Steps(std::shared_ptr<Exchange> exchange,
                 std::vector<std::vector<std::uint32_t>> ranks = {});

  [[nodiscard]] std::uint32_t member() const { return membership_.member; }
  [[nodiscard]] std::uint32_t members() const { return membership_.members; }
  // After propose().
  [[nodiscard]] const Agreement& agreement() const { return agreement_; }

  Result<> propose(const message::Proposal& proposal, Deadline deadline);

  // What a step gives the next one.
  struct Yield {
    std::uint64_t allocated_bytes = 0;
    std::vector<message::SharedWindow> windows = {};
  };
  // Tells how this process's step went (`rank` is one of its ranks, for the error) and learns how
  // it went everywhere: the outcomes by member, or the error: this process's own if it has one
  // (and not merely lost a peer that can say why), else that of the first member that failed.
  // `what` names the step: "allocate its window".
  Result<std::vector<message::Outcome>> conclude(const Result<>& mine, std::uint32_t rank,
                                                 const char* what, const Yield& yield,
                                                 Deadline deadline);

 private:
  Result<std::vector<std::string>> all_gather(const std::string& bytes, const char* what,
                                              Deadline deadline);
  Result<message::Outcome> read_outcome(const std::string& part, std::uint32_t member,
                                        const message::Outcome& own) const;

  std::shared_ptr<Exchange> exchange_;
  Membership membership_;
  std::vector<std::vector<std::uint32_t>> ranks_;  // by member; none before they are known
  Agreement agreement_;
  std::uint32_t step_ = 0;
};

}  // namespace crossdock::symm
