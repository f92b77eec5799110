// Meeting: how the processes of an elastic group find out who is there. Each generation of a group
// has a meeting in the store:
//
//   every process that is there or wants to be      store
//     the first generation that is not closed  <--    name/meet/N/roster, none
//     takes its seats, each by one of them     -->    name/meet/N/seat/R = Attendee
//     all seats are taken, or enough and nobody
//     has come for a while: closes it          -->    name/meet/N/roster, written once
//     reads it                                 <--    the same Roster for everybody
//     in it: goes on with the others by an exchange of their own; not in it: came too late
//
// The roster decides alone, so it does not matter who closes, or that two try. Nothing here waits
// longer than the deadline, whoever dies. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <crossdock/core/deadline.hpp>
#include <crossdock/symm/exchange.hpp>
#include <crossdock/symm/group_options.hpp>

#include "rendezvous/store.hpp"
#include "symm/message.hpp"

namespace crossdock::symm {

class Meeting {
 public:
  // `ranks`: of this process, ascending.
  static Result<Meeting> open(const MeetingPlace& place, std::uint32_t world,
                              const std::vector<std::uint32_t>& ranks, Deadline deadline);

  [[nodiscard]] std::uint64_t token() const { return self_.token; }

  // Meets in the first open generation from `first` on, and after the last that came about: what
  // was before that is over, and has left the store. Errors: kInvalidArgument when another process
  // has taken a seat of this one, kDeadline naming the seats that nobody took, kClosed when the
  // others have gone on without this process.
  Result<message::Roster> attend(std::uint64_t first, Deadline deadline);
  // The exchange of those on the roster.
  Result<std::shared_ptr<Exchange>> exchange(const message::Roster& roster) const;
  // The group of this roster has come about: newcomers begin after it, and what earlier ones have
  // left in the store goes.
  void conclude(const message::Roster& roster, Deadline deadline) const;
  // Seats that processes have taken for the generation after `generation`.
  Result<std::vector<std::uint32_t>> waiting(std::uint64_t generation, Deadline deadline) const;

 private:
  Meeting(MeetingPlace place, std::shared_ptr<rendezvous::Store> store, std::uint32_t world,
          message::Attendee self)
      : place_(std::move(place)), store_(std::move(store)), world_(world), self_(std::move(self)) {}
  [[nodiscard]] std::string key(std::uint64_t generation, const std::string& what) const;
  Result<std::uint64_t> newest(Deadline deadline) const;
  void tell_newest(std::uint64_t generation, Deadline deadline) const;
  [[nodiscard]] Result<std::uint64_t> number_in(const rendezvous::Entry& entry) const;
  void leave_seats(std::uint64_t generation) const;
  Result<bool> take_seats(std::uint64_t generation, Deadline deadline) const;
  Result<std::optional<message::Roster>> read_roster(std::uint64_t generation,
                                                     Deadline deadline) const;
  Result<std::vector<message::Attendee>> attendees(std::uint64_t generation,
                                                   Deadline deadline) const;
  Result<> close(std::uint64_t generation, std::vector<message::Attendee> present,
                 Deadline deadline) const;
  // Nothing: this meeting is over.
  Result<std::optional<message::Roster>> wait_for_roster(std::uint64_t generation,
                                                         Deadline deadline) const;

  MeetingPlace place_;
  std::shared_ptr<rendezvous::Store> store_;
  std::uint32_t world_;
  message::Attendee self_;
};

}  // namespace crossdock::symm
