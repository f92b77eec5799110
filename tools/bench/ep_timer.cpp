// See ep_timer.hpp. SPDX-License-Identifier: Apache-2.0
#include "bench/ep_timer.hpp"

#include <algorithm>

#include "bench/statistics.hpp"

namespace crossdock::tools::bench {

using symm::u32;
using symm::u64;

Result<double> EpTimer::period_us(const EpCall& call, EpGemmLoad* load, u32 load_graphs) {
  CROSSDOCK_TRY(ranks, capture(call));
  load_rate_ = 0;
  std::vector<double> periods;
  for (u32 run = 0; run < repeat_; ++run) {
    if (load != nullptr) CROSSDOCK_CHECK_OK(load->start(load_graphs));
    CROSSDOCK_CHECK_OK(run_once(ranks));
    if (load != nullptr) CROSSDOCK_CHECK_OK(finish_load(*load, ranks));
    double slowest = 0;
    for (const OfRank& of : ranks) {
      CROSSDOCK_TRY(ms, cuda::elapsed_ms(of.start, of.end));
      slowest = std::max(slowest, ms * 1e3 / (u64{per_graph_} * launches_));
    }
    periods.push_back(slowest);
  }
  return median(periods);
}

Result<std::vector<EpTimer::OfRank>> EpTimer::capture(const EpCall& call) {
  std::vector<OfRank> ranks;
  for (const u32 r : rig_.group().local_ranks()) {
    const cuda::Stream& stream = *rig_.rank(r).device().stream();
    CROSSDOCK_TRY(capture, cuda::Capture::begin(stream));
    for (u32 i = 0; i < per_graph_; ++i)
      CROSSDOCK_CHECK_OK(call(r));
    CROSSDOCK_TRY(graph, capture.finish());
    CROSSDOCK_TRY(start, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    ranks.push_back({r, std::move(graph), std::move(start), std::move(end)});
  }
  return ranks;
}

// One graph to warm up, which also brings the ranks together, then the timed ones.
Result<> EpTimer::run_once(const std::vector<OfRank>& ranks) {
  for (const OfRank& of : ranks) {
    const cuda::Stream& stream = *rig_.rank(of.rank).device().stream();
    CROSSDOCK_CHECK_OK(of.graph.launch(stream));
    CROSSDOCK_CHECK_OK(of.start.record(stream));
    for (u32 n = 0; n < launches_; ++n)
      CROSSDOCK_CHECK_OK(of.graph.launch(stream));
    CROSSDOCK_CHECK_OK(of.end.record(stream));
  }
  return rig_.group().synchronize(deadline_);
}

// A load that ended before the calls did would make them look faster than they are beside one.
Result<> EpTimer::finish_load(EpGemmLoad& load, const std::vector<OfRank>& ranks) {
  CROSSDOCK_TRY(rate, load.finish(deadline_));
  load_rate_ = load_rate_ == 0 ? rate : std::min(load_rate_, rate);
  for (const OfRank& of : ranks) {
    CROSSDOCK_TRY(outlasted, load.outlasted(of.rank, of.end));
    if (!outlasted)
      return make_error(Code::kInternal,
                        "bench ep --beside-gemm: the products ended before the calls beside them");
  }
  return {};
}

}  // namespace crossdock::tools::bench
