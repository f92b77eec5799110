// What the demo prints: a table for people with both modes side by side, one JSON object for
// programs, and the account of a fault. Command process only.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <string>

#include "demo/pd_run.hpp"

namespace crossdock::tools::pd {
namespace {

// Row of the side-by-side table; `value` formats one run's cell.
template <class Value>
void print_row(const char* label, const std::vector<RunRecord>& runs, Value value) {
  fmt::print("  {:<42}", label);
  for (const RunRecord& run : runs)
    fmt::print("{:>16}", value(run));
  fmt::print("\n");
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
    else
      out += c;
  }
  return out;
}

std::string json_list(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts)
    out += fmt::format("{}\"{}\"", out.empty() ? "" : ", ", escaped(text));
  return "[" + out + "]";
}

double cpu_per_gb(const RunRecord& run) {
  const double gigabytes = static_cast<double>(run.bytes_received) / 1e9;
  return gigabytes > 0 ? (run.cpu_prefill_s + run.cpu_decode_s) / gigabytes : 0;
}

const RunRecord* find_mode(const std::vector<RunRecord>& runs, const std::string& mode) {
  for (const RunRecord& run : runs)
    if (run.mode == mode) return &run;
  return nullptr;
}

// Batch p50 over streamed p50; 0 when one of them is missing.
double speedup(const std::vector<RunRecord>& runs) {
  const RunRecord* streamed = find_mode(runs, "streamed");
  const RunRecord* batch = find_mode(runs, "batch");
  if (streamed == nullptr || batch == nullptr || streamed->handoff_ms(0.5) <= 0) return 0;
  return batch->handoff_ms(0.5) / streamed->handoff_ms(0.5);
}

void print_problems(const std::vector<RunRecord>& runs) {
  for (const RunRecord& run : runs)
    for (const std::string& problem : run.problems)
      fmt::print("PROBLEM ({}): {}\n", run.mode, problem);
}

void print_run_json(const RunRecord& run) {
  fmt::print(
      "    {{\"mode\": \"{}\", \"requests_verified\": {}, \"bytes_received\": {}, "
      "\"bytes_verified\": {}, \"pages_verified\": {}, \"pages_shared\": {}, ",
      run.mode, run.num_verified(), run.bytes_received, run.verified_bytes(), run.verified_pages(),
      run.shared_pages);
  fmt::print(
      "\"wall_s\": {:.3f}, \"gb_per_s\": {:.3f}, \"prefill_tokens_per_s\": {:.0f}, "
      "\"handoff_ms_p50\": {:.3f}, \"handoff_ms_p99\": {:.3f}, ",
      run.wall_s(), run.gb_per_s(), run.rate_tokens_per_s, run.handoff_ms(0.5),
      run.handoff_ms(0.99));
  fmt::print("\"cpu_s_prefill\": {:.2f}, \"cpu_s_decode\": {:.2f}, \"problems\": {}}}",
             run.cpu_prefill_s, run.cpu_decode_s, json_list(run.problems));
}

}  // namespace

void print_report(const Options& options, const Plan& plan, const std::vector<RunRecord>& runs) {
  fmt::print("prefill -> decode over {}: {} requests, {} ({} B a token)\n", options.transport,
             plan.jobs.size(), plan.shape.name, plan.shape.token_bytes());
  fmt::print("  {}\n", plan.shape.describe());
  fmt::print("  pools of {} MiB together; {} requests were too long for them\n\n",
             options.memory_bytes >> 20, plan.skipped);
  print_row("", runs, [](const RunRecord& r) { return r.mode; });
  print_row("prefill done -> all KV at decode, p50 (ms)", runs,
            [](const RunRecord& r) { return fmt::format("{:.2f}", r.handoff_ms(0.5)); });
  print_row("prefill done -> all KV at decode, p99 (ms)", runs,
            [](const RunRecord& r) { return fmt::format("{:.2f}", r.handoff_ms(0.99)); });
  print_row("prefill pace (tokens/s)", runs,
            [](const RunRecord& r) { return fmt::format("{:.0f}", r.rate_tokens_per_s); });
  print_row("KV moved (GB)", runs, [](const RunRecord& r) {
    return fmt::format("{:.2f}", static_cast<double>(r.bytes_received) / 1e9);
  });
  print_row("KV moved per second of the run (GB/s)", runs,
            [](const RunRecord& r) { return fmt::format("{:.2f}", r.gb_per_s()); });
  print_row("CPU of both processes (s)", runs, [](const RunRecord& r) {
    return fmt::format("{:.1f}", r.cpu_prefill_s + r.cpu_decode_s);
  });
  print_row("CPU (s per GB, with making and checking)", runs,
            [](const RunRecord& r) { return fmt::format("{:.2f}", cpu_per_gb(r)); });
  print_row("pages shared instead of sent", runs,
            [](const RunRecord& r) { return fmt::format("{}", r.shared_pages); });
  print_row("verified byte for byte (GB)", runs, [](const RunRecord& r) {
    return fmt::format("{:.2f}", static_cast<double>(r.verified_bytes()) / 1e9);
  });
  print_row("verified pages", runs,
            [](const RunRecord& r) { return fmt::format("{}", r.verified_pages()); });
  print_row("verified requests", runs, [&](const RunRecord& r) {
    return fmt::format("{} of {}", r.num_verified(), r.requests.size());
  });
  if (const double factor = speedup(runs); factor > 1)
    fmt::print("\n  streamed layer by layer, KV is complete {:.1f} times sooner after prefill\n",
               factor);
  print_problems(runs);
}

void print_json(const Options& options, const Plan& plan, const std::vector<RunRecord>& runs) {
  fmt::print(
      "{{\n  \"demo\": \"pd\", \"transport\": \"{}\", \"model\": \"{}\", "
      "\"token_bytes\": {}, \"requests\": {}, \"requests_skipped\": {}, "
      "\"memory_bytes\": {},\n",
      escaped(options.transport), escaped(plan.shape.name), plan.shape.token_bytes(),
      plan.jobs.size(), plan.skipped, options.memory_bytes);
  if (const double factor = speedup(runs); factor > 0)
    fmt::print("  \"handoff_p50_batch_over_streamed\": {:.2f},\n", factor);
  fmt::print("  \"runs\": [\n");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    print_run_json(runs[i]);
    fmt::print("{}\n", i + 1 < runs.size() ? "," : "");
  }
  fmt::print("  ]\n}}\n");
}

bool print_fault(const Options& options, const RunRecord& run) {
  if (run.fault_ns == 0) {
    fmt::print("the fault was never injected: no request came that far\n");
    return false;
  }
  const bool decode_survives = options.fault != "kill-decode";
  fmt::print("{} in the middle of a request; {} went on and saw:\n", options.fault,
             decode_survives ? "decode" : "prefill");
  for (const std::string& error : run.survivor_errors)
    fmt::print("  {}\n", error);
  if (run.survivor_errors.empty()) fmt::print("  nothing (PROBLEM: it must learn of the fault)\n");
  if (run.first_error_ns > run.fault_ns)
    fmt::print("first error after {:.1f} ms\n",
               static_cast<double>(run.first_error_ns - run.fault_ns) / 1e6);
  for (std::size_t i = 0; i < run.survivor_pool.size(); ++i) {
    const PoolRecord& pool = run.survivor_pool[i];
    const bool last = i + 1 == run.survivor_pool.size();
    fmt::print("pages of {} {}: {} in use, {} in quarantine, of {}\n",
               decode_survives ? "decode" : "prefill", last ? "at the end" : "after the errors",
               pool.in_use, pool.quarantined, pool.total);
  }
  print_problems({run});
  const bool returned = !run.survivor_pool.empty() && run.survivor_pool.back().in_use == 0 &&
                        run.survivor_pool.back().quarantined == 0;
  fmt::print("{}\n", returned ? "all pages came back" : "PROBLEM: pages did not come back");
  return returned && !run.survivor_errors.empty() && run.problems.empty();
}

}  // namespace crossdock::tools::pd
