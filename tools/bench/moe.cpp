// `crossdock bench moe`: grouped products of expert layers on one GPU, with the shapes of known
// models as one of `--world` ranks has them. Each result is compared with the product in fp64
// before it is timed. A GPU under this load is limited by its power, so there are several figures:
//
//   burst       one launch after some idle time, the median
//   sustained   launches back to back, after some time of the same
//   util        share of the tensor cores' peak at the clock that there was, in a burst
//   weights     bytes of weights a second, sustained, beside the rate of a large copy
//
// With `--chain` whole layers on all GPUs, each GPU with as many experts as one of `--world` ranks:
// the time of forwards back to back in a CUDA graph, in bursts and sustained, and of each stage
// (moe_chain.cpp).
//
// With `--vs torch` the same products by torch (cuBLASLt) in the same run, as references; each is
// asked for with a limit of its own, `--vs-timeout`.
//
// In the twin there is nothing to time: there it only compares. SPDX-License-Identifier: Apache-2.0
#include "bench/moe.hpp"

#include <algorithm>
#include <fmt/format.h>

#include "base/config.hpp"
#include "bench/commands.hpp"
#include "cli.hpp"
#include "cuda/device.hpp"

namespace crossdock::tools::bench {
namespace {

using Model = MoeModel;
constexpr Model kModels[] = {
    {"v3", 7168, 2048, 256, 8, 1},        {"qwen3-235b", 4096, 1536, 128, 8},
    {"qwen3-30b", 2048, 768, 128, 8},     {"glm-4.5", 5120, 1536, 160, 8, 1},
    {"gpt-oss-120b", 2944, 2944, 128, 4},  // 2880, padded to a multiple of 128
};
constexpr std::pair<const char*, moe::GemmTile> kTiles[] = {
    {"auto", moe::GemmTile::kAuto},   {"128", moe::GemmTile::k128},
    {"64", moe::GemmTile::k64},       {"few32", moe::GemmTile::kFew32},
    {"few16", moe::GemmTile::kFew16}, {"few8", moe::GemmTile::kFew8},
};

std::vector<MoeCase> cases_of(const MoeBench& options, const Model& model) {
  const std::uint32_t experts = std::max(model.experts / options.world, 1u);
  moe::GemmTile tile = moe::GemmTile::kAuto;
  for (const auto& [name, value] : kTiles)
    if (options.tile == name) tile = value;
  std::vector<MoeCase> cases;
  for (const std::string& format : options.formats)
    for (const std::string& layout : options.layouts)
      for (const std::string& epilogue : options.epilogues)
        for (const bool first : {true, false})
          for (const std::uint32_t rows : options.rows) {
            if (epilogue == "swiglu" && !first) continue;
            MoeCase c{.format = moe_format(format),
                      .scale_type =
                          options.scales == "ue8m0" ? moe::ScaleType::kUe8m0 : moe::ScaleType::kF32,
                      .rows = rows,
                      .swiglu = epilogue == "swiglu",
                      .layout = layout,
                      .tile = tile};
            c.product = {.model = model.name,
                         .layer = first ? "l1" : "l2",
                         .experts = experts,
                         .n = first ? 2 * model.inner : model.hidden,
                         .k = first ? model.hidden : model.inner};
            cases.push_back(c);
          }
  return cases;
}

// Layers on all GPUs, each with as many experts as one of `--world` ranks has.
Result<> measure_chains(const MoeBench& options, FigureReport& report) {
  const Deadline deadline = Deadline::in(options.timeout);
  if (options.backend == "twin") {
    report.facts = {{"backend", "twin"}};
    const Model small{"small", 256, 128, 4 * options.world, 2, 1};
    CROSSDOCK_CHECK_OK(measure_chain(options, small, 0, report.figures, deadline));
  } else {
    CROSSDOCK_TRY(config, base::Config::load());
    CROSSDOCK_TRY(driver, cuda::Driver::load({.library = config.string("cuda.driver")}));
    CROSSDOCK_TRY(gpus, cuda::device_count(*driver));
    add_gpu_facts(report, driver);
    report.facts.emplace_back("ranks", std::to_string(gpus));
    report.facts.emplace_back("experts_as_of_ranks", std::to_string(options.world));
    report.facts.emplace_back("repeat", std::to_string(options.repeat));
    for (const Model& model : kModels) {
      const auto& wanted = options.models;
      if (std::find(wanted.begin(), wanted.end(), model.name) == wanted.end()) continue;
      CROSSDOCK_CHECK_OK(measure_chain(options, model, static_cast<std::uint32_t>(gpus),
                                       report.figures, deadline));
    }
  }
  report.facts.emplace_back("data", "right");
  return {};
}

// What was measured before something failed is reported too.
Result<> measure(const MoeBench& options, FigureReport& report) {
  const Deadline deadline = Deadline::in(options.timeout);
  CROSSDOCK_TRY(config, base::Config::load());
  CROSSDOCK_TRY(driver, cuda::Driver::load({.library = config.string("cuda.driver")}));
  add_gpu_facts(report, driver);
  report.facts.emplace_back("world", std::to_string(options.world));
  report.facts.emplace_back("repeat", std::to_string(options.repeat));
  moe::GemmOptions gemm_options;
  gemm_options.ranks.world = 1;
  CROSSDOCK_TRY(gemm, moe::Gemm::create(gemm_options));
  if (options.no_hand_over) gemm.core().hand_over(false);
  CROSSDOCK_TRY(copy, measure_copy(gemm.core().group().rank(0), deadline));
  report.figures.push_back({.name = "copy", .value = copy / 1e9, .unit = "GB/s"});
  for (const Model& model : kModels) {
    const auto& wanted = options.models;
    if (std::find(wanted.begin(), wanted.end(), model.name) == wanted.end()) continue;
    for (const MoeCase& c : cases_of(options, model)) {
      CROSSDOCK_TRY(rig, MoeRig::create(gemm, c, deadline));
      CROSSDOCK_CHECK_OK(measure_moe(gemm, rig, c, options, copy, report.figures, deadline));
      if (options.versus == "torch")
        CROSSDOCK_CHECK_OK(compare_with_torch(c, options, deadline, report));
    }
  }
  report.facts.emplace_back("data", "right");
  return {};
}

Result<> verify_in_twin(const MoeBench& options, FigureReport& report) {
  const Deadline deadline = Deadline::in(options.timeout);
  moe::GemmOptions gemm_options;
  gemm_options.ranks.world = 1;
  gemm_options.ranks.backend = symm::Backend::kCpu;
  CROSSDOCK_TRY(gemm, moe::Gemm::create(gemm_options));
  if (options.no_hand_over) gemm.core().hand_over(false);
  report.facts = {{"backend", "twin"}};
  for (const Model& model : {Model{"small", 256, 256, 2 * options.world, 1}})
    for (const MoeCase& c : cases_of(options, model)) {
      MoeCase few = c;
      few.rows = std::min(c.rows, 160u);
      CROSSDOCK_TRY(rig, MoeRig::create(gemm, few, deadline));
      CROSSDOCK_TRY(error, rig.verify(deadline));
      report.figures.push_back({.name = few.name() + "_error", .value = error, .unit = ""});
    }
  report.facts.emplace_back("data", "right");
  return {};
}

int bench_moe(const MoeBench& options) {
  FigureReport figures{.schema = "crossdock.bench.moe/1"};
  const auto result = options.chain               ? measure_chains(options, figures)
                      : options.backend == "twin" ? verify_in_twin(options, figures)
                                                  : measure(options, figures);
  if (result.ok() || !figures.figures.empty()) {
    const auto printed = print_figures(figures, options.output);
    if (!printed.ok()) return report(printed.error());
  }
  return result.ok() ? kDone : report(result.error());
}

}  // namespace

moe::Format moe_format(const std::string& name) {
  if (name == "fp4") return moe::Format::kE2m1;
  return name == "fp8" ? moe::Format::kE4m3 : moe::Format::kBf16;
}

void add_moe(CLI::App& group) {
  const auto options = std::make_shared<MoeBench>();
  CLI::App* sub = group.add_subcommand(
      "moe",
      "Grouped products of expert layers: TFLOP/s in bursts and sustained, weights a second");
  std::vector<std::string> models, tiles;
  for (const Model& model : kModels)
    models.emplace_back(model.name);
  for (const auto& [name, value] : kTiles)
    tiles.emplace_back(name);
  sub->add_option("--backend", options->backend, "gpu, or twin: on the CPU, results only")
      ->check(CLI::IsMember({"gpu", "twin"}));
  sub->add_option("--model", options->models, "whose shapes")->check(CLI::IsMember(models));
  sub->add_option("--rows", options->rows, "rows of each expert, e.g. 1024 16");
  sub->add_option("--format", options->formats, "fp8, bf16; fp4: weights in e2m1, rows in e4m3")
      ->check(CLI::IsMember({"fp8", "bf16", "fp4"}));
  sub->add_option("--scales", options->scales, "f32, ue8m0")
      ->check(CLI::IsMember({"f32", "ue8m0"}));
  sub->add_option("--epilogue", options->epilogues, "store: bf16; swiglu: of the first product")
      ->check(CLI::IsMember({"store", "swiglu"}));
  sub->add_option("--layout", options->layouts, "contiguous, masked, gather")
      ->check(CLI::IsMember({"contiguous", "masked", "gather"}));
  sub->add_option("--tile", options->tile, "instead of the library's choice")
      ->check(CLI::IsMember(tiles));
  sub->add_option("--world", options->world, "ranks that share the experts")
      ->check(CLI::Range(1, 1024));
  sub->add_option("--repeat", options->repeat, "launches; the median counts")
      ->check(CLI::Range(1, 1000));
  sub->add_option("--vs", options->versus, "torch: the same products by it, in the same run")
      ->check(CLI::IsMember({"torch"}));
  add_duration(*sub, "--vs-timeout", options->versus_timeout,
               "with --vs: the longest that one product of torch may take");
  CLI::Option* chain = sub->add_flag("--chain", options->chain,
                                     "whole layers on all GPUs instead of single products");
  sub->add_flag("--no-hand-over", options->no_hand_over,
                "math warps store all outputs themselves, for comparison; not with --chain")
      ->excludes(chain);
  sub->add_option("--tokens", options->tokens, "of each rank, with --chain: e.g. 1 128 8192")
      ->check(CLI::Range(1, 1 << 20));
  sub->add_flag("--overlap", options->overlap,
                "with --chain: also forwards in halves, a dispatch beside the products before it");
  sub->add_flag("--shared", options->shared,
                "with --chain: also the model's shared experts, as v3 and glm-4.5 have one");
  sub->add_option("--expand-sms", options->expand_sms,
                  "with --chain: multiprocessors that copy rows by expert beside a dispatch, each "
                  "in its layer, e.g. 0 40")
      ->check(CLI::Range(0, 120));
  sub->add_option("--routing", options->routings,
                  "with --chain: even, zipf: experts drawn; gate, gate-zipf: the choices of a gate "
                  "of random weights, for words drawn evenly or as in texts")
      ->check(CLI::IsMember({"even", "zipf", "gate", "gate-zipf"}));
  add_duration(*sub, "--idle", options->idle, "before each launch of a burst");
  add_duration(*sub, "--warm-up", options->warm_up, "launches before the sustained ones");
  add_duration(*sub, "--timeout", options->timeout, "when to give up");
  add_figure_output(*sub, options->output);
  sub->callback(run(options, bench_moe));
}

}  // namespace crossdock::tools::bench
