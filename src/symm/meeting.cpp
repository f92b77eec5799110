// Seats, rosters and who closes a meeting. See meeting.hpp. SPDX-License-Identifier: Apache-2.0
#include "symm/meeting.hpp"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <set>

#include "symm/store_exchange.hpp"
#include "wire/auth.hpp"

namespace crossdock::symm {
namespace {

using namespace std::chrono_literals;
using message::Attendee;
using message::Roster;

// Between two looks at who has come.
constexpr auto kLook = 20ms;

std::size_t count_seats(const std::vector<Attendee>& present) {
  std::size_t seats = 0;
  for (const Attendee& a : present)
    seats += a.ranks.size();
  return seats;
}

std::string missing_seats(const std::vector<Attendee>& present, std::uint32_t world) {
  std::set<std::uint32_t> taken;
  for (const Attendee& a : present)
    for (const message::RosterRank& r : a.ranks)
      taken.insert(r.rank);
  std::string text;
  for (std::uint32_t r = 0; r < world; ++r)
    if (taken.count(r) == 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", r);
  return text;
}

Error elsewhere(const Error& error, const std::string& name) {
  Error out = error;
  out.scope = Scope::kPeer;
  out.message = fmt::format("the meeting of group '{}': {}", name, error.message);
  return out;
}

// Gives back a seat, so that nobody waits for this process.
void leave(rendezvous::Store& store, const std::string& seat, const Attendee& self) {
  const auto own = message::encode(self);
  const Deadline deadline = Deadline::in(1s);
  const auto entry = store.get(seat, deadline);
  if (own.ok() && entry.ok() && *entry && (*entry)->value == *own)
    (void)store.compare_and_remove(seat, (*entry)->revision, deadline);
}

Error nobody_came(const std::string& seats, std::uint32_t world, std::uint32_t fewest) {
  return Error{.code = Code::kDeadline,
               .scope = Scope::kPeer,
               .retry = Retry::kLater,
               .message = fmt::format("nobody took the seats of ranks {} of {} in time, and the "
                                      "group goes on with no fewer than {}",
                                      seats, world, fewest == 0 ? world : fewest)};
}

Error too_late(std::uint64_t generation, const std::string& name) {
  return Error{.code = Code::kClosed,
               .scope = Scope::kPeer,
               .retry = Retry::kAfterReconnect,
               .message = fmt::format(
                   "generation {} of group '{}' has been closed without this process: it came "
                   "later than `settle` after the others; join the next one",
                   generation, name)};
}

}  // namespace

Result<Meeting> Meeting::open(const MeetingPlace& place, std::uint32_t world,
                              const std::vector<std::uint32_t>& ranks, Deadline deadline) {
  if (place.name.empty() || place.name.size() > 256)
    return invalid_argument(fmt::format(
        "the name of an elastic group must have 1 to 256 bytes, not {}", place.name.size()));
  if (place.fewest > world)
    return invalid_argument(fmt::format("fewest = {} ranks of a world of {}: at most all of them",
                                        place.fewest, world));
  if (ranks.empty())
    return invalid_argument("an elastic group needs this process's ranks in GroupOptions::ranks");
  CROSSDOCK_TRY(store, rendezvous::open_store(place.store, deadline));
  CROSSDOCK_TRY(token, wire::random_id());
  Attendee self{.token = token};
  for (const std::uint32_t rank : ranks)
    self.ranks.push_back({rank});
  return Meeting(place, std::move(store), world, std::move(self));
}

std::string Meeting::key(std::uint64_t generation, const std::string& what) const {
  return fmt::format("{}/meet/{}/{}", place_.name, generation, what);
}

Result<std::uint64_t> Meeting::number_in(const rendezvous::Entry& entry) const {
  std::uint64_t generation = 0;
  const char* const end = entry.value.data() + entry.value.size();
  if (std::from_chars(entry.value.data(), end, generation).ptr == end) return generation;
  return make_error(Code::kCorrupt, fmt::format("the store says that the generation of '{}' is "
                                                "'{}', which is no number",
                                                place_.name, entry.value));
}

// The last generation that came about; 0: none.
Result<std::uint64_t> Meeting::newest(Deadline deadline) const {
  CROSSDOCK_TRY(entry, store_->get(place_.name + "/meet/current", deadline));
  if (!entry) return std::uint64_t{0};
  return number_in(*entry);
}

// Never a smaller number: who stood still may tell it late.
void Meeting::tell_newest(std::uint64_t generation, Deadline deadline) const {
  const std::string current = place_.name + "/meet/current";
  for (;;) {
    const auto entry = store_->get(current, deadline);
    if (!entry.ok()) return;
    if (*entry) {
      const auto known = number_in(**entry);
      if (known.ok() && *known >= generation) return;
    }
    const auto told = store_->compare_and_put(current, *entry ? (*entry)->revision : 0,
                                              std::to_string(generation), deadline);
    if (!told.ok() || *told) return;
  }
}

Result<std::optional<Roster>> Meeting::read_roster(std::uint64_t generation,
                                                   Deadline deadline) const {
  CROSSDOCK_TRY(entry, store_->get(key(generation, "roster"), deadline));
  if (!entry) return std::optional<Roster>();
  CROSSDOCK_TRY(roster, message::decode_roster(entry->value));
  return std::optional<Roster>(std::move(roster));
}

// False: the meeting was closed meanwhile.
Result<bool> Meeting::take_seats(std::uint64_t generation, Deadline deadline) const {
  CROSSDOCK_TRY(bytes, message::encode(self_));
  for (const message::RosterRank& r : self_.ranks) {
    const std::string seat = key(generation, fmt::format("seat/{}", r.rank));
    CROSSDOCK_TRY(taken, store_->compare_and_put(seat, 0, bytes, deadline));
    if (taken) continue;
    CROSSDOCK_TRY(roster, read_roster(generation, deadline));
    if (roster) return false;
    CROSSDOCK_TRY(entry, store_->get(seat, deadline));
    if (entry && entry->value == bytes) continue;  // this process, before
    return invalid_argument(
        fmt::format("the seat of rank {} in generation {} of group '{}' has been taken by another "
                    "process: each rank is one process's",
                    r.rank, generation, place_.name));
  }
  return true;
}

Result<std::vector<Attendee>> Meeting::attendees(std::uint64_t generation,
                                                 Deadline deadline) const {
  CROSSDOCK_TRY(keys, store_->list(key(generation, "seat/"), deadline));
  std::vector<Attendee> present;
  std::set<std::uint64_t> known;
  for (const std::string& seat : keys) {
    CROSSDOCK_TRY(entry, store_->get(seat, deadline));
    if (!entry) continue;
    CROSSDOCK_TRY(attendee, message::decode_attendee(entry->value));
    if (known.insert(attendee.token).second) present.push_back(std::move(attendee));
  }
  std::sort(present.begin(), present.end(), [](const Attendee& a, const Attendee& b) {
    return a.ranks.front().rank < b.ranks.front().rank;
  });
  return present;
}

Result<> Meeting::close(std::uint64_t generation, std::vector<Attendee> present,
                        Deadline deadline) const {
  const Roster roster{.generation = generation, .world = world_, .attendees = std::move(present)};
  CROSSDOCK_TRY(bytes, message::encode(roster));
  CROSSDOCK_TRY(first, store_->compare_and_put(key(generation, "roster"), 0, bytes, deadline));
  (void)first;  // whoever was, its roster is the one
  return {};
}

Result<std::optional<Roster>> Meeting::wait_for_roster(std::uint64_t generation,
                                                       Deadline deadline) const {
  std::vector<Attendee> present;
  Deadline settled = Deadline::in(place_.settle);
  for (;;) {
    CROSSDOCK_TRY(closed, read_roster(generation, deadline));
    if (closed) return closed;
    // Its roster, if there ever was one, has left the store (conclude).
    CROSSDOCK_TRY(last, newest(deadline));
    if (last > generation + 1) return std::optional<Roster>();
    CROSSDOCK_TRY(now, attendees(generation, deadline));
    const std::size_t seats = count_seats(now);
    if (seats != count_seats(present)) settled = Deadline::in(place_.settle);
    present = std::move(now);
    const bool enough = place_.fewest > 0 && seats >= place_.fewest && settled.passed();
    if (seats == world_ || enough) {
      CROSSDOCK_CHECK_OK(close(generation, present, deadline));
      continue;
    }
    // Until the roster is there or it is time to look again; at the end, in time to say who is
    // missing.
    const Deadline look = earlier(deadline, Deadline::in(kLook));
    const auto next = store_->wait(key(generation, "roster"), look);
    if (!next.ok() && next.code() != Code::kDeadline) return next.error();
    if (!next.ok() && deadline.remaining() < 2 * kLook)
      return nobody_came(missing_seats(present, world_), world_, place_.fewest);
  }
}

void Meeting::leave_seats(std::uint64_t generation) const {
  for (const message::RosterRank& r : self_.ranks)
    leave(*store_, key(generation, fmt::format("seat/{}", r.rank)), self_);
}

Result<Roster> Meeting::attend(std::uint64_t first, Deadline deadline) {
  for (std::uint64_t generation = first;; ++generation) {
    const auto last = newest(deadline);
    if (!last.ok()) return elsewhere(last.error(), place_.name);
    generation = std::max(generation, *last + 1);
    auto closed = read_roster(generation, deadline);
    if (!closed.ok()) return elsewhere(closed.error(), place_.name);
    if (*closed) continue;
    auto taken = take_seats(generation, deadline);
    if (taken.ok() && !*taken) continue;
    auto waited = taken.ok() ? wait_for_roster(generation, deadline)
                             : Result<std::optional<Roster>>(taken.error());
    if (!waited.ok() || !*waited) leave_seats(generation);
    if (!waited.ok()) return elsewhere(waited.error(), place_.name);
    if (!*waited) continue;
    Roster roster = **std::move(waited);
    if (roster.world != world_)
      return Error{
          .code = Code::kIncompatible,
          .scope = Scope::kPeer,
          .message = fmt::format("rank {} says the world of group '{}' has {} ranks, the "
                                 "process that closed its meeting says {}",
                                 self_.ranks.front().rank, place_.name, world_, roster.world)};
    for (const Attendee& a : roster.attendees)
      if (a.token == self_.token) return roster;
    return too_late(generation, place_.name);
  }
}

Result<std::shared_ptr<Exchange>> Meeting::exchange(const Roster& roster) const {
  Membership membership{.members = static_cast<std::uint32_t>(roster.attendees.size())};
  while (roster.attendees[membership.member].token != self_.token)
    ++membership.member;
  return make_store_exchange(store_, fmt::format("{}/steps/{}", place_.name, roster.generation),
                             membership);
}

void Meeting::conclude(const Roster& roster, Deadline deadline) const {
  if (roster.attendees.front().token != self_.token) return;
  tell_newest(roster.generation, deadline);
  // Nobody begins with a generation up to this one any more.
  const auto keys = store_->list(place_.name + "/", deadline);
  if (!keys.ok()) return;
  for (const std::string& old : *keys)
    for (const char* kind : {"/meet/", "/steps/"}) {
      const std::string prefix = place_.name + kind;
      if (!old.starts_with(prefix)) continue;
      std::uint64_t of = roster.generation;
      std::from_chars(old.data() + prefix.size(), old.data() + old.size(), of);
      if (of + 1 < roster.generation) (void)store_->remove(old, deadline);
    }
}

Result<std::vector<std::uint32_t>> Meeting::waiting(std::uint64_t generation,
                                                    Deadline deadline) const {
  CROSSDOCK_TRY(present, attendees(generation + 1, deadline));
  std::vector<std::uint32_t> ranks;
  for (const Attendee& a : present)
    for (const message::RosterRank& r : a.ranks)
      if (a.token != self_.token) ranks.push_back(r.rank);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace crossdock::symm
