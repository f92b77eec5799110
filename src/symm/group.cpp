// What a group does once it exists. How it comes to be is in group_builder.cpp.
// SPDX-License-Identifier: Apache-2.0
#include "symm/group.hpp"

#include <algorithm>

#include "base/check.hpp"
#include "symm/group_builder.hpp"

namespace crossdock::symm {

Result<std::unique_ptr<Group>> Group::create(const GroupOptions& options,
                                             const device::SymmetricLayout& layout,
                                             const cuda::Driver* driver) {
  return GroupBuilder(options, layout, driver).build();
}

Group::~Group() = default;

Rank& Group::rank(u32 r) const {
  const auto found = std::lower_bound(local_.begin(), local_.end(), r);
  CROSSDOCK_CHECK(found != local_.end() && *found == r, "rank() of a rank of another process");
  return *ranks_[static_cast<std::size_t>(found - local_.begin())];
}

Result<> Group::check() const {
  if (broken_)
    return make_error(Code::kClosed, "a reset of this group failed: destroy it, create another");
  for (const auto& rank : ranks_)
    CROSSDOCK_CHECK_OK(rank->check());
  return {};
}

Result<> Group::clear(Deadline deadline) {
  for (std::size_t i = 0; i < local_.size(); ++i) {
    CROSSDOCK_CHECK_OK(heap_->clear(local_[i], ranks_[i]->device(), deadline));
    CROSSDOCK_CHECK_OK(ranks_[i]->clear(deadline));
  }
  return {};
}

// Nobody clears before all are here, since until then a peer may still write into a window; and
// nobody goes on before all have cleared.
Result<> Group::reset_together(Deadline deadline) {
  CROSSDOCK_CHECK_OK(steps_->conclude({}, local_.front(), "begin a reset", {}, deadline));
  const Result<> cleared = clear(deadline);
  CROSSDOCK_CHECK_OK(steps_->conclude(cleared, local_.front(), "end a reset", {}, deadline));
  return {};
}

Result<> Group::reset(Deadline deadline) {
  if (broken_) return check();
  auto done = reset_together(deadline);
  broken_ = !done.ok();
  return done;
}

}  // namespace crossdock::symm
