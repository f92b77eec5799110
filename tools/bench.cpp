// `crossdock bench`: measures the library beside the ceilings of the machine, in one run. One
// subcommand an engine, here that of transfer, the others in files of their own; `transfer-child`
// is what the ceilings' helper process runs, and hidden.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <fmt/format.h>
#include <memory>

#include "base/strings.hpp"
#include "bench/commands.hpp"
#include "bench/statistics.hpp"
#include "bench/transfer.hpp"
#include "cli.hpp"
#include "commands.hpp"

namespace crossdock::tools {
namespace {

using bench::Case;
using bench::Measurement;
using bench::Rig;
using bench::TransferBench;
using transfer::Op;

constexpr std::uint32_t kOperations = 20'000;  // of a latency
constexpr std::uint64_t kLatencyBytes = 4096;  // the larger of the two

struct ChildOptions {
  std::string kind;
  std::uint64_t bytes = 0;
};

struct Family {
  std::string transport;
  bool engine_memory = true;
  std::vector<Case> cases;
  std::vector<Case> latencies;
};

Case block_case(const TransferBench& options, const std::string& label, std::uint64_t block,
                Op op) {
  Case shape{.transport = options.transport,
             .op = op,
             .block_bytes = block,
             .count = std::max<std::uint64_t>(1, options.bytes / block),
             .batch = options.batch,
             .threads = options.threads,
             .engine_memory = options.engine_memory,
             .scattered = options.scattered};
  shape.name = fmt::format("{} {} {}{}{}{}", shape.transport, to_string(op), label,
                           shape.scattered ? " scattered" : "",
                           shape.engine_memory ? "" : ", caller's memory",
                           shape.threads > 1 ? fmt::format(", {} threads", shape.threads) : "");
  return shape;
}

Case latency_case(const std::string& transport, const std::string& label, std::uint64_t block) {
  return {.name = fmt::format("{} write {}, one at a time", transport, label),
          .transport = transport,
          .block_bytes = block};
}

// What the command line asks for.
Result<Family> asked_for(const TransferBench& options) {
  Family family{options.transport, options.engine_memory, {}, {}};
  if (options.bytes < kLatencyBytes)
    return invalid_argument(fmt::format("--bytes {} must be at least {}, for the latency of 4 KiB",
                                        options.bytes, kLatencyBytes));
  std::vector<std::string> blocks = options.blocks;
  if (blocks.empty()) blocks = {"64KiB", "256KiB", "1MiB", "4MiB"};
  for (const auto& label : blocks) {
    CROSSDOCK_TRY(block, base::parse_size(label));
    if (block == 0 || block > options.bytes)
      return invalid_argument(
          fmt::format("--block {} must be between 1 byte and --bytes ({})", label, options.bytes));
    if (options.op != "read") family.cases.push_back(block_case(options, label, block, Op::kWrite));
    if (options.op != "write") family.cases.push_back(block_case(options, label, block, Op::kRead));
  }
  family.latencies = {latency_case(options.transport, "64 B", 64),
                      latency_case(options.transport, "4 KiB", kLatencyBytes)};
  return family;
}

// The figures of the README: shared memory, any memory, sockets, paged batches, many threads.
std::vector<Family> whole_suite(const TransferBench& given) {
  std::vector<Family> families;
  for (const auto& [transport, engine_memory] :
       {std::pair{"shm", true}, std::pair{"shm", false}, std::pair{"tcp", true}}) {
    TransferBench options = given;
    options.transport = transport;
    options.engine_memory = engine_memory;
    Family family{transport, engine_memory, {}, {}};
    for (const auto& [label, block] : {std::pair{"256 KiB", 256u << 10},
                                       std::pair{"1 MiB", 1u << 20}, std::pair{"4 MiB", 4u << 20}})
      for (const Op op : {Op::kWrite, Op::kRead})
        family.cases.push_back(block_case(options, label, block, op));
    options.scattered = true;
    for (const auto& [label, block, count] : {std::tuple{"24,576 x 32 KiB", 32u << 10, 24576u},
                                              std::tuple{"40,000 x 16 KiB", 16u << 10, 40000u},
                                              std::tuple{"196,608 x 4 KiB", 4u << 10, 196608u}}) {
      Case paged = block_case(options, label, block, Op::kWrite);
      paged.count = std::min<std::uint64_t>(count, options.bytes / block);
      family.cases.push_back(paged);
    }
    options.scattered = false;
    options.threads = 10;
    family.cases.push_back(block_case(options, "1 MiB", 1u << 20, Op::kWrite));
    if (engine_memory)
      family.latencies = {latency_case(transport, "64 B", 64),
                          latency_case(transport, "4 KiB", 4096)};
    families.push_back(std::move(family));
  }
  return families;
}

struct Ceilings {
  Measurement copy, vm, stream, ping_pong;
};

// Families whose data the kernel copies from process to process.
bool is_copied_by_kernel(const Family& family) {
  return family.transport != "tcp" && !family.engine_memory;
}

// Each goes into `results` at once: what was measured before a failure is told.
Result<Ceilings> measure_ceilings(const TransferBench& options, const std::vector<Family>& families,
                                  std::vector<Measurement>& results) {
  const bench::Scratch scratch{options.bytes, options.repeat};
  Ceilings ceilings;
  CROSSDOCK_TRY(copy, bench::measure_memcpy(scratch));
  results.push_back(ceilings.copy = std::move(copy));
  CROSSDOCK_TRY(pages, bench::measure_page_memcpy(scratch));
  results.push_back(std::move(pages));
  // Only where it is a ceiling: many containers forbid the call.
  if (std::ranges::any_of(families, is_copied_by_kernel)) {
    CROSSDOCK_TRY(vm, bench::measure_vm_writev(scratch, 1 << 20));
    results.push_back(ceilings.vm = std::move(vm));
  }
  CROSSDOCK_TRY(stream, bench::measure_socket_stream(scratch));
  results.push_back(ceilings.stream = std::move(stream));
  CROSSDOCK_TRY(ping_pong, bench::measure_socket_ping_pong(kOperations));
  results.push_back(ceilings.ping_pong = std::move(ping_pong));
  return ceilings;
}

// Paged batches beside our own large blocks: what the pages cost, whatever the machine gives.
void compare_pages(const Family& family, std::vector<Measurement>& measured) {
  const auto large = [&](const Case& shape) {
    return shape.block_bytes == 1u << 20 && shape.op == Op::kWrite && shape.threads == 1;
  };
  const auto found = std::ranges::find_if(family.cases, large);
  if (found == family.cases.end()) return;
  const std::vector<double> blocks =
      measured[static_cast<std::size_t>(found - family.cases.begin())].rates;
  for (std::size_t i = 0; i < family.cases.size(); ++i) {
    if (!family.cases[i].scattered) continue;
    std::vector<double> shares;
    for (std::size_t round = 0; round < blocks.size(); ++round)
      shares.push_back(measured[i].rates[round] / blocks[round]);
    measured.push_back({.name = fmt::format("{} against 1 MiB blocks", measured[i].name),
                        .value = median(shares),
                        .unit = "x"});
  }
}

Result<> measure_family(const TransferBench& options, const Family& family,
                        const Ceilings& ceilings, std::vector<Measurement>& results) {
  const Case first{.transport = family.transport, .engine_memory = family.engine_memory};
  CROSSDOCK_TRY(rig, Rig::create(first, options.bytes, options.peer));
  const bench::Scratch once{options.bytes, 1};
  const auto ceiling = [&]() -> Result<Measurement> {
    if (family.transport == "tcp") return bench::measure_socket_stream(once);
    return family.engine_memory ? bench::measure_memcpy(once)
                                : bench::measure_vm_writev(once, 1 << 20);
  };
  CROSSDOCK_TRY(measured, rig.throughput(family.cases, options.repeat, ceiling));
  for (auto& m : measured)
    m.ceiling = (family.transport == "tcp" ? ceilings.stream
                 : family.engine_memory    ? ceilings.copy
                                           : ceilings.vm)
                    .name;
  if (options.suite) compare_pages(family, measured);
  results.insert(results.end(), measured.begin(), measured.end());
  for (const auto& shape : family.latencies) {
    CROSSDOCK_TRY(m, rig.latency(shape, kOperations));
    if (family.transport == "tcp") {
      m.ceiling = ceilings.ping_pong.name;
      m.ratio = m.p50_us / ceilings.ping_pong.p50_us;
    }
    results.push_back(std::move(m));
  }
  return {};
}

// What the peer can do as well; read and 10-thread cases have no counterpart in its driver.
Result<std::vector<Case>> cases_of_peer(const TransferBench& options,
                                        const std::vector<Family>& families) {
  std::vector<Case> writes;
  if (options.vs.empty()) return writes;
  for (const auto& family : families)
    for (const auto& shape : family.cases)
      if (family.transport == "tcp" && shape.op == Op::kWrite && shape.threads == 1)
        writes.push_back(shape);
  if (writes.empty())
    return invalid_argument("--vs compares writes over tcp; add --transport tcp or --suite");
  return writes;
}

Result<> measure(const TransferBench& options, std::vector<Measurement>& results) {
  std::vector<Family> families;
  if (options.suite) {
    families = whole_suite(options);
  } else {
    CROSSDOCK_TRY(family, asked_for(options));
    families.push_back(std::move(family));
  }
  CROSSDOCK_TRY(writes, cases_of_peer(options, families));
  CROSSDOCK_TRY(ceilings, measure_ceilings(options, families, results));
  for (const auto& family : families)
    CROSSDOCK_CHECK_OK(measure_family(options, family, ceilings, results));
  if (!writes.empty()) CROSSDOCK_CHECK_OK(bench::measure_mooncake(options, writes, results));
  if (!options.suite) return {};
  for (auto* what :
       {bench::measure_submission, bench::measure_registration, bench::measure_creation}) {
    CROSSDOCK_TRY(m, what(options.repeat));
    results.push_back(std::move(m));
  }
  return {};
}

int bench_transfer(const TransferBench& options) {
  if (options.role == "target") return bench::run_target(options);
  if (options.role == "initiator" && options.peer.empty())
    return report(invalid_argument("--role initiator needs --peer, the name the target printed"));
  std::vector<Measurement> results;
  const auto done = measure(options, results);
  // What was measured before a failure is told all the same.
  if (!results.empty()) bench::print_report(options, results);
  return done.ok() ? kDone : report(done.error());
}

void add_transfer(CLI::App& group) {
  const auto options = std::make_shared<TransferBench>();
  CLI::App* sub = group.add_subcommand(
      "transfer", "The transfer engine between two processes, beside memcpy and a plain socket");
  sub->add_option("--transport", options->transport, "shm, tcp or loopback")
      ->check(CLI::IsMember({"shm", "tcp", "loopback"}));
  sub->add_option("--op", options->op, "write, read or both")
      ->check(CLI::IsMember({"write", "read", "both"}));
  sub->add_option("--block", options->blocks, "block sizes, e.g. 4KiB 1MiB");
  sub->add_option("--batch", options->batch, "blocks a batch; 0: all at once");
  add_size(*sub, "--bytes", options->bytes, "bytes a measurement, and of memory on each side");
  sub->add_option("--threads", options->threads, "threads that submit")->check(CLI::Range(1, 256));
  sub->add_option("--repeat", options->repeat, "runs; the median counts")
      ->check(CLI::Range(1, 1000));
  sub->add_flag("--engine-memory,!--user-memory", options->engine_memory,
                "memory the engine allocated, or the caller's");
  sub->add_flag("--scattered", options->scattered, "blocks in random order on both sides");
  sub->add_flag("--suite", options->suite, "every figure of the README");
  sub->add_option("--vs", options->vs, "a peer to run the same writes, in the same run")
      ->check(CLI::IsMember({"mooncake"}));
  sub->add_option("--vs-home", options->versus_home,
                  "with --vs: the folder its Python environment is made in, once");
  add_duration(*sub, "--vs-timeout", options->versus_timeout,
               "with --vs: the longest that its installation, and each of its runs, may take");
  sub->add_flag("--json", options->json, "one JSON object instead of a table");
  sub->add_option("--role", options->role,
                  "two hosts: target (prints its name, serves until stdin ends) or initiator")
      ->check(CLI::IsMember({"target", "initiator"}));
  sub->add_option("--peer", options->peer, "initiator: the target's name");
  sub->add_option("--listen", options->listen, "target: where it listens, host:port");
  sub->callback(run(options, bench_transfer));
}

void add_child(CLI::App& group) {
  const auto options = std::make_shared<ChildOptions>();
  CLI::App* sub = group.add_subcommand("transfer-child", "")->group("");
  sub->add_option("--kind", options->kind);
  sub->add_option("--bytes", options->bytes);
  sub->callback(run(options, [](const ChildOptions& given) {
    return bench::run_ceiling_child(given.kind, given.bytes);
  }));
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* group =
      app.add_subcommand("bench", "Measures the library beside the machine's ceilings");
  group->require_subcommand(1);
  add_transfer(*group);
  bench::add_symm(*group);
  bench::add_ep(*group);
  bench::add_moe(*group);
  bench::add_jit(*group);
  add_child(*group);
}

}  // namespace crossdock::tools
