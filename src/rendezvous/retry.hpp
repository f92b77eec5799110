// How store clients wait between two tries of something remote: doubling pauses that end with the
// deadline. Single-owner.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <poll.h>

#include <crossdock/core/deadline.hpp>
#include <crossdock/core/error.hpp>

namespace crossdock::rendezvous {

class Backoff {
 public:
  Backoff(int first_ms, int longest_ms) : pause_ms_(first_ms), longest_ms_(longest_ms) {}
  void pause(Deadline deadline) {
    (void)::poll(nullptr, 0, deadline.remaining_ms(pause_ms_));
    pause_ms_ = std::min(pause_ms_ * 2, longest_ms_);
  }

 private:
  int pause_ms_;
  int longest_ms_;
};

// The server is not there now but may come back before the deadline. A kDeadline with time left was
// one of less: each address of a host has its share.
inline bool may_come_back(const Error& error, Deadline deadline) {
  const bool absent = error.code == Code::kUnreachable || error.code == Code::kPeerLost ||
                      error.code == Code::kDeadline;
  return absent && !deadline.passed();
}

}  // namespace crossdock::rendezvous
