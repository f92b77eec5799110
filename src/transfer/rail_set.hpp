// The rails of one transport to one peer. Replaced as a whole when a rail is lost and dialled
// again; the old set lives on until the last transfer that posted to it is over.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/futex.hpp"
#include "transport/transport.hpp"

namespace crossdock::transfer::detail {

// The sets of rails that an engine has, for who takes the transports apart under them.
class RailCount {
 public:
  // One more, until what is returned goes.
  static std::shared_ptr<void> add(const std::shared_ptr<RailCount>& count) {
    count->sets_.fetch_add(1);
    return {nullptr, [count](void*) {
              if (count->sets_.fetch_sub(1) == 1) base::futex_wake_all(count->sets_);
            }};
  }
  // False when the deadline passed and there still is one.
  bool wait_none(Deadline deadline) {
    while (const auto left = sets_.load()) {
      if (deadline.passed()) return false;
      base::futex_wait(sets_, left, deadline);
    }
    return true;
  }

 private:
  std::atomic<std::uint32_t> sets_{0};  // futex word
};

struct RailSet {
  std::shared_ptr<void> counted;  // goes last
  transport::Transport* transport = nullptr;
  std::size_t slot = 0;
  // Keeps the peer from seeing the end of the control connection before the last rail is gone.
  std::shared_ptr<const void> link;
  std::vector<std::unique_ptr<transport::Endpoint>> rails;
  std::atomic<bool> down{false};  // a rail failed: take no new shards until dialled again
  // This engine severed the rails: their shards failed through no fault of their own.
  std::atomic<bool> cut{false};
  std::atomic<std::uint32_t> in_flight{0};  // shards on the rails; futex word of wait_empty()

  // The rail with the fewest bytes waiting, not `except` unless it is the only one.
  [[nodiscard]] transport::Endpoint* least_loaded(
      const transport::Endpoint* except = nullptr) const {
    transport::Endpoint* best = nullptr;
    for (const auto& rail : rails) {
      if (rail.get() == except && rails.size() > 1) continue;
      if (best == nullptr || rail->queued_bytes() < best->queued_bytes()) best = rail.get();
    }
    return best;
  }
  void board() noexcept { in_flight.fetch_add(1); }
  // Sequentially consistent with wait_empty(): either it sees the count, or this sees `cut`.
  void leave() noexcept {
    if (in_flight.fetch_sub(1) == 1 && cut.load()) base::futex_wake_all(in_flight);
  }
  // After sever(): false when the deadline passed and a shard is still in flight.
  bool wait_empty(Deadline deadline) {
    while (const auto left = in_flight.load()) {
      if (deadline.passed()) return false;
      base::futex_wait(in_flight, left, deadline);
    }
    return true;
  }
  void mark_cut() noexcept {
    cut.store(true);
    down.store(true);
  }
  void sever(const Error& why) {
    mark_cut();
    for (const auto& rail : rails)
      rail->sever(why);
  }
};

}  // namespace crossdock::transfer::detail
