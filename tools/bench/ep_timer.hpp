// The clock of `crossdock bench ep`: the period of calls back to back in a CUDA graph, with all
// that a call launches; the slowest local rank, the median of the runs.
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

}  // namespace crossdock::tools::bench
