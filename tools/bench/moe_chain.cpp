// `crossdock bench moe --chain`: times of whole layers. See moe.cpp.
//
//   us          forwards back to back in a CUDA graph, the slowest rank, the median of the runs
//   overlap_us  the same with --overlap: each forward in two halves, its dispatch beside the
//   products
//               of the one before it
//   stages      from the end of one to the end of the next on the GPU, launched one by one: the
//               median of a rank's forwards, the mean of the ranks. A dispatch or a combine
//               includes what a rank waits for the others
//   hbm, nvlink of a stage: bytes that it moves at least, in that time
//   imbalance   choices of the rank with the most, of those of a rank on average
//
// SPDX-License-Identifier: Apache-2.0
#include "bench/moe_chain.hpp"

#include <algorithm>
#include <array>
#include <fmt/format.h>

#include "bench/statistics.hpp"
#include "cuda/graph.hpp"

namespace crossdock::tools::bench {
namespace {

using symm::u32;
using symm::u64;

constexpr std::array<const char*, 7> kStages = {"dispatch", "group",  "order",  "first",
                                                "second",   "reduce", "combine"};

struct Aim {
  const char* name;
  double us;
};
// Of four ranks; the best that launches one after the other could do is 6.0 ms and 796 us.
constexpr Aim kAims[] = {{"v3_chain_fp8_8192_us", 6300}, {"v3_chain_fp8_128_us", 830}};

struct RankTimer {
  u32 rank;
  cuda::Graph graph;
  cuda::Event start, end;
};

// Forwards in a row.
Result<> run_wholes(ChainRig& rig, u32 r, u32 count) {
  for (u32 i = 0; i < count; ++i)
    CROSSDOCK_CHECK_OK(rig.forward(r));
  return {};
}
// The same in halves: the next begins before one ends.
Result<> run_halves(ChainRig& rig, u32 r, u32 count) {
  CROSSDOCK_TRY(begun, rig.begin(r));
  for (u32 i = 1; i < count; ++i) {
    CROSSDOCK_TRY(next, rig.begin(r));
    CROSSDOCK_CHECK_OK(rig.end(r, begun));
    begun = std::move(next);
  }
  return rig.end(r, begun);
}
using Run = Result<> (*)(ChainRig&, u32, u32);

Result<std::vector<RankTimer>> capture(ChainRig& rig, Run run, u32 per_graph) {
  std::vector<RankTimer> timers;
  for (const u32 r : rig.layer().local_ranks()) {
    const cuda::Stream& stream = *rig.rank(r).device().stream();
    CROSSDOCK_TRY(capture, cuda::Capture::begin(stream));
    CROSSDOCK_CHECK_OK(run(rig, r, per_graph));
    CROSSDOCK_TRY(graph, capture.finish());
    CROSSDOCK_TRY(start, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    CROSSDOCK_TRY(end, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    timers.push_back({r, std::move(graph), std::move(start), std::move(end)});
  }
  return timers;
}

// One graph to warm up, which also brings the ranks together, then the timed ones.
Result<double> period_us(ChainRig& rig, Run run, const MoeBench& options, u32 tokens,
                         Deadline deadline) {
  const u32 per_graph = tokens > 1000 ? 5 : 20;
  const u32 launches = 4;
  CROSSDOCK_TRY(timers, capture(rig, run, per_graph));
  std::vector<double> periods;
  for (u32 repeat = 0; repeat < options.repeat; ++repeat) {
    for (RankTimer& t : timers) {
      const cuda::Stream& stream = *rig.rank(t.rank).device().stream();
      CROSSDOCK_CHECK_OK(t.graph.launch(stream));
      CROSSDOCK_CHECK_OK(t.start.record(stream));
      for (u32 n = 0; n < launches; ++n)
        CROSSDOCK_CHECK_OK(t.graph.launch(stream));
      CROSSDOCK_CHECK_OK(t.end.record(stream));
    }
    CROSSDOCK_CHECK_OK(rig.layer().synchronize(deadline));
    double slowest = 0;
    for (const RankTimer& t : timers) {
      CROSSDOCK_TRY(ms, cuda::elapsed_ms(t.start, t.end));
      slowest = std::max(slowest, ms * 1e3 / (per_graph * launches));
    }
    periods.push_back(slowest);
  }
  return median(periods);
}

// Events of one forward of one rank: before it, and after each stage.
using StageEvents = std::vector<cuda::Event>;

Result<StageEvents> record_stages(ChainRig& rig, u32 r) {
  const cuda::Stream& stream = *rig.rank(r).device().stream();
  StageEvents events;
  const auto record = [&]() -> Result<> {
    CROSSDOCK_TRY(event, cuda::Event::create(stream.context(), cuda::Timing::kOn));
    CROSSDOCK_CHECK_OK(event.record(stream));
    events.push_back(std::move(event));
    return {};
  };
  CROSSDOCK_CHECK_OK(record());
  CROSSDOCK_CHECK_OK(rig.forward(r, [&](moe::LayerStage) { return record(); }));
  return events;
}

Result<std::array<double, kStages.size()>> stages_us(ChainRig& rig, const MoeBench& options,
                                                     Deadline deadline) {
  const auto ranks = rig.layer().local_ranks();
  std::vector<std::vector<StageEvents>> forwards(ranks.size());  // [rank][forward]
  for (u32 i = 0; i < options.repeat + 2; ++i)
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      CROSSDOCK_TRY(events, record_stages(rig, ranks[r]));
      forwards[r].push_back(std::move(events));
    }
  CROSSDOCK_CHECK_OK(rig.layer().synchronize(deadline));
  std::array<double, kStages.size()> out{};
  for (std::size_t stage = 0; stage < kStages.size(); ++stage)
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

// Halves give the bits of wholes.
Result<> compare_halves(ChainRig& rig, const ChainCase& c, Deadline deadline) {
  CROSSDOCK_TRY(whole, rig.outputs(deadline));
  for (const u32 r : rig.layer().local_ranks())
    CROSSDOCK_CHECK_OK(run_halves(rig, r, 3));
  CROSSDOCK_CHECK_OK(rig.layer().synchronize(deadline));
  CROSSDOCK_TRY(halves, rig.outputs(deadline));
  if (halves == whole) return {};
  return make_error(Code::kInternal, c.name() + ": halves give other bits than wholes");
}

Result<> measure_case(const ChainCase& c, const MoeBench& options, std::vector<Figure>& figures,
                      Deadline deadline) {
  CROSSDOCK_TRY(rig, ChainRig::create(c, deadline));
  CROSSDOCK_TRY(error, rig.verify(deadline));
  figures.push_back({.name = c.name() + "_error", .value = error, .unit = ""});
  if (options.overlap) CROSSDOCK_CHECK_OK(compare_halves(rig, c, deadline));
  if (c.twin) return {};
  CROSSDOCK_TRY(us, period_us(rig, run_wholes, options, c.tokens, deadline));
  Figure whole{.name = c.name() + "_us", .value = us, .unit = "us"};
  for (const Aim& aim : kAims)
    if (whole.name == aim.name && c.ranks == 4 && c.routing == "even") whole.aim = aim.us;
  figures.push_back(std::move(whole));
  if (options.overlap) {
    CROSSDOCK_TRY(overlapped, period_us(rig, run_halves, options, c.tokens, deadline));
    figures.push_back({.name = c.name() + "_overlap_us", .value = overlapped, .unit = "us"});
  }
  figures.push_back(
      {.name = c.name() + "_rate", .value = c.operations() / us / 1e6, .unit = "TFLOP/s"});
  figures.push_back(
      {.name = c.name() + "_weights", .value = c.weight_bytes() / us / 1e3, .unit = "GB/s"});
  CROSSDOCK_TRY(stages, stages_us(rig, options, deadline));
  const ChainBytes bytes = rig.bytes();
  for (std::size_t i = 0; i < kStages.size(); ++i) {
    const auto add = [&](const char* what, double value, const char* unit) {
      figures.push_back({.name = fmt::format("{}_{}_{}", c.name(), kStages[i], what),
                         .value = value,
                         .unit = unit});
    };
    add("us", stages[i], "us");
    if (bytes.hbm[i] != 0) add("hbm", bytes.hbm[i] / stages[i] / 1e3, "GB/s");
    if (bytes.nvlink[i] != 0) add("nvlink", bytes.nvlink[i] / stages[i] / 1e3, "GB/s");
  }
  // Above 1 the other ranks wait for one that more choices fell to.
  figures.push_back(
      {.name = c.name() + "_imbalance", .value = bytes.most_places / bytes.places, .unit = ""});
  return {};
}

}  // namespace

Result<> measure_chain(const MoeBench& options, const MoeModel& model, u32 gpus,
                       std::vector<Figure>& figures, Deadline deadline) {
  ChainCase c{.model = model, .ranks = gpus == 0 ? 2 : gpus, .twin = gpus == 0};
  c.model.experts = std::max(model.experts / options.world, 1u) * c.ranks;
  for (const std::string& format : options.formats)
    for (const std::string& routing : options.routings)
      for (const u32 tokens : options.tokens)
        for (const u32 expand_sms : options.expand_sms) {
          c.format = moe_format(format);
          c.scale_type = options.scales == "ue8m0" ? moe::ScaleType::kUe8m0 : moe::ScaleType::kF32;
          c.routing = routing;
          c.tokens = c.twin ? std::min(tokens, 9u) : tokens;
          c.expand_sms = expand_sms;
          CROSSDOCK_CHECK_OK(measure_case(c, options, figures, deadline));
        }
  return {};
}

}  // namespace crossdock::tools::bench
