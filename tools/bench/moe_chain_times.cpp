// The clocks of `crossdock bench moe --chain`; what the figures are: moe_chain.cpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <thread>

#include "bench/moe_chain.hpp"
#include "bench/statistics.hpp"
#include "cuda/graph.hpp"
#include "cuda/memory.hpp"
#include "symm/copy.hpp"

namespace crossdock::tools::bench {

using symm::u32;
using symm::u64;

constexpr u32 kLaunches = 4;  // of a graph, timed together
constexpr double kSustainedUs = 100e3;

struct ChainTimer::OfRank {
  u32 rank;
  cuda::Graph graph;
  cuda::Event start, end;
};

Result<> run_wholes(ChainRig& rig, u32 r, u32 count) {
  for (u32 i = 0; i < count; ++i)
    CROSSDOCK_CHECK_OK(rig.forward(r));
  return {};
}
Result<> run_halves(ChainRig& rig, u32 r, u32 count) {
  CROSSDOCK_TRY(begun, rig.begin(r));
  for (u32 i = 1; i < count; ++i) {
    CROSSDOCK_TRY(next, rig.begin(r));
    CROSSDOCK_CHECK_OK(rig.end(r, begun));
    begun = std::move(next);
  }
  return rig.end(r, begun);
}

Result<std::vector<ChainTimer::OfRank>> ChainTimer::capture(ChainRun run) {
  std::vector<OfRank> ranks;
  for (const u32 r : rig_.layer().local_ranks()) {
    const cuda::Stream& stream = *rig_.rank(r).device().stream();
    CROSSDOCK_TRY(capture, cuda::Capture::begin(stream));
    CROSSDOCK_CHECK_OK(run(rig_, r, per_graph_));
    CROSSDOCK_TRY(graph, capture.finish());
    CROSSDOCK_TRY(start, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    ranks.push_back({r, std::move(graph), std::move(start), std::move(end)});
  }
  return ranks;
}

// Graphs that warm up, which also brings the ranks together, then timed ones: of a forward.
Result<double> ChainTimer::time_graphs(std::vector<OfRank>& ranks, u32 before, u32 timed) {
  const auto stream = [&](const OfRank& of) -> const cuda::Stream& {
    return *rig_.rank(of.rank).device().stream();
  };
  // One of each rank at a time: ranks wait for each other, and a queue of a rank may be full.
  for (u32 n = 0; n < before + timed; ++n)
    for (OfRank& of : ranks) {
      if (n == before) CROSSDOCK_CHECK_OK(of.start.record(stream(of)));
      CROSSDOCK_CHECK_OK(of.graph.launch(stream(of)));
    }
  for (OfRank& of : ranks)
    CROSSDOCK_CHECK_OK(of.end.record(stream(of)));
  CROSSDOCK_CHECK_OK(rig_.layer().synchronize(deadline_));
  double slowest = 0;
  for (const OfRank& of : ranks) {
    CROSSDOCK_TRY(ms, cuda::elapsed_ms(of.start, of.end));
    slowest = std::max(slowest, ms * 1e3 / (static_cast<double>(per_graph_) * timed));
  }
  return slowest;
}

Result<double> ChainTimer::period_us(ChainRun run) {
  CROSSDOCK_TRY(ranks, capture(run));
  std::vector<double> periods;
  for (u32 i = 0; i < options_.repeat; ++i) {
    CROSSDOCK_TRY(us, time_graphs(ranks, 1, kLaunches));
    periods.push_back(us);
  }
  return median(periods);
}

Result<double> ChainTimer::sustained_us(double guess_us) {
  CROSSDOCK_TRY(ranks, capture(run_wholes));
  const auto graphs = [&](double us) {
    return static_cast<u32>(std::clamp(us / (guess_us * per_graph_), 1.0, 5000.0));
  };
  return time_graphs(ranks, graphs(static_cast<double>(options_.warm_up.count()) / 1e3),
                     graphs(kSustainedUs));
}

// The chip rests before each forward, and has all of it before it may begin: the host's time for
// the launches does not count.
Result<double> ChainTimer::burst_us() {
  struct Gated {
    u32 rank;
    cuda::PinnedMemory gate;
    cuda::Event start, end;
  };
  std::vector<Gated> ranks;
  for (const u32 r : rig_.layer().local_ranks()) {
    const cuda::Context& context = *rig_.rank(r).device().context();
    CROSSDOCK_TRY(gate, cuda::PinnedMemory::allocate(context, sizeof(u64)));
    CROSSDOCK_TRY(start, cuda::Event::create(context, cuda::Timing::kOn));
    CROSSDOCK_TRY(end, cuda::Event::create(context, cuda::Timing::kOn));
    ranks.push_back({r, std::move(gate), std::move(start), std::move(end)});
  }
  const auto queue = [&](Gated& of, u64 turn) -> Result<> {
    const cuda::Stream& stream = *rig_.rank(of.rank).device().stream();
    CROSSDOCK_CHECK_OK(cuda::wait_value_async(stream, of.gate.device(), turn));
    CROSSDOCK_CHECK_OK(of.start.record(stream));
    CROSSDOCK_CHECK_OK(rig_.forward(of.rank));
    return of.end.record(stream);
  };
  std::vector<double> times;
  for (u64 turn = 1; turn <= options_.repeat; ++turn) {
    std::this_thread::sleep_for(options_.idle);
    Result<> queued;
    for (Gated& of : ranks)
      if (queued.ok()) queued = queue(of, turn);
    for (Gated& of : ranks)  // whatever happened
      __atomic_store_n(of.gate.as<u64>(), turn, __ATOMIC_RELEASE);
    CROSSDOCK_CHECK_OK(queued);
    CROSSDOCK_CHECK_OK(rig_.layer().synchronize(deadline_));
    double slowest = 0;
    for (const Gated& of : ranks) {
      CROSSDOCK_TRY(ms, cuda::elapsed_ms(of.start, of.end));
      slowest = std::max(slowest, ms * 1e3);
    }
    times.push_back(slowest);
  }
  return median(times);
}

// Before a forward, and after each stage.
Result<ChainTimer::StageEvents> ChainTimer::record_stages(u32 r) {
  const cuda::Stream& stream = *rig_.rank(r).device().stream();
  StageEvents events;
  const auto record = [&]() -> Result<> {
    CROSSDOCK_TRY(event, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    CROSSDOCK_CHECK_OK(event.record(stream));
    events.push_back(std::move(event));
    return {};
  };
  CROSSDOCK_CHECK_OK(record());
  CROSSDOCK_CHECK_OK(rig_.forward(r, [&](moe::LayerStage) { return record(); }));
  return events;
}

Result<ChainTimer::Stages> ChainTimer::stages_us() {
  const auto ranks = rig_.layer().local_ranks();
  std::vector<std::vector<StageEvents>> forwards(ranks.size());  // [rank][forward]
  for (u32 i = 0; i < options_.repeat + 2; ++i)
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      CROSSDOCK_TRY(events, record_stages(ranks[r]));
      forwards[r].push_back(std::move(events));
    }
  CROSSDOCK_CHECK_OK(rig_.layer().synchronize(deadline_));
  Stages out{};
  for (std::size_t stage = 0; stage < out.size(); ++stage)
    for (const auto& of_rank : forwards) {
      std::vector<double> times;
      for (std::size_t i = 2; i < of_rank.size(); ++i) {  // the first two warm up
        CROSSDOCK_TRY(ms, cuda::elapsed_ms(of_rank[i][stage], of_rank[i][stage + 1]));
        times.push_back(ms * 1e3);
      }
      out[stage] += median(times) / static_cast<double>(ranks.size());
    }
  return out;
}

// What is launched between the ends of two stages' launches is told where to count.
Result<ChainTimer::Cycles> ChainTimer::product_cycles() {
  const auto ranks = rig_.layer().local_ranks();
  moe::LayerCore& core = rig_.layer().core();
  symm::Rank& first_rank = rig_.rank(ranks.front());
  const u32 sms = core.gemm().launcher().num_sms(first_rank);
  CROSSDOCK_TRY(memory, first_rank.allocate_state(u64{2} * sms * sizeof(u64)));
  u64* const words = memory.as<u64>();
  Result<> launched;
  for (const u32 r : ranks) {
    if (!launched.ok()) break;
    const bool counts = r == ranks.front();
    launched = rig_.forward(r, [&](moe::LayerStage done) -> Result<> {
      if (!counts) return {};
      core.gemm().count_cycles(done == moe::LayerStage::kOrder   ? words
                               : done == moe::LayerStage::kFirst ? words + sms
                                                                 : nullptr);
      return {};
    });
    core.gemm().count_cycles(nullptr);
  }
  CROSSDOCK_CHECK_OK(launched);
  CROSSDOCK_CHECK_OK(rig_.layer().synchronize(deadline_));
  CROSSDOCK_TRY(cycles, symm::download(first_rank, words, u64{2} * sms, deadline_));
  const auto middle = cycles.begin() + sms;
  return Cycles{.first = static_cast<double>(*std::max_element(cycles.begin(), middle)),
                .second = static_cast<double>(*std::max_element(middle, cycles.end())),
                .sms = sms};
}

}  // namespace crossdock::tools::bench
