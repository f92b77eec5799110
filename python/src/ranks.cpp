// See ranks.hpp. SPDX-License-Identifier: Apache-2.0
#include "ranks.hpp"

#include <chrono>
#include <nanobind/stl/string.h>
#include <string>

#include "ep_options.hpp"
#include "errors.hpp"

namespace crossdock::python {

symm::GroupOptions group_options_of(const Ranks& ranks) {
  symm::GroupOptions out;
  out.world = ranks.world;
  for (const auto& [rank, device] : ranks.local)
    out.ranks.push_back({.rank = rank, .device = device});
  out.backend = ranks.cpu ? symm::Backend::kCpu : symm::Backend::kGpu;
  out.exchange = ranks.exchange;
  if (!ranks.place.is_none())
    out.place =
        symm::MeetingPlace{.store = nb::cast<std::string>(nb::object(ranks.place[0])),
                           .name = nb::cast<std::string>(nb::object(ranks.place[1])),
                           .fewest = number_of(ranks.place[2], "fewest"),
                           .settle = std::chrono::duration_cast<std::chrono::milliseconds>(
                               seconds_of(nb::cast<double>(nb::object(ranks.place[3])), "settle"))};
  out.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(seconds_of(ranks.timeout, "timeout"));
  return out;
}

}  // namespace crossdock::python
