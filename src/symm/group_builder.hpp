// GroupBuilder: makes one Group, step by step, and concludes each step with the other processes
// (steps.hpp), so that all of them get a group or none. Used once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include <crossdock/core/deadline.hpp>

#include "symm/group.hpp"
#include "symm/steps.hpp"
#include "symm/window_passing.hpp"

namespace crossdock::symm {

class GroupBuilder {
 public:
  GroupBuilder(const GroupOptions& options, const device::SymmetricLayout& layout,
               const cuda::Driver* driver);
  Result<std::unique_ptr<Group>> build();
  // Of a group that exists, for reform().
  GroupBuilder(Group& group, Deadline deadline)
      : deadline_(deadline), group_(&group), current_rank_(group.local_.front()) {}
  Result<> reform();

 private:
  [[nodiscard]] bool elastic() const { return group_->options_.place.has_value(); }
  // Elastic groups: who is there?
  Result<> meet();
  Result<> name_windows();
  Result<> take_seat_again(u32 rank);
  // All steps that others take part in.
  Result<> run(const Result<>& begun);
  Result<> listen();
  // What can be done without the others: check, open the GPUs, listen for windows.
  Result<> begin();
  Result<> check_options() const;
  Result<> open_devices();
  Result<> share_gpus();
  [[nodiscard]] bool in_one_process() const;
  [[nodiscard]] Sharing sharing() const;
  [[nodiscard]] message::Proposal proposal(const Result<>& begun) const;
  // After the agreement.
  Result<> allocate();
  Result<> make_heap();
  // Elastic groups: lets go of windows of processes that are gone, and of those they know.
  Result<> drop();
  Result<> share(Steps::Yield& yield);
  Result<> map(const std::vector<message::Outcome>& outcomes);
  Result<Descriptors> swap_descriptors();
  Result<> map_windows(const std::vector<message::Outcome>& outcomes);
  Result<> reserve(const std::vector<message::Outcome>& outcomes);
  // Whether the window of a local rank is the one that this process has told the others of.
  [[nodiscard]] bool is_named(u32 rank) const {
    return !fresh_ && group_->tokens_[rank] == group_->token_;
  }
  Result<> map_peer(u32 rank, WindowHandle handle);
  Result<> map_vacant();

  Deadline deadline_;
  std::unique_ptr<Group> made_;  // null: of a group that exists
  Group* group_;
  bool fresh_ = false;  // the heap has been made now
  message::Roster roster_;
  std::unique_ptr<WindowPassing> passing_;
  Descriptors descriptors_;
  u32 current_rank_ = 0;          // what is being worked on, for errors
  bool placed_in_order_ = false;  // nobody said which rank is on which GPU
};

}  // namespace crossdock::symm
