// The clocks of `crossdock bench ep`, all of which take the slowest local rank and the median:
//
//   period   of calls back to back in a CUDA graph, with all that a call launches
//   kernel   from an event before one call to an event behind it, in a stream that has everything
//            queued: its launches alone, without what lies between calls and without the overlap of
//            Options::overlap_launches, which an event ends. A call before it, not timed, brings
//            the ranks together
//   host     of one call, launches included, as it returns, while the GPU lags behind
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "bench/ep.hpp"
#include "bench/ep_beside.hpp"
#include "cuda/graph.hpp"

namespace crossdock::tools::bench {

// One call on one rank.
using EpCall = std::function<Result<>(std::uint32_t rank)>;

class EpTimer {
 public:
  EpTimer(EpBenchRig& rig, const EpBench& options, Deadline deadline)
      : rig_(rig),
        per_graph_(rig.count() > 1000 ? 10 : 100),
        launches_(rig.count() > 1000 ? 5 : 4),
        repeat_(options.repeat),
        deadline_(deadline) {}

  // Of `call`; with `load`, which must outlive this, beside so many of its graphs a run.
  Result<double> period_us(const EpCall& call, EpGemmLoad* load = nullptr,
                           std::uint32_t load_graphs = 0);
  Result<double> kernel_us(const EpCall& call);
  Result<double> host_us(const EpCall& call);
  // Calls of one run, those that warm up included.
  [[nodiscard]] std::uint32_t calls() const { return per_graph_ * (launches_ + 1); }
  // Of the load in the last period_us(), TFLOP/s: the slowest run.
  [[nodiscard]] double load_rate() const { return load_rate_; }

 private:
  struct OfRank {
    std::uint32_t rank;
    cuda::Graph graph;
    cuda::Event start, end;
  };
  struct Gated;
  Result<> queue_samples(std::vector<Gated>& ranks, const EpCall& call);
  Result<std::vector<OfRank>> capture(const EpCall& call);
  Result<> run_once(const std::vector<OfRank>& ranks);
  Result<> finish_load(EpGemmLoad& load, const std::vector<OfRank>& ranks);

  EpBenchRig& rig_;
  std::uint32_t per_graph_;
  std::uint32_t launches_;
  std::uint32_t repeat_;
  Deadline deadline_;
  double load_rate_ = 0;
};

// One dispatch of every local rank, which has arrived; and the handle of a rank among those.
Result<std::vector<ep::Handle>> dispatch_all(EpBenchRig& rig, EpPayload payload, Deadline deadline);
const ep::Handle& of_rank(const std::vector<ep::Handle>& handles, std::uint32_t rank);

}  // namespace crossdock::tools::bench
