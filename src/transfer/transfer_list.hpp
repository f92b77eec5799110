// The transfers in flight: for pending(), for deadlines, for everything that concerns all transfers
// of a peer. Deadlines cost no tick: the control loop sleeps until the earliest one, and a transfer
// that ends before takes nothing but a list node. Limits on stalls are looked at four times each.
// Thread-safe; deadlines are judged on the loop.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "base/event_loop.hpp"
#include "transfer/transfer_core.hpp"

namespace crossdock::transfer::detail {

class TransferList {
 public:
  TransferList(base::EventLoop& loop, std::chrono::nanoseconds grace)
      : loop_(loop), grace_(grace) {}

  // Nothing when the transfer is over already.
  void add(const std::shared_ptr<TransferCore>& transfer);
  void remove(TransferCore& transfer);
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] std::vector<std::shared_ptr<TransferCore>> all() const;
  // Waits until none is in flight; false when the deadline passed first.
  bool wait_empty(Deadline deadline);

 private:
  void arm(Deadline when);
  void check_deadlines();

  base::EventLoop& loop_;
  const std::chrono::nanoseconds grace_;  // between the request to stop and the cut of the rails
  mutable std::mutex mutex_;
  std::condition_variable emptied_;
  std::list<std::shared_ptr<TransferCore>> list_;
  std::optional<Deadline> armed_;                  // guarded by mutex_
  std::optional<base::EventLoop::TimerId> timer_;  // loop thread: the only one
};

}  // namespace crossdock::transfer::detail
