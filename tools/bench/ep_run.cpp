// Times of dispatch and combine on GPUs: the period of calls back to back in a CUDA graph, with all
// that a call launches; the slowest local rank, the median of the runs. See ep.hpp.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <fmt/format.h>
#include <functional>

#include "bench/ep.hpp"
#include "bench/statistics.hpp"
#include "cuda/graph.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;

// What a host of 4 x H200 gave, EP4, 4096 tokens x 7168, top-8 of 256: DeepEP's best, and the aim.
struct Known {
  const char* name;
  double deepep_us;
  double aim_us;
};
constexpr Known kKnown[] = {{"dispatch_fp8_us", 366, 245},
                            {"dispatch_fp8_cast_us", 0, 250},
                            {"dispatch_bf16_us", 551, 465},
                            {"combine_bf16_us", 597, 490}};
// Off-rank bytes of all ranks at once on that host, GB/s a GPU.
constexpr double kPushWire = 345;
constexpr double kPullWire = 315;

// One call on one rank.
using Call = std::function<Result<>(u32 rank)>;

struct Timer {
  EpBenchRig& rig;
  u32 per_graph;
  u32 launches;
  u32 repeat;
  Deadline deadline;

  Result<double> period_us(const Call& call) {
    std::vector<cuda::Graph> graphs;
    std::vector<cuda::Event> starts, ends;
    for (const u32 r : rig.group().local_ranks()) {
      const cuda::Stream& stream = *rig.rank(r).device().stream();
      CROSSDOCK_TRY(capture, cuda::Capture::begin(stream));
      for (u32 i = 0; i < per_graph; ++i)
        CROSSDOCK_CHECK_OK(call(r));
      CROSSDOCK_TRY(graph, capture.finish());
      CROSSDOCK_TRY(start, cuda::Event::create(stream.context(), cuda::Timing::kOn));
      CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
      graphs.push_back(std::move(graph));
      starts.push_back(std::move(start));
      ends.push_back(std::move(end));
    }
    std::vector<double> periods;
    for (u32 run = 0; run < repeat; ++run) {
      CROSSDOCK_CHECK_OK(run_once(graphs, starts, ends));
      double slowest = 0;
      for (std::size_t i = 0; i < graphs.size(); ++i) {
        CROSSDOCK_TRY(ms, cuda::elapsed_ms(starts[i], ends[i]));
        slowest = std::max(slowest, ms * 1e3 / (u64{per_graph} * launches));
      }
      periods.push_back(slowest);
    }
    return median(periods);
  }

 private:
  // One graph to warm up, which also brings the ranks together, then the timed ones.
  Result<> run_once(const std::vector<cuda::Graph>& graphs, const std::vector<cuda::Event>& starts,
                    const std::vector<cuda::Event>& ends) {
    const auto ranks = rig.group().local_ranks();
    for (std::size_t i = 0; i < graphs.size(); ++i) {
      const cuda::Stream& stream = *rig.rank(ranks[i]).device().stream();
      CROSSDOCK_CHECK_OK(graphs[i].launch(stream));
      CROSSDOCK_CHECK_OK(starts[i].record(stream));
      for (u32 n = 0; n < launches; ++n)
        CROSSDOCK_CHECK_OK(graphs[i].launch(stream));
      CROSSDOCK_CHECK_OK(ends[i].record(stream));
    }
    return rig.group().synchronize(deadline);
  }
};

struct Bytes {
  double received;
  double off_rank;
};
void add_period(std::vector<Figure>& figures, const std::string& operation,
                const std::string& suffix, double us, const Bytes& bytes, bool compare) {
  const bool pull = operation == "combine_bf16";
  Figure time{.name = operation + "_us" + suffix, .value = us, .unit = "us"};
  time.references.push_back({pull ? "pull of 4 x H200" : "push of 4 x H200",
                             bytes.off_rank / (pull ? kPullWire : kPushWire) / 1e3});
  for (const Known& known : kKnown) {
    if (!compare || known.name != operation + "_us") continue;
    if (known.deepep_us > 0) time.references.push_back({"DeepEP", known.deepep_us});
    time.aim = known.aim_us;
  }
  figures.push_back(std::move(time));
  figures.push_back({.name = operation + "_logical" + suffix,
                     .value = bytes.received / us / 1e3,
                     .unit = "GB/s"});
  figures.push_back({.name = operation + "_off_rank" + suffix,
                     .value = bytes.off_rank / us / 1e3,
                     .unit = "GB/s"});
}

bool is_compared(EpBenchRig& rig, const EpBench& options, const std::string& suffix) {
  return rig.group().world() == 4 && rig.count() == 4096 && !options.skewed &&
         options.hidden == 7168 && options.top_k == 8 && options.experts == 256 && suffix.empty();
}
Timer timer_of(EpBenchRig& rig, const EpBench& options, Deadline deadline) {
  const bool many = rig.count() > 1000;
  return {rig, many ? 10u : 100u, many ? 5u : 4u, options.repeat, deadline};
}

Result<> measure_combine(EpBenchRig& rig, const EpBench& options, const std::string& name,
                         const std::string& suffix, std::vector<Figure>& figures,
                         Deadline deadline) {
  std::vector<ep::Handle> handles;
  for (const u32 r : rig.group().local_ranks()) {
    CROSSDOCK_TRY(handle, rig.group().dispatch(r, rig.tokens(r, EpPayload::kBf16)));
    handles.push_back(std::move(handle));
  }
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  CROSSDOCK_TRY(us, timer_of(rig, options, deadline).period_us([&](u32 r) {
    const auto of_rank = std::find_if(handles.begin(), handles.end(),
                                      [&](const ep::Handle& h) { return h.rank() == r; });
    return rig.group().combine(*of_rank, rig.combined(r));
  }));
  add_period(
      figures, name, suffix, us,
      {rig.received_bytes(EpPayload::kBf16, false), rig.received_bytes(EpPayload::kBf16, true)},
      is_compared(rig, options, suffix));
  return {};
}

// The host's time for one dispatch call, launches included, while the GPU lags behind.
Result<double> host_us(EpBenchRig& rig, Deadline deadline) {
  constexpr u32 kCalls = 64;
  const auto ranks = rig.group().local_ranks();
  const auto start = std::chrono::steady_clock::now();
  for (u32 i = 0; i < kCalls; ++i)
    for (const u32 r : ranks)
      CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, EpPayload::kFp8)));
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  return took.count() / kCalls / static_cast<double>(ranks.size());
}

}  // namespace

Result<> measure_ep(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                    std::vector<Figure>& figures, Deadline deadline) {
  Timer timer = timer_of(rig, options, deadline);
  const bool compare = is_compared(rig, options, suffix);
  for (const EpPayload payload : {EpPayload::kFp8, EpPayload::kCast, EpPayload::kBf16}) {
    CROSSDOCK_TRY(us, timer.period_us([&](u32 r) -> Result<> {
      CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, payload)));
      return {};
    }));
    add_period(figures, fmt::format("dispatch_{}", name_of(payload)), suffix, us,
               {rig.received_bytes(payload, false), rig.received_bytes(payload, true)}, compare);
  }
  CROSSDOCK_CHECK_OK(measure_combine(rig, options, "combine_bf16", suffix, figures, deadline));
  CROSSDOCK_TRY(host, host_us(rig, deadline));
  figures.push_back({.name = "dispatch_call_us" + suffix, .value = host, .unit = "us", .aim = 8});
  return {};
}

Result<> measure_small(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                       std::vector<Figure>& figures, Deadline deadline) {
  Timer timer = timer_of(rig, options, deadline);
  const auto add = [&](const char* name, double us) {
    figures.push_back({.name = std::string(name) + "_us" + suffix, .value = us, .unit = "us"});
  };
  for (const EpPayload payload : {EpPayload::kFp8, EpPayload::kCast, EpPayload::kBf16}) {
    CROSSDOCK_TRY(us, timer.period_us([&](u32 r) -> Result<> {
      CROSSDOCK_CHECK_OK(rig.group().dispatch(r, rig.tokens(r, payload)));
      return {};
    }));
    add(fmt::format("dispatch_{}", name_of(payload)).c_str(), us);
  }
  std::vector<ep::Handle> handles;
  for (const u32 r : rig.group().local_ranks()) {
    CROSSDOCK_TRY(handle, rig.group().dispatch(r, rig.tokens(r, EpPayload::kBf16)));
    handles.push_back(std::move(handle));
  }
  CROSSDOCK_CHECK_OK(rig.group().synchronize(deadline));
  CROSSDOCK_TRY(combine, timer.period_us([&](u32 r) {
    const auto of_rank = std::find_if(handles.begin(), handles.end(),
                                      [&](const ep::Handle& h) { return h.rank() == r; });
    return rig.group().combine(*of_rank, rig.combined(r));
  }));
  add("combine_bf16", combine);
  handles.clear();
  CROSSDOCK_TRY(step, timer.period_us([&](u32 r) -> Result<> {
    CROSSDOCK_TRY(handle, rig.group().dispatch(r, rig.tokens(r, EpPayload::kCast)));
    return rig.group().combine(handle, rig.combined(r));
  }));
  add("dispatch_cast_and_combine", step);
  return {};
}

Result<> measure_push(EpBenchRig& rig, const EpBench& options, const std::string& suffix,
                      std::vector<Figure>& figures, Deadline deadline) {
  return measure_combine(rig, options, "combine_push_bf16", suffix, figures, deadline);
}

}  // namespace crossdock::tools::bench
