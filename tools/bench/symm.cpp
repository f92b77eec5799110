// `crossdock bench symm`: the symmetric layer on GPUs: latencies of barriers and flags, bandwidth
// of pushes and pulls by SM count, heap creation; beside the figures of a known host and the copy
// engine in the same run. In the twin there is nothing to time: there it only checks results.
//
//   one process, all GPUs      crossdock bench symm
//   one process a GPU          crossdock bench symm --rank R --world W --store tcp://host:port
//
// SPDX-License-Identifier: Apache-2.0
#include "bench/symm.hpp"

#include <cstdio>
#include <fmt/format.h>

#include <crossdock/symm/exchange.hpp>

#include "base/config.hpp"
#include "bench/commands.hpp"
#include "cli.hpp"
#include "cuda/device.hpp"

namespace crossdock::tools::bench {
namespace {

constexpr std::uint32_t kTwinWorld = 4;

Result<const cuda::Driver*> load_driver() {
  CROSSDOCK_TRY(config, base::Config::load());
  return cuda::Driver::load({.library = config.string("cuda.driver")});
}

// The ranks of this process. `suffix` tells the groups of one run apart in the store.
Result<symm::GroupOptions> group_options(const SymmBench& options, std::uint32_t gpus,
                                         const char* suffix) {
  symm::GroupOptions group{.world = options.world > 0 ? options.world : gpus};
  group.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout);
  if (!options.rank) {
    if (group.world > gpus)
      return invalid_argument(
          fmt::format("--world {}: one process has at most one rank for each of its {} GPUs; start "
                      "one process a rank with --rank and --store",
                      group.world, gpus));
    return group;
  }
  if (options.world == 0 || options.store.empty())
    return invalid_argument("--rank needs --world and --store");
  group.ranks = {{.rank = *options.rank, .device = static_cast<int>(*options.rank % gpus)}};
  CROSSDOCK_TRY(exchange, symm::open_store_exchange(options.store, options.name + suffix,
                                                    {*options.rank, options.world},
                                                    Deadline::in(options.timeout)));
  group.exchange = std::move(exchange);
  return group;
}

Result<FigureReport> measure(const SymmBench& options) {
  const Deadline deadline = Deadline::in(options.timeout);
  CROSSDOCK_TRY(driver, load_driver());
  CROSSDOCK_TRY(count, cuda::device_count(*driver));
  const auto gpus = static_cast<std::uint32_t>(count);
  CROSSDOCK_TRY(group, group_options(options, gpus, ""));
  FigureReport report{.schema = "crossdock.bench.symm/1"};
  add_gpu_facts(report, driver);
  report.facts.emplace_back("world", std::to_string(group.world));
  report.facts.emplace_back("processes", options.rank ? std::to_string(group.world) : "1");
  report.facts.emplace_back("repeat", std::to_string(options.repeat));
  report.facts.emplace_back("bytes_a_rank", std::to_string(options.bytes));
  CROSSDOCK_TRY(rig, SymmRig::create(options, group, *driver, deadline));
  CROSSDOCK_CHECK_OK(rig.verify(deadline));
  report.facts.emplace_back("data", "right");
  if (options.heap > 0) {
    CROSSDOCK_TRY(other, group_options(options, gpus, "-heap"));
    CROSSDOCK_TRY(figure, measure_heap(options, other, *driver));
    report.figures.push_back(std::move(figure));
  }
  CROSSDOCK_CHECK_OK(rig.measure_latencies(report.figures, deadline));
  CROSSDOCK_CHECK_OK(rig.measure_bandwidth(report.figures, deadline));
  CROSSDOCK_TRY(collectives, group_options(options, gpus, "-coll"));
  CROSSDOCK_CHECK_OK(measure_collectives(options, collectives, report.figures));
  return report;
}

// Every kernel in the twin, under as many schedules as --repeat says.
Result<FigureReport> verify_in_twin(const SymmBench& options) {
  const Deadline deadline = Deadline::in(options.timeout);
  const std::uint32_t world = options.world > 0 ? options.world : kTwinWorld;
  const symm::SuiteShape shape;
  device::SymmetricLayout layout;
  const symm::SuiteAreas areas = symm::add_suite(layout, world, shape);
  CROSSDOCK_TRY(group,
                symm::Group::create({.world = world, .backend = symm::Backend::kCpu}, layout));
  CROSSDOCK_TRY(launcher, symm::Launcher::create(*group, nullptr));
  CROSSDOCK_TRY(suite, symm::Suite::create(launcher, areas, shape, deadline));
  FigureReport report{.schema = "crossdock.bench.symm/1"};
  report.facts = {{"backend", "twin"},
                  {"world", std::to_string(world)},
                  {"schedules", std::to_string(options.repeat)}};
  for (std::uint32_t seed = 1; seed <= options.repeat; ++seed) {
    launcher.set_schedule({.seed = seed, .weak = true, .stale = true, .fire_deadlines = true});
    CROSSDOCK_CHECK_OK(suite.run_all(deadline));
  }
  for (const symm::Suite::Step& step : symm::Suite::steps())
    report.facts.emplace_back(step.name, "right");
  return report;
}

int bench_symm(const SymmBench& options) {
  const auto result = options.backend == "twin" ? verify_in_twin(options) : measure(options);
  if (!result.ok()) return report(result.error());
  if (options.rank.value_or(0) != 0) return kDone;
  const auto printed = print_figures(*result, options.output);
  return printed.ok() ? kDone : report(printed.error());
}

}  // namespace

void add_symm(CLI::App& group) {
  const auto options = std::make_shared<SymmBench>();
  CLI::App* sub = group.add_subcommand(
      "symm", "Symmetric memory on GPUs: barriers, flags, pushes and pulls beside a known host");
  sub->add_option("--backend", options->backend, "gpu, or twin: on the CPU, results only")
      ->check(CLI::IsMember({"gpu", "twin"}));
  sub->add_option("--world", options->world, "ranks; 0: a rank for each GPU, 4 in the twin")
      ->check(CLI::Range(0, 1024));
  sub->add_option("--sms", options->sms, "multiprocessors that move rows, e.g. 8 16 132");
  add_size(*sub, "--bytes", options->bytes, "bytes that a rank moves in a run");
  sub->add_option("--repeat", options->repeat, "runs (twin: schedules); the median counts")
      ->check(CLI::Range(1, 1000));
  add_size(*sub, "--heap", options->heap, "window whose creation is timed; 0: none");
  add_duration(*sub, "--timeout", options->timeout, "when to give up");
  add_figure_output(*sub, options->output);
  sub->add_option("--rank", options->rank, "one process a rank: which one this is");
  sub->add_option("--store", options->store, "one process a rank: where they meet, a store's URL");
  sub->add_option("--name", options->name, "one process a rank: name of this run in the store");
  sub->callback(run(options, bench_symm));
}

}  // namespace crossdock::tools::bench
