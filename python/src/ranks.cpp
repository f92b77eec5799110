// See ranks.hpp. SPDX-License-Identifier: Apache-2.0
#include "ranks.hpp"

#include <chrono>

#include "errors.hpp"

namespace crossdock::python {

symm::GroupOptions group_options_of(const Ranks& ranks) {
  symm::GroupOptions out;
  out.world = ranks.world;
  for (const auto& [rank, device] : ranks.local)
    out.ranks.push_back({.rank = rank, .device = device});
  out.backend = ranks.cpu ? symm::Backend::kCpu : symm::Backend::kGpu;
  out.exchange = ranks.exchange;
  out.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(seconds_of(ranks.timeout, "timeout"));
  return out;
}

}  // namespace crossdock::python
