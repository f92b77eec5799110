// `crossdock demo`: shows the library at work. `demo pd` hands KV caches from a prefill process to
// a decode process; `demo pd-worker` is what those processes run, and hidden. Main thread only.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <memory>

#include "cli.hpp"
#include "commands.hpp"
#include "demo/pd_run.hpp"
#include "demo/worker.hpp"

namespace crossdock::tools {
namespace {

using pd::Options;

// Pools stay well below what the machine has to spare, and below 4 GiB with all the rest.
constexpr std::uint64_t kMostMemory = std::uint64_t{3400} << 20;

std::uint64_t available_memory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  while (meminfo >> word) {
    std::uint64_t kib = 0;
    if (word == "MemAvailable:" && meminfo >> kib) return kib << 10;
  }
  return std::uint64_t{1} << 30;
}

Result<> settle_memory(Options& options) {
  CROSSDOCK_CHECK_OK(pd::check_page_tokens(options));
  const std::uint64_t available = available_memory();
  if (options.memory_bytes == 0) options.memory_bytes = std::min(kMostMemory, available / 2);
  if (options.memory_bytes > available)
    return invalid_argument(
        fmt::format("--memory {} MiB is more than the {} MiB this machine has "
                    "available",
                    options.memory_bytes >> 20, available >> 20));
  options.pool_bytes = options.memory_bytes / 100 * 45;  // the smaller of the two
  CROSSDOCK_TRY(pages, pd::pages_that_fit(options, options.pool_bytes));
  options.limit_pages = pages;
  return {};
}

Result<std::vector<pd::RunRecord>> run_all(const Options& options, const pd::Plan& plan) {
  std::vector<std::string> modes = {options.mode};
  if (options.mode == "both") modes = {"streamed", "batch"};
  if (options.fault != "none") modes.resize(1);
  std::vector<pd::RunRecord> runs;
  double rate = options.prefill_tokens_per_s;
  for (const std::string& mode : modes) {
    CROSSDOCK_TRY(run, pd::run_mode(options, plan, mode, rate));
    rate = run.rate_tokens_per_s;  // the same pace for both, so that they compare
    runs.push_back(std::move(run));
    if (!runs.back().problems.empty()) break;
  }
  return runs;
}

// False after a problem.
bool print(const Options& options, const pd::Plan& plan, const std::vector<pd::RunRecord>& runs) {
  if (options.fault != "none") return pd::print_fault(options, runs.front());
  (options.json ? pd::print_json : pd::print_report)(options, plan, runs);
  return std::ranges::all_of(runs, [](const pd::RunRecord& run) { return run.problems.empty(); });
}

// What the workers would find wrong one after the other, and tell as the end of a process: the
// settings, and the names of the transports.
Result<> check_settings(const Options& options) {
  transfer::EngineOptions engine_options = pd::engine_options(options);
  engine_options.config["trace.file"] = "";  // the timelines are those of the workers
  CROSSDOCK_TRY(engine, transfer::Engine::create(std::move(engine_options)));
  return engine.close(Deadline::in(std::chrono::seconds(5)));
}

// Before the run, which takes its time: the picture could not be kept.
Result<> check_timeline(const std::string& path) {
  if (path.empty()) return {};
  const bool is_new = !std::filesystem::exists(path);
  const bool writable = std::ofstream(path, std::ios::app).is_open();
  if (!writable) return errno_error(errno, fmt::format("write the picture {}", path));
  if (is_new) std::filesystem::remove(path);
  return {};
}

Result<> check(const Options& options) {
  if (options.json && options.fault != "none")
    return invalid_argument(
        "--json prints the figures of a run, and --fault tells what happened in words: give one of "
        "them");
  CROSSDOCK_CHECK_OK(check_timeline(options.timeline));
  return check_settings(options);
}

int demo_pd(const Options& given) {
  Options options = given;
  if (const auto checked = check(options); !checked.ok()) return report(checked.error());
  // With a fault, how long decode waits is what is shown; keep it short.
  if (options.fault != "none") options.timeout_s = std::min(options.timeout_s, 5u);
  if (const auto memory = settle_memory(options); !memory.ok()) return report(memory.error());
  const auto plan = pd::make_plan(options);
  if (!plan.ok()) return report(plan.error());
  const auto runs = run_all(options, *plan);
  if (!runs.ok()) return report(runs.error());
  const bool good = print(options, *plan, *runs);
  if (!options.timeline.empty())
    if (const auto written = pd::write_timeline(options.timeline, *plan, *runs); !written.ok())
      return report(written.error());
  return good ? kDone : kFailed;
}

int demo_pd_worker(const Options& options) {
  return options.role == "prefill" ? pd::run_prefill(options) : pd::run_decode(options);
}

// What the command and its workers understand alike.
void add_common(CLI::App& app, Options& o) {
  app.add_option("--transport", o.transport, "auto, or a list such as shm or tcp")
      ->capture_default_str();
  CLI::Option* trace =
      app.add_option("--trace", o.trace, "Requests to play; default: the excerpt that comes along");
  app.add_option("--model", o.model, "qwen3-30b-a3b, llama-3.1-8b or deepseek-v3")
      ->capture_default_str();
  app.add_option("--kv-shape", o.kv_shape,
                 "Another model: layers=N,heads=N,dim=N,dtype=BYTES[,latent]");
  app.add_option("--order", o.order, "Layout of the page pools")
      ->check(CLI::IsMember({"layer-first", "block-first"}))
      ->capture_default_str();
  app.add_option("--requests", o.requests, "How many requests")->capture_default_str();
  app.add_option("--tokens", o.tokens, "Synthetic requests of that many tokens, not the trace")
      ->check(CLI::Range(1u, 1u << 24))
      ->excludes(trace);
  app.add_option("--page-tokens", o.page_tokens, "Tokens in a page")->capture_default_str();
  app.add_option("--timeout", o.timeout_s, "Seconds that decode waits for a request")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();
}

void add_pd(CLI::App& demo) {
  auto options = std::make_shared<Options>();
  CLI::App* pd = demo.add_subcommand(
      "pd", "Two processes: prefill hands KV caches to decode, which verifies every byte");
  add_common(*pd, *options);
  pd->add_option("--mode", options->mode, "streamed layer by layer, one batch at the end, or both")
      ->check(CLI::IsMember({"streamed", "batch", "both"}))
      ->capture_default_str();
  pd->add_option("--prefill-tokens-per-s", options->prefill_tokens_per_s,
                 "Pace of prefill; default: measured so that the link keeps up")
      ->check(CLI::PositiveNumber);
  add_size(*pd, "--memory", options->memory_bytes, "Both page pools; 0: from what is available");
  pd->add_option("--timeline", options->timeline, "Write a picture of the run to this HTML file");
  pd->add_option("--fault", options->fault, "What happens when a process dies or hangs")
      ->check(CLI::IsMember({"none", "kill-prefill", "kill-decode", "stop-prefill"}));
  pd->add_flag("--json", options->json, "One JSON object instead of the table");
  pd->callback(run(options, demo_pd));
}

void add_pd_worker(CLI::App& demo) {
  auto options = std::make_shared<Options>();
  CLI::App* worker = demo.add_subcommand("pd-worker", "");
  worker->group("");  // not in the help
  add_common(*worker, *options);
  worker->add_option("--mode", options->mode);
  worker->add_option("--role", options->role)
      ->required()
      ->check(CLI::IsMember({"prefill", "decode"}));
  worker->add_option("--event-fd", options->event_fd)->required();
  worker->add_option("--pool-bytes", options->pool_bytes)->required();
  worker->add_option("--limit-pages", options->limit_pages)->required();
  worker->callback(run(options, demo_pd_worker));
}

}  // namespace

void add_demo(CLI::App& app) {
  CLI::App* demo = app.add_subcommand("demo", "Shows the library at work");
  demo->require_subcommand(1);
  add_pd(*demo);
  add_pd_worker(*demo);
}

}  // namespace crossdock::tools
