// `crossdock bench ep`: dispatch and combine on GPUs, every number of tokens with every number of
// SMs: what arrives is compared first, then calls are timed (the clocks: ep_timer.hpp). In the twin
// there is nothing to time: there it only compares.
//
//   _us          period of calls back to back in a CUDA graph, everything they launch
//   _kernel_us   one call's launches alone, from event to event
//   _call_us     the host's time for one call
//   _logical     DeepEP's figure, bytes received with those from the rank itself
//   _off_rank    what crossed the wire
//
// A period is compared with the time of its bytes at the rate that the link gives in this run (the
// figures wire_push, wire_pull: ep_wire.hpp); one GPU has no link, there with that of local copies
// by as many SMs.
//
//   one process, all GPUs      crossdock bench ep
//   one process a GPU          crossdock bench ep --rank R --world W --store tcp://host:port
//                              torchrun --no-python --nproc-per-node W crossdock bench ep
//
// SPDX-License-Identifier: Apache-2.0
#include "bench/ep.hpp"

#include <fmt/format.h>

#include <crossdock/symm/exchange.hpp>

#include "base/config.hpp"
#include "bench/commands.hpp"
#include "bench/processes.hpp"
#include "cli.hpp"
#include "cuda/device.hpp"
#include "rendezvous/store_server.hpp"

namespace crossdock::tools::bench {
namespace {

constexpr std::uint32_t kTwinWorld = 4;

// The ranks of this process. `suffix` tells the groups of one run apart in the store.
Result<symm::GroupOptions> ranks_of(const EpBench& options, std::uint32_t gpus,
                                    const std::string& suffix) {
  symm::GroupOptions ranks{.world = options.world > 0 ? options.world : gpus};
  ranks.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout);
  if (!options.rank) {
    CROSSDOCK_TRY(config, base::Config::load());
    if (ranks.world > gpus && !config.boolean("symm.share_gpus"))
      return invalid_argument(fmt::format(
          "--world {}: one process has at most one rank for each of its {} GPUs; start "
          "one process a rank with --rank and --store, or let ranks share GPUs (setting "
          "symm.share_gpus): their times are not those of a wire then",
          ranks.world, gpus));
    return ranks;
  }
  if (options.world == 0 || options.store.empty())
    return invalid_argument("--rank needs --world and --store");
  const std::uint32_t device = device_of(options.process(), gpus);
  ranks.ranks = {{.rank = *options.rank, .device = static_cast<int>(device)}};
  CROSSDOCK_TRY(exchange, symm::open_store_exchange(options.store, options.name + suffix,
                                                    {*options.rank, options.world},
                                                    Deadline::in(options.timeout)));
  ranks.exchange = std::move(exchange);
  return ranks;
}

// Where the figures go, and what all of them have in common.
struct Run {
  const EpBench& options;
  std::uint32_t gpus;
  EpWire* wire;
  FigureReport& report;

  Result<EpBenchRig> rig(EpBenchRig::Shape shape, const std::string& suffix) const {
    shape.wire = wire;
    CROSSDOCK_TRY(ranks, ranks_of(options, gpus, suffix));
    CROSSDOCK_TRY(rig, EpBenchRig::create(options, ranks, shape));
    CROSSDOCK_CHECK_OK(rig.verify(Deadline::in(options.timeout)));
    return rig;
  }
};

// One number of tokens with one number of SMs.
Result<> measure_one(const Run& run, std::uint32_t tokens, std::uint32_t sms) {
  const EpBench& options = run.options;
  std::vector<Figure>& figures = run.report.figures;
  const Deadline deadline = Deadline::in(options.timeout);
  const std::string suffix =
      (tokens == options.tokens.front() ? "" : fmt::format("_{}tokens", tokens)) +
      (sms == options.sms.front() ? "" : fmt::format("_{}sm", sms));
  {
    CROSSDOCK_TRY(rig, run.rig({.tokens = tokens, .sms = sms}, suffix));
    CROSSDOCK_CHECK_OK(measure_ep(rig, options, suffix, figures, deadline));
    if (options.expanded)
      CROSSDOCK_CHECK_OK(measure_layouts(rig, options, suffix, figures, deadline));
    if (options.beside_gemm)
      CROSSDOCK_CHECK_OK(measure_beside(rig, options, suffix, figures, deadline));
  }
  for (std::size_t i = 0; options.expanded && i < options.expand_sms.size(); ++i) {
    const std::uint32_t n = options.expand_sms[i];
    const std::string own = suffix + (i == 0 ? "" : fmt::format("_{}copy", n));
    CROSSDOCK_TRY(rig,
                  run.rig({.tokens = tokens, .sms = sms, .expand_sms = n != 0 ? n : ep::kAutoSms},
                          own + "_expanded"));
    CROSSDOCK_CHECK_OK(measure_expanded(rig, options, own, figures, deadline));
  }
  const std::uint32_t world = options.world > 0 ? options.world : run.gpus;
  if (!options.push || world < 2 || sms == 1) return {};
  CROSSDOCK_TRY(rig, run.rig({.tokens = tokens, .sms = sms, .push = true}, suffix + "_push"));
  return measure_push(rig, options, suffix, figures, deadline);
}

// So many tokens on the path for few.
Result<> measure_few(const Run& run, std::uint32_t tokens) {
  const EpBench& options = run.options;
  std::vector<Figure>& figures = run.report.figures;
  const std::string suffix = fmt::format("_small{}", tokens);
  const Deadline deadline = Deadline::in(options.timeout);
  EpBenchRig::Shape shape{.tokens = tokens, .sms = options.small_sms, .small = true};
  {
    CROSSDOCK_TRY(rig, run.rig(shape, suffix));
    const ep::Sizes& memory = rig.group().memory();
    run.report.facts.emplace_back(
        "memory" + suffix,
        fmt::format("{:.1f} MB",
                    static_cast<double>(memory.window_bytes + memory.local_bytes) / 1e6));
    CROSSDOCK_CHECK_OK(rig.verify(deadline, true));
    CROSSDOCK_CHECK_OK(measure_small(rig, options, suffix, figures, deadline));
    if (options.compressed)
      CROSSDOCK_CHECK_OK(measure_compressed(rig, options, suffix, figures, deadline));
  }
  if (options.expanded) {
    shape.expand_sms = options.small_expand_sms;
    CROSSDOCK_TRY(rig, run.rig(shape, suffix + "_expanded"));
    CROSSDOCK_CHECK_OK(measure_expanded(rig, options, suffix, figures, deadline));
    CROSSDOCK_CHECK_OK(measure_layouts(rig, options, suffix, figures, deadline));
    shape.expand_sms = 0;
  }
  if (!options.masks) return {};
  shape.masks = true;
  CROSSDOCK_TRY(rig, run.rig(shape, suffix + "_masks"));
  return measure_masks(rig, options, suffix, figures, deadline);
}

// What all ranks at once push and pull in this run. Ranks that share a GPU have no link to compare
// with.
Result<std::optional<EpWire>> measure_wire(const EpBench& options, std::uint32_t gpus,
                                           FigureReport& report) {
  const std::uint32_t world = options.world > 0 ? options.world : gpus;
  if (world > gpus) {
    report.facts.emplace_back("compared_with", "nothing: ranks share GPUs");
    return std::optional<EpWire>();
  }
  CROSSDOCK_TRY(ranks, ranks_of(options, gpus, "_wire"));
  CROSSDOCK_TRY(wire, EpWire::create(ranks, options.repeat, Deadline::in(options.timeout)));
  report.facts.emplace_back("compared_with", wire.local()
                                                 ? "local copies: one rank has no link"
                                                 : "the link, all ranks at once, in this run");
  if (!wire.local()) {
    CROSSDOCK_TRY(push, wire.gb_per_s(symm::Direction::kPush, 0));
    CROSSDOCK_TRY(pull, wire.gb_per_s(symm::Direction::kPull, 0));
    report.figures.push_back({.name = "wire_push", .value = push, .unit = "GB/s"});
    report.figures.push_back({.name = "wire_pull", .value = pull, .unit = "GB/s"});
  }
  return std::optional<EpWire>(std::move(wire));
}

// What was measured before something failed is reported too.
Result<> measure(const EpBench& options, FigureReport& report) {
  CROSSDOCK_TRY(config, base::Config::load());
  CROSSDOCK_TRY(driver, cuda::Driver::load({.library = config.string("cuda.driver")}));
  CROSSDOCK_TRY(count, cuda::device_count(*driver));
  const auto gpus = static_cast<std::uint32_t>(count);
  add_gpu_facts(report, driver);
  const std::uint32_t world = options.world > 0 ? options.world : gpus;
  report.facts.emplace_back("world", std::to_string(world));
  report.facts.emplace_back("processes", options.rank ? std::to_string(world) : "1");
  if (!options.rank && world > gpus) report.facts.emplace_back("gpus_shared", std::to_string(gpus));
  report.facts.emplace_back("hidden", std::to_string(options.hidden));
  report.facts.emplace_back("experts", std::to_string(options.experts));
  report.facts.emplace_back("top_k", std::to_string(options.top_k));
  report.facts.emplace_back("routing", options.skewed ? "zipf" : "even");
  report.facts.emplace_back("overlap", options.overlap ? "yes" : "no");
  report.facts.emplace_back("host_counts", options.host_counts ? "yes" : "no");
  const std::uint32_t sms = options.sms.front();
  const bool few = options.small_tokens != std::vector<std::uint32_t>{0};
  report.facts.emplace_back("dispatch_sms",
                            std::to_string(sms != 0 ? sms : ep::default_dispatch_sms(world)));
  report.facts.emplace_back("combine_sms",
                            std::to_string(sms != 0 ? sms : ep::default_combine_sms(world)));
  if (options.expanded) {
    const std::uint32_t copies = options.expand_sms.front();
    report.facts.emplace_back(
        "expand_sms",
        std::to_string(copies != 0 ? copies : ep::default_expand_sms(world, options.top_k)));
  }
  if (options.expanded && few)
    report.facts.emplace_back("small_expand_sms", std::to_string(options.small_expand_sms));
  report.facts.emplace_back("tokens", std::to_string(options.tokens.front()));
  // Else a period of few tokens is longer than the aims are about, and has none.
  if (few)
    report.facts.emplace_back("aims_of_few_tokens",
                              "of launches that overlap, without host counts, on four ranks");
  CROSSDOCK_TRY(wire, measure_wire(options, gpus, report));
  const Run all{options, gpus, wire ? &*wire : nullptr, report};
  for (const std::uint32_t tokens : options.tokens)
    for (const std::uint32_t blocks : options.sms)
      if (!options.only_small) CROSSDOCK_CHECK_OK(measure_one(all, tokens, blocks));
  for (const std::uint32_t tokens : options.small_tokens)
    if (tokens != 0) CROSSDOCK_CHECK_OK(measure_few(all, tokens));
  report.facts.emplace_back("data", "right");
  return {};
}

// Shapes that the twin runs in seconds.
Result<> verify_in_twin(const EpBench& options, FigureReport& report) {
  EpBench small = options;
  small.hidden = 512;
  small.experts = 32;
  small.top_k = 4;
  const Deadline deadline = Deadline::in(options.timeout);
  const std::uint32_t world = options.world > 0 ? options.world : kTwinWorld;
  const symm::GroupOptions ranks{.world = world, .backend = symm::Backend::kCpu};
  using Shape = EpBenchRig::Shape;
  std::vector<Shape> shapes = {{.tokens = 40, .sms = 2},
                               {.tokens = 40, .sms = 2, .push = true},
                               {.tokens = 40, .small = true},
                               {.tokens = 3, .small = true}};
  if (options.masks) shapes.push_back({.tokens = 40, .small = true, .masks = true});
  if (options.expanded) shapes.push_back({.tokens = 40, .small = true, .expand_sms = world});
  for (const Shape& shape : shapes) {
    CROSSDOCK_TRY(rig, EpBenchRig::create(small, ranks, shape));
    CROSSDOCK_CHECK_OK(rig.verify(deadline));
    if (options.expanded)
      for (const bool beside : {false, true})
        if (!beside || shape.expand_sms != 0)
          CROSSDOCK_CHECK_OK(verify_expanded(rig, small, beside, deadline));
    if (!shape.small) continue;
    CROSSDOCK_CHECK_OK(rig.verify(deadline, true));
    for (const ep::Payload payload : {ep::Payload::kFp8, ep::Payload::kLogFmt10})
      if (options.compressed) CROSSDOCK_CHECK_OK(rig.verify_payload(payload, 1.0 / 16, deadline));
  }
  report.facts = {{"backend", "twin"},
                  {"world", std::to_string(world)},
                  {"shapes", std::to_string(shapes.size())},
                  {"data", "right"}};
  return {};
}

// The options with what a launcher has told this process.
Result<ProcessOptions> join(EpBench& options) {
  const ProcessOptions given = options.process();
  CROSSDOCK_TRY(filled, with_launcher(given));
  options.rank = filled.rank;
  options.world = filled.world;
  options.local_rank = filled.local_rank;
  options.store = filled.store;
  return given;
}

Result<> run_bench(EpBench& options, FigureReport& figures) {
  CROSSDOCK_TRY(given, join(options));
  if (options.backend == "twin") return verify_in_twin(options, figures);
  CROSSDOCK_TRY(server, serve_store(given, options.process(), options.timeout));
  return measure(options, figures);
}

int bench_ep(const EpBench& given) {
  EpBench options = given;
  FigureReport figures{.schema = "crossdock.bench.ep/1"};
  const auto result = run_bench(options, figures);
  if (options.rank.value_or(0) == 0 && (result.ok() || !figures.figures.empty())) {
    const auto printed = print_figures(figures, options.output);
    if (!printed.ok()) return report(printed.error());
  }
  return result.ok() ? kDone : report(result.error());
}

void add_processes(CLI::App& sub, EpBench& options) {
  sub.add_option(
      "--rank", options.rank,
      "one process a rank: which one this is; default RANK, as torchrun sets it, and for "
      "--world WORLD_SIZE");
  sub.add_option("--device", options.device,
                 "one process a rank: its GPU; default LOCAL_RANK, else the rank's number, modulo "
                 "the GPUs that it sees");
  sub.add_option("--store", options.store,
                 "one process a rank: where they meet, a store's URL; default one of rank 0 at "
                 "MASTER_ADDR and MASTER_PORT");
  sub.add_option("--name", options.name, "one process a rank: name of this run in the store");
}

}  // namespace

void add_ep(CLI::App& group) {
  const auto options = std::make_shared<EpBench>();
  CLI::App* sub = group.add_subcommand(
      "ep", "Expert parallelism on GPUs: dispatch and combine, times and bandwidth by SM count");
  sub->add_option("--backend", options->backend, "gpu, or twin: on the CPU, results only")
      ->check(CLI::IsMember({"gpu", "twin"}));
  sub->add_option("--world", options->world, "ranks; 0: a rank for each GPU, 4 in the twin")
      ->check(CLI::Range(0, 32));
  sub->add_option("--tokens", options->tokens, "tokens of a rank, e.g. 4096 128");
  sub->add_option("--hidden", options->hidden, "values of a token, a multiple of 512")
      ->check(CLI::Range(512, 16384));
  sub->add_option("--experts", options->experts, "experts of all ranks");
  sub->add_option("--top-k", options->top_k, "choices of a token")->check(CLI::Range(1, 32));
  sub->add_option("--sms", options->sms,
                  "multiprocessors of a call, e.g. 12 8 16; 0: the library's choice");
  sub->add_option("--small-tokens", options->small_tokens,
                  "tokens of a rank on the path for few tokens, e.g. 1 128; 0: none");
  sub->add_option("--small-sms", options->small_sms,
                  "multiprocessors that send on that path; 0: the library's choice")
      ->check(CLI::Range(0, 32));
  sub->add_option("--small-combine-sms", options->small_combine_sms,
                  "multiprocessors of a combine on that path; 0: the library's choice")
      ->check(CLI::Range(0, 132));
  sub->add_flag("!--no-packets", options->small_packets,
                "a handful of tokens by bulk stores and flags too");
  sub->add_flag("--compressed", options->compressed,
                "combines with compressed rows on that path too, and from sums by expert");
  sub->add_flag("--masks", options->masks, "groups that may mask ranks on that path too");
  sub->add_flag("--only-small", options->only_small, "figures of that path only");
  sub->add_flag("--skewed", options->skewed, "choices by a Zipf law instead of evenly");
  sub->add_flag("--push", options->push, "combine by push too, on the same SMs");
  sub->add_flag("--expanded", options->expanded,
                "dispatch into the expanded layout too, and combine from it; of few tokens too");
  sub->add_option("--small-expand-sms", options->small_expand_sms,
                  "multiprocessors that copy rows by expert in a dispatch of few tokens")
      ->check(CLI::Range(1, 120));
  sub->add_option(
         "--expand-sms", options->expand_sms,
         "multiprocessors that copy rows by expert beside a dispatch, e.g. 32 24 48; 0: the "
         "library's choice")
      ->check(CLI::Range(0, 120));
  sub->add_flag("--beside-gemm", options->beside_gemm,
                "dispatch and combine beside a product on the other multiprocessors too");
  sub->add_flag("--overlap", options->overlap, "launches that overlap the one before them");
  sub->add_flag("!--no-host-counts", options->host_counts,
                "numbers of rows are not told to the host");
  sub->add_option("--repeat", options->repeat, "runs; the median counts")
      ->check(CLI::Range(1, 1000));
  add_duration(*sub, "--timeout", options->timeout, "when to give up");
  add_figure_output(*sub, options->output);
  add_processes(*sub, *options);
  sub->callback(run(options, bench_ep));
}

}  // namespace crossdock::tools::bench
