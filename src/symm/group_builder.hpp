// GroupBuilder: makes one Group, step by step, and tells the other processes the outcome of each
// step, so that all of them get a group or none. Used once. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include <crossdock/core/deadline.hpp>

#include "symm/group.hpp"

namespace crossdock::symm {

class GroupBuilder {
 public:
  GroupBuilder(const GroupOptions& options, const device::SymmetricLayout& layout,
               const cuda::Driver* driver);
  Result<std::unique_ptr<Group>> build();

 private:
  Result<> check_options() const;
  Result<> open_devices();
  Result<> allocate();
  Result<> map();

  Deadline deadline_;
  std::unique_ptr<Group> group_;
};

}  // namespace crossdock::symm
