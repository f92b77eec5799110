// What a group does once it exists. How it comes to be is in group_builder.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/group.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "base/check.hpp"
#include "symm/group_builder.hpp"

namespace crossdock::symm {

Result<std::unique_ptr<Group>> Group::create(const GroupOptions& options,
                                             const device::SymmetricLayout& layout,
                                             const cuda::Driver* driver) {
  return GroupBuilder(options, layout, driver).build();
}

Result<> Group::reform(Deadline deadline) {
  if (!meeting_)
    return invalid_argument(
        "reform() of a group that is not elastic: create it with GroupOptions::place");
  auto done = GroupBuilder(*this, deadline).reform();
  broken_ = done.ok() ? nullptr : "a reform of this group failed: reform() it again, or destroy it";
  return done;
}

Result<std::vector<u32>> Group::waiting_ranks(Deadline deadline) const {
  if (!meeting_) return std::vector<u32>();
  CROSSDOCK_TRY(ranks, meeting_->waiting(generation_, deadline));
  return std::vector<u32>(ranks.begin(), ranks.end());
}

Group::~Group() = default;

Rank& Group::rank(u32 r) const {
  const auto found = std::lower_bound(local_.begin(), local_.end(), r);
  CROSSDOCK_CHECK(found != local_.end() && *found == r, "rank() of a rank of another process");
  return *ranks_[static_cast<std::size_t>(found - local_.begin())];
}

Result<> Group::check_seats() const {
  for (const u32 rank : local_) {
    const Heap::Seat seat = heap_->seat(rank);
    if (seat == Heap::Seat::kHeld) continue;
    const char* const help = seat == Heap::Seat::kTaken ? "another has its seat: destroy this group"
                                                        : "reform() it, or destroy it";
    return make_error(Code::kClosed, fmt::format("the others have gone on without rank {}, which "
                                                 "came later than `settle` to their reform(): {}",
                                                 rank, help));
  }
  return {};
}

Result<> Group::check() const {
  CROSSDOCK_CHECK_OK(check_seats());
  if (broken_ != nullptr) return make_error(Code::kClosed, broken_);
  for (const auto& rank : ranks_)
    CROSSDOCK_CHECK_OK(rank->check());
  return {};
}

Result<> Group::clear(u32& current, Deadline deadline) {
  for (std::size_t i = 0; i < local_.size(); ++i) {
    current = local_[i];
    CROSSDOCK_CHECK_OK(heap_->clear(current, ranks_[i]->device(), deadline));
    CROSSDOCK_CHECK_OK(ranks_[i]->clear(deadline));
  }
  return {};
}

// Nobody clears before all are here, since until then a peer may still write into a window; and
// nobody goes on before all have cleared.
Result<> Group::reset_together(Deadline deadline) {
  CROSSDOCK_CHECK_OK(steps_->conclude({}, local_.front(), "begin a reset", {}, deadline));
  u32 rank = local_.front();
  const Result<> cleared = clear(rank, deadline);
  CROSSDOCK_CHECK_OK(steps_->conclude(cleared, rank, "end a reset", {}, deadline));
  return {};
}

Result<> Group::reset(Deadline deadline) {
  if (broken_ != nullptr) return check();
  return keep_or_break(reset_together(deadline),
                       "a reset of this group failed: destroy it, create another",
                       "a reset of this group failed: reform() it, or destroy it");
}

Result<> Group::conclude(const Result<>& mine, u32 rank, const char* what, Deadline deadline) {
  if (broken_ != nullptr) return check();
  const auto outcomes = steps_->conclude(mine, rank, what, {}, deadline);
  return keep_or_break(outcomes.ok() ? Result<>() : outcomes.error(),
                       "a process of this group failed: destroy it, create another",
                       "a process of this group failed: reform() it, or destroy it");
}

// `why` the group is of no more use if it is `done` with an error.
Result<> Group::keep_or_break(Result<> done, const char* why, const char* why_elastic) {
  if (!done.ok()) broken_ = meeting_ ? why_elastic : why;
  return done;
}

}  // namespace crossdock::symm
