// WindowPassing: how the processes of one host give each other the descriptors of their windows.
// Each listens on an abstract name that only the group knows, and after all have allocated
//
//   every process                              every other process
//     connect, send {agreement, descriptors} -->  (waits in the listener's queue)
//     accept, receive                        <--  connect, send
//
// Since everybody sends before anybody has to accept, no order can block. A process that dies is
// noticed at once: its end of a connection closes, and nothing of it is in the queue. Single-owner;
// used once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/result.hpp>

#include "base/fd.hpp"
#include "symm/agreement.hpp"

namespace crossdock::symm {

// The most ranks a process may have when there are others: descriptors of one message.
inline constexpr std::size_t kMostSharedRanks = 128;

using Descriptors = std::map<std::uint32_t, base::UniqueFd>;  // by rank

class WindowPassing {
 public:
  static Result<WindowPassing> listen(std::uint32_t members);
  [[nodiscard]] const std::string& name() const { return name_; }

  // Gives `own` to all other members and returns theirs. kPeerLost names the ranks of a process
  // that is gone, kDeadline those that did not come.
  Result<Descriptors> swap(const Agreement& agreement, std::uint32_t member, const Descriptors& own,
                           Deadline deadline);

 private:
  WindowPassing(std::string name, base::UniqueFd listener)
      : name_(std::move(name)), listener_(std::move(listener)) {}
  std::string name_;
  base::UniqueFd listener_;
};

}  // namespace crossdock::symm
