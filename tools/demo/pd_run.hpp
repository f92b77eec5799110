// One run of the demo in one mode: what happened to every request, as the workers told it. Made by
// the command's process, read by the report and the timeline.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "demo/pd.hpp"

namespace crossdock::tools::pd {

// Times are CLOCK_MONOTONIC nanoseconds; 0: never.
struct RequestRecord {
  std::uint64_t id = 0;
  std::uint32_t num_tokens = 0;
  std::uint64_t compute_begin = 0;
  std::uint64_t prefill_done = 0;
  std::uint64_t complete = 0;  // all KV at decode: the first token can be decoded
  std::vector<std::uint64_t> layer_computed;
  std::vector<std::uint64_t> layer_arrived;
  std::uint64_t verified_bytes = 0;
  std::uint64_t verified_pages = 0;
  std::string error;  // at decode
};

struct PoolRecord {
  std::uint64_t total = 0, in_use = 0, quarantined = 0;
};

struct RunRecord {
  std::string mode;
  std::vector<RequestRecord> requests;
  double rate_tokens_per_s = 0;
  std::string calibration;
  std::uint64_t bytes_received = 0;
  std::uint64_t shared_pages = 0;  // not sent, since decode had them
  double cpu_prefill_s = 0, cpu_decode_s = 0;
  std::vector<std::string> problems;  // mismatches and failures; empty in a clean run
  // Of a run with a fault.
  std::uint64_t fault_ns = 0;
  std::vector<std::string> survivor_errors;
  std::uint64_t first_error_ns = 0;
  std::vector<PoolRecord> survivor_pool;  // after the first error, and at the end

  // The verified requests' figures.
  [[nodiscard]] std::size_t num_verified() const;
  [[nodiscard]] std::uint64_t verified_bytes() const;
  [[nodiscard]] std::uint64_t verified_pages() const;
  [[nodiscard]] double wall_s() const;  // first compute to last completion
  [[nodiscard]] double gb_per_s() const;
  // "Prefill done -> all KV at decode", in ms, of the complete requests; fraction 0.5 or 0.99.
  [[nodiscard]] double handoff_ms(double fraction) const;
};

// Starts the workers, plays the plan, collects. The result is an error only when the run could not
// be made at all.
Result<RunRecord> run_mode(const Options& options, const Plan& plan, const std::string& mode,
                           double rate_tokens_per_s);

// For people, to stdout; or one JSON object.
void print_report(const Options& options, const Plan& plan, const std::vector<RunRecord>& runs);
void print_json(const Options& options, const Plan& plan, const std::vector<RunRecord>& runs);
// What the fault did; false when a promise was broken.
bool print_fault(const Options& options, const RunRecord& run);

// A self-contained HTML page with one picture for each run.
Result<> write_timeline(const std::string& path, const Plan& plan,
                        const std::vector<RunRecord>& runs);

}  // namespace crossdock::tools::pd
