// See ep_timer.hpp. SPDX-License-Identifier: Apache-2.0
#include "bench/ep_timer.hpp"

#include <algorithm>
#include <chrono>

#include "bench/statistics.hpp"
#include "cuda/memory.hpp"

namespace crossdock::tools::bench {

using symm::u32;
using symm::u64;

constexpr u32 kSamples = 20;  // of kernel_us(), each of two calls
constexpr u32 kHostCalls = 64;

// What a rank waits for until all is queued, and its samples.
struct EpTimer::Gated {
  u32 rank;
  cuda::PinnedMemory gate;
  std::vector<std::pair<cuda::Event, cuda::Event>> samples = {};

  void open() { __atomic_store_n(gate.as<std::uint64_t>(), std::uint64_t{1}, __ATOMIC_RELEASE); }
};

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

Result<double> EpTimer::kernel_us(const EpCall& call) {
  std::vector<Gated> ranks;
  for (const u32 r : rig_.group().local_ranks()) {
    const cuda::Context& context = *rig_.rank(r).device().context();
    CROSSDOCK_TRY(gate, cuda::PinnedMemory::allocate(context, sizeof(std::uint64_t)));
    ranks.push_back({r, std::move(gate)});
  }
  const auto queued = queue_samples(ranks, call);
  for (Gated& of : ranks)
    of.open();  // whatever happened: a stream would wait for ever
  const auto done = rig_.group().synchronize(deadline_);
  CROSSDOCK_CHECK_OK(queued);
  CROSSDOCK_CHECK_OK(done);
  std::vector<double> times;
  for (u32 i = 0; i < kSamples; ++i) {
    double slowest = 0;
    for (const Gated& of : ranks) {
      CROSSDOCK_TRY(ms, cuda::elapsed_ms(of.samples[i].first, of.samples[i].second));
      slowest = std::max(slowest, ms * 1e3);
    }
    times.push_back(slowest);
  }
  return median(times);
}

Result<> EpTimer::queue_samples(std::vector<Gated>& ranks, const EpCall& call) {
  for (const Gated& of : ranks)
    CROSSDOCK_CHECK_OK(cuda::wait_value_async(*rig_.rank(of.rank).device().stream(),
                                              of.gate.device(), std::uint64_t{1}));
  for (u32 i = 0; i < kSamples; ++i)
    for (Gated& of : ranks) {
      const cuda::Stream& stream = *rig_.rank(of.rank).device().stream();
      CROSSDOCK_TRY(start, cuda::Event::create(stream.context(), cuda::Timing::kOn));
      CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
      CROSSDOCK_CHECK_OK(call(of.rank));
      CROSSDOCK_CHECK_OK(start.record(stream));
      CROSSDOCK_CHECK_OK(call(of.rank));
      CROSSDOCK_CHECK_OK(end.record(stream));
      of.samples.emplace_back(std::move(start), std::move(end));
    }
  return {};
}

Result<double> EpTimer::host_us(const EpCall& call) {
  const auto ranks = rig_.group().local_ranks();
  const auto start = std::chrono::steady_clock::now();
  for (u32 i = 0; i < kHostCalls; ++i)
    for (const u32 r : ranks)
      CROSSDOCK_CHECK_OK(call(r));
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  CROSSDOCK_CHECK_OK(rig_.group().synchronize(deadline_));
  return took.count() / kHostCalls / static_cast<double>(ranks.size());
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

Result<std::vector<ep::Handle>> dispatch_all(EpBenchRig& rig, EpPayload payload,
                                             Deadline deadline) {
  std::vector<ep::Handle> handles;
  for (const u32 r : rig.group().local_ranks()) {
    CROSSDOCK_TRY(handle, rig.group().dispatch(r, rig.tokens(r, payload)));
    handles.push_back(std::move(handle));
  }
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  return handles;
}
const ep::Handle& of_rank(const std::vector<ep::Handle>& handles, u32 r) {
  return *std::find_if(handles.begin(), handles.end(),
                       [&](const ep::Handle& h) { return h.rank() == r; });
}

}  // namespace crossdock::tools::bench
