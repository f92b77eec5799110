// `crossdock bench moe --chain`: times of whole layers. See moe.cpp.
//
//   us          forwards back to back in a CUDA graph, the slowest rank, the median of the runs
//   burst       one forward after some idle time, the median; the slowest rank
//   sustained   forwards back to back, after some time of the same: at the clock that the power
//               then allows
//   rate        operations of all products in a forward, in the time of `us`; burst_rate and
//               sustained_rate likewise
//   overlap_us  the same as `us` with --overlap: each forward in two halves, its dispatch beside
//   the
//               products of the one before it
//   stages      from the end of one to the end of the next on the GPU, launched one by one: the
//               median of a rank's forwards, the mean of the ranks. A dispatch or a combine
//               includes what a rank waits for the others, and a dispatch shared experts
//   hbm, nvlink bytes that the layer, or a stage of it, moves at least, in its time
//   first_rate, second_rate, first_util, second_util
//               of the products: operations in their time, and the share of the tensor cores' peak
//               at the clock that there was (rank 0)
//   imbalance   choices of the rank with the most, of those of a rank on average
//
// SPDX-License-Identifier: Apache-2.0
#include "bench/moe_chain.hpp"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <numeric>

namespace crossdock::tools::bench {
namespace {

using symm::u32;

constexpr std::array<const char*, 7> kStages = {"dispatch", "group",  "order",  "first",
                                                "second",   "reduce", "combine"};

struct Aim {
  const char* name;
  double us;
};
// Of four ranks; the best that launches one after the other could do is 6.0 ms and 796 us.
constexpr Aim kAims[] = {{"v3_chain_fp8_8192_us", 6300}, {"v3_chain_fp8_128_us", 830}};

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

// The whole layer: its times, and what it does in them.
Result<> measure_whole(ChainTimer& timer, const ChainCase& c, const MoeBench& options,
                       const ChainBytes& bytes, std::vector<Figure>& figures) {
  const auto add = [&](const char* what, double value, const char* unit) {
    figures.push_back({.name = fmt::format("{}_{}", c.name(), what), .value = value, .unit = unit});
  };
  CROSSDOCK_TRY(us, timer.period_us(run_wholes));
  Figure whole{.name = c.name() + "_us", .value = us, .unit = "us"};
  for (const Aim& aim : kAims)
    if (whole.name == aim.name && c.ranks == 4 && c.routing == "even") whole.aim = aim.us;
  figures.push_back(std::move(whole));
  CROSSDOCK_TRY(burst, timer.burst_us());
  CROSSDOCK_TRY(sustained, timer.sustained_us(us));
  add("burst_us", burst, "us");
  add("sustained_us", sustained, "us");
  if (options.overlap) {
    CROSSDOCK_TRY(overlapped, timer.period_us(run_halves));
    add("overlap_us", overlapped, "us");
  }
  add("rate", c.operations() / us / 1e6, "TFLOP/s");
  add("burst_rate", c.operations() / burst / 1e6, "TFLOP/s");
  add("sustained_rate", c.operations() / sustained / 1e6, "TFLOP/s");
  add("weights", c.weight_bytes() / us / 1e3, "GB/s");
  const double hbm = std::accumulate(bytes.hbm.begin(), bytes.hbm.end(), 0.0);
  const double nvlink = std::accumulate(bytes.nvlink.begin(), bytes.nvlink.end(), 0.0);
  add("hbm", hbm / us / 1e3, "GB/s");
  if (nvlink != 0) add("nvlink", nvlink / us / 1e3, "GB/s");
  return {};
}

Result<> measure_products(ChainTimer& timer, const ChainCase& c, const ChainTimer::Stages& stages,
                          std::vector<Figure>& figures) {
  CROSSDOCK_TRY(cycles, timer.product_cycles());
  const double peak = cycles.sms * (c.fp8() ? kE4m3PerCycle : kBf16PerCycle);
  for (const bool first : {true, false}) {
    const double operations = c.second_operations() * (first ? 2 : 1);
    const double us = stages[static_cast<std::size_t>(first ? moe::LayerStage::kFirst
                                                            : moe::LayerStage::kSecond)];
    const std::string name = c.name() + (first ? "_first" : "_second");
    figures.push_back({.name = name + "_rate", .value = operations / us / 1e6, .unit = "TFLOP/s"});
    // The cycles are of the first rank, whose share of the rows is the average only where routing
    // is even.
    if (c.ranks > 1 && c.routing != "even") continue;
    figures.push_back({.name = name + "_util",
                       .value = 100 * operations / (peak * (first ? cycles.first : cycles.second)),
                       .unit = "%"});
  }
  return {};
}

Result<> measure_times(ChainRig& rig, const ChainCase& c, const MoeBench& options,
                       std::vector<Figure>& figures, Deadline deadline) {
  ChainTimer timer(rig, options, c.tokens, deadline);
  const ChainBytes bytes = rig.bytes();
  CROSSDOCK_CHECK_OK(measure_whole(timer, c, options, bytes, figures));
  CROSSDOCK_TRY(stages, timer.stages_us());
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
  CROSSDOCK_CHECK_OK(measure_products(timer, c, stages, figures));
  // Above 1 the other ranks wait for one that more choices fell to.
  figures.push_back(
      {.name = c.name() + "_imbalance", .value = bytes.most_places / bytes.places, .unit = ""});
  return {};
}

Result<> measure_case(const ChainCase& c, const MoeBench& options, std::vector<Figure>& figures,
                      Deadline deadline) {
  CROSSDOCK_TRY(rig, ChainRig::create(c, deadline));
  CROSSDOCK_TRY(error, rig.verify(deadline));
  figures.push_back({.name = c.name() + "_error", .value = error, .unit = ""});
  if (options.overlap) CROSSDOCK_CHECK_OK(compare_halves(rig, c, deadline));
  if (c.twin) return {};
  return measure_times(rig, c, options, figures, deadline);
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
          c.shared = options.shared;
          CROSSDOCK_CHECK_OK(measure_case(c, options, figures, deadline));
        }
  return {};
}

}  // namespace crossdock::tools::bench
