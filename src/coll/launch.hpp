// Kernels in the order of a lane: into its stream, or on the CPU in the twin, when the lane has
// come
// to it. Part of Core, for the files that launch. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "coll/core.hpp"

namespace crossdock::coll {

template <class Params>
Result<> Core::launch(RankState& state, const Lane& lane, const symm::Prepared<Params>& kernel,
                      const symm::LaunchShape& shape, const Params& params) {
  const symm::Rank& rank = rank_of(state);
  if (lane.cpu() == nullptr) {
    symm::LaunchShape own = shape;
    own.gpu_stream = lane.stream();
    return kernels_->launcher.launch(rank, kernel, own, params);
  }
  const auto index = static_cast<std::size_t>(&state - ranks_.data());
  lane.cpu()->post([this, &rank, &kernel, shape, params, index] {
    // A lane that was released from a wait has nothing sensible to compute.
    if (!watch_->check(index).ok()) return;
    const std::scoped_lock lock(twin_);
    auto done = kernels_->launcher.launch(rank, kernel, shape, params);
    if (done.ok()) done = kernels_->launcher.synchronize(Deadline::in(std::chrono::minutes(1)));
    if (!done.ok()) watch_->fail(index, std::move(done).error());
  });
  return {};
}

}  // namespace crossdock::coll
