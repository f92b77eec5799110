// See figures.hpp. SPDX-License-Identifier: Apache-2.0
#include "bench/figures.hpp"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fmt/format.h>
#include <fstream>
#include <nlohmann/json.hpp>

#include <crossdock/core/version.hpp>

#include "cuda/device.hpp"

namespace crossdock::tools::bench {
namespace {

using Json = nlohmann::ordered_json;

// Three places are enough for any of these, and keep the files readable.
double rounded(double value) {
  return std::stod(fmt::format("{:.4g}", value));
}

Json to_json(const Figure& f) {
  Json out = {{"name", f.name}, {"value", rounded(f.value)}, {"unit", f.unit}};
  for (const Reference& r : f.references)
    out["references"].push_back(
        {{"name", r.name}, {"value", rounded(r.value)}, {"ratio", rounded(f.value / r.value)}});
  if (f.aim > 0) {
    out["aim"] = rounded(f.aim);
    out["aim_met"] = f.meets_aim();
  }
  return out;
}

// Facts in lines of their own, then a line for each result: easy to read, to copy and to compare.
std::string to_json(const FigureReport& report) {
  std::string text = "{\n";
  const auto fact = [&](std::string_view name, std::string_view value) {
    text += fmt::format("  {}: {},\n", Json(name).dump(), Json(value).dump());
  };
  fact("schema", report.schema);
  fact("version", kVersion);
  for (const auto& [name, value] : report.facts)
    fact(name, value);
  text += "  \"results\": [";
  for (std::size_t i = 0; i < report.figures.size(); ++i)
    text += (i == 0 ? "\n    " : ",\n    ") + to_json(report.figures[i]).dump();
  return text + "\n  ]\n}\n";
}

std::string to_line(const Figure& f) {
  std::string line = fmt::format("{:<52} {:>9.5g} {:<4}", f.name, f.value, f.unit);
  for (const Reference& r : f.references)
    line += fmt::format("  {:5.3f} x {} ({:.4g})", f.value / r.value, r.name, r.value);
  if (f.aim > 0)
    line += fmt::format("  aim {} {:.4g}: {}", f.lower_is_better() ? "<=" : ">=", f.aim,
                        f.meets_aim() ? "met" : "MISSED");
  return line;
}

}  // namespace

void add_gpu_facts(FigureReport& report, const cuda::Driver* driver) {
  if (driver == nullptr) {
    report.facts.emplace_back("gpus", "none");
    return;
  }
  const auto devices = cuda::query_devices(*driver);
  if (devices.ok() && !devices->empty()) {
    const cuda::Device& first = devices->front();
    report.facts.emplace_back("gpus", fmt::format("{} x {}", devices->size(), first.name));
    report.facts.emplace_back("sms", std::to_string(first.num_sms));
  }
  report.facts.emplace_back("cuda_driver", cuda::version_text(driver->version));
}

void add_figure_output(CLI::App& app, FigureOutput& output) {
  app.add_flag("--json", output.json, "one JSON object instead of a table");
  app.add_option("--output", output.file, "a file for the JSON object, besides what is printed");
}

Result<> print_figures(const FigureReport& report, const FigureOutput& output) {
  const std::string json = to_json(report);
  if (output.json) {
    std::printf("%s", json.c_str());
  } else {
    for (const auto& [name, value] : report.facts)
      std::printf("%s: %s\n", name.c_str(), value.c_str());
    for (const Figure& figure : report.figures)
      std::printf("%s\n", to_line(figure).c_str());
  }
  if (output.file.empty()) return {};
  std::ofstream file(output.file, std::ios::trunc);
  file << json;
  file.flush();
  if (!file) return make_error(Code::kDenied, fmt::format("cannot write {}", output.file));
  return {};
}

}  // namespace crossdock::tools::bench
