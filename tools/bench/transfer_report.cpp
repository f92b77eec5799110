// Prints what was measured: a table for people, one JSON object for programs.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <fmt/format.h>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sys/utsname.h>
#include <thread>

#include <crossdock/core/version.hpp>

#include "bench/transfer.hpp"

namespace crossdock::tools::bench {
namespace {

using Json = nlohmann::ordered_json;

std::string cpu_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line))
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

Json machine_json() {
  utsname system{};
  ::uname(&system);
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  return {{"cpu", cpu_model()},
          {"cores", std::thread::hardware_concurrency()},
          {"kernel", system.release},
          {"load_1min", load}};
}

Json measurement_json(const Measurement& m) {
  Json out = {{"name", m.name}};
  if (m.gb_per_s > 0) out["gb_per_s"] = m.gb_per_s;
  if (m.cpu_s_per_gb > 0) out["cpu_s_per_gb"] = m.cpu_s_per_gb;
  if (m.p50_us > 0) {
    out["p50_us"] = m.p50_us;
    out["p99_us"] = m.p99_us;
  }
  if (!m.refused.empty()) out["refused"] = m.refused;
  if (!m.unit.empty()) {
    out["value"] = m.value;
    out["unit"] = m.unit;
  }
  if (!m.ceiling.empty()) {
    out["ceiling"] = m.ceiling;
    out["ratio"] = m.ratio;
  }
  return out;
}

std::string figure(const Measurement& m) {
  if (!m.refused.empty()) return "refused: " + m.refused;
  if (!m.unit.empty()) return fmt::format("{:8.2f} {}", m.value, m.unit);
  std::string text = m.p50_us > 0
                         ? fmt::format("p50 {:7.2f} us   p99 {:7.2f} us", m.p50_us, m.p99_us)
                         : fmt::format("{:8.2f} GB/s", m.gb_per_s);
  if (m.cpu_s_per_gb > 0) text += fmt::format("  {:5.2f} CPU-s/GB", m.cpu_s_per_gb);
  if (!m.ceiling.empty()) text += fmt::format("  {:5.2f} x {}", m.ratio, m.ceiling);
  return text;
}

}  // namespace

void print_report(const TransferBench& options, const std::vector<Measurement>& results) {
  if (options.json) {
    Json all = Json::array();
    for (const auto& m : results)
      all.push_back(measurement_json(m));
    const Json report = {{"schema", "crossdock.bench.transfer/1"},
                         {"version", kVersion},
                         {"machine", machine_json()},
                         {"repeat", options.repeat},
                         {"bytes", options.bytes},
                         {"results", all}};
    std::printf("%s\n", report.dump(2).c_str());
    return;
  }
  for (const auto& m : results)
    std::printf("%-46s %s\n", m.name.c_str(), figure(m).c_str());
}

}  // namespace crossdock::tools::bench
