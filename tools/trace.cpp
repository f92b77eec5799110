// `crossdock trace merge`: one timeline from the trace files of several processes. Files of one
// host share a clock; those of other hosts are shifted by the wall clock noted in each file.
// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli.hpp"
#include "commands.hpp"

namespace crossdock::tools {
namespace {

using Json = nlohmann::json;

// Below this the difference of two clock offsets is drift and adjustment, not another machine.
constexpr std::int64_t kSameHostNs = 1'000'000'000;

struct MergeOptions {
  std::vector<std::string> inputs;
  std::string output;
};

Result<Json> read_trace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return errno_error(errno, "open the trace " + path);
  Json trace = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  const bool valid =
      trace.is_object() && trace.contains("traceEvents") && trace["traceEvents"].is_array();
  if (!valid)
    return invalid_argument(fmt::format(
        "{} is no trace: expected JSON with a list 'traceEvents', as CROSSDOCK_TRACE writes",
        path));
  return trace;
}

std::int64_t number_at(const Json& trace, const char* name) {
  if (!trace.contains("otherData") || !trace["otherData"].is_object()) return 0;
  const Json& other = trace["otherData"];
  return other.contains(name) && other[name].is_number_integer() ? other[name].get<std::int64_t>()
                                                                 : 0;
}

// Adds the events of `trace` to `out`. A process id that an earlier file used means another host
// (or a reused id): its events get an id of their own, so that the rows stay apart.
class Merger {
 public:
  void add(Json trace) {
    const std::int64_t offset = number_at(trace, "clock_offset_ns");
    if (files_ == 0) first_offset_ = offset;
    const std::int64_t apart = offset - first_offset_;
    const double shift_us =
        std::abs(apart) < kSameHostNs ? 0.0 : static_cast<double>(apart) / 1000.0;
    for (Json& event : trace["traceEvents"])
      add_event(std::move(event), shift_us);
    lost_ += number_at(trace, "lost_events");
    ++files_;
  }

  Json finish() {
    return {{"traceEvents", std::move(events_)},
            {"displayTimeUnit", "ns"},
            {"otherData", {{"lost_events", lost_}, {"clock_offset_ns", first_offset_}}}};
  }

 private:
  void add_event(Json event, double shift_us) {
    if (!event.is_object()) return;
    if (event.contains("ts") && event["ts"].is_number())
      event["ts"] = event["ts"].get<double>() + shift_us;
    if (event.contains("pid") && event["pid"].is_number_integer())
      event["pid"] = row_of(event["pid"].get<std::int64_t>());
    events_.push_back(std::move(event));
  }

  std::int64_t row_of(std::int64_t pid) {
    const auto [it, is_new] = owner_.try_emplace(pid, files_);
    if (is_new || it->second == files_) return pid;
    const auto [moved, made] = moved_.try_emplace({files_, pid}, next_pid_);
    if (made) ++next_pid_;
    return moved->second;
  }

  Json events_ = Json::array();
  std::size_t files_ = 0;
  std::int64_t first_offset_ = 0;
  std::int64_t lost_ = 0;
  std::int64_t next_pid_ = 1 << 23;  // beyond the kernel's largest process id
  std::map<std::int64_t, std::size_t> owner_;
  std::map<std::pair<std::size_t, std::int64_t>, std::int64_t> moved_;
};

int merge(const MergeOptions& options) {
  Merger merger;
  for (const auto& path : options.inputs) {
    auto trace = read_trace(path);
    if (!trace.ok()) return report(trace.error());
    merger.add(std::move(trace).value());
  }
  std::ofstream out(options.output, std::ios::binary);
  out << merger.finish().dump(-1, ' ', false, Json::error_handler_t::replace) << '\n';
  out.close();
  if (!out) return report(errno_error(errno, "write " + options.output));
  fmt::print("{} traces merged into {}\n", options.inputs.size(), options.output);
  return kDone;
}

}  // namespace

void add_trace(CLI::App& app) {
  auto options = std::make_shared<MergeOptions>();
  CLI::App* trace = app.add_subcommand("trace", "Work with traces that CROSSDOCK_TRACE wrote");
  trace->require_subcommand(1);
  CLI::App* sub = trace->add_subcommand("merge", "Merge traces of several processes into one");
  sub->add_option("inputs", options->inputs, "Trace files")->required();
  sub->add_option("-o,--output", options->output, "File to write")->required();
  sub->callback(run(options, merge));
}

}  // namespace crossdock::tools
