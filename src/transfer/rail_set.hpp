// The rails of one transport to one peer. Replaced as a whole when a rail is lost and dialled
// again; the old set lives on until the last transfer that posted to it is over.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "transport/transport.hpp"

namespace crossdock::transfer::detail {

struct RailSet {
  transport::Transport* transport = nullptr;
  std::size_t slot = 0;
  std::vector<std::unique_ptr<transport::Endpoint>> rails;
  std::atomic<bool> down{false};  // a rail failed: take no new shards until dialled again

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
  void sever(const Error& why) {
    down.store(true);
    for (const auto& rail : rails)
      rail->sever(why);
  }
};

}  // namespace crossdock::transfer::detail
