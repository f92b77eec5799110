// Finding what a host side holds for a rank. No state. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "symm/rank.hpp"

namespace crossdock::symm {

// The element whose `rank` is that of `rank`, which is one of the local ranks of the group.
template <class PerRank>
const PerRank& find_rank(const std::vector<PerRank>& all, const Rank& rank) {
  return *std::find_if(all.begin(), all.end(),
                       [&](const PerRank& one) { return one.rank == rank.rank(); });
}

}  // namespace crossdock::symm
