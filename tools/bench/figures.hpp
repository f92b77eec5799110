// What the GPU benches print: figures with their aim and the reference they are compared with, as a
// table for people or as one JSON object. Plain values. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <crossdock/core/result.hpp>

#include "cuda/driver.hpp"

namespace CLI {
class App;
}

namespace crossdock::tools::bench {

struct Reference {
  std::string name = {};
  double value = 0;  // in the figure's unit
};

struct Figure {
  std::string name = {};
  double value = 0;
  std::string unit = {};
  std::vector<Reference> references = {};
  // What the figure should be at most (times) or at least (bandwidth); 0: no aim.
  double aim = 0;

  [[nodiscard]] bool lower_is_better() const {
    return unit != "GB/s" && unit != "TFLOP/s" && unit != "%";
  }
  [[nodiscard]] bool meets_aim() const {
    return aim == 0 || (lower_is_better() ? value > 0 && value <= aim : value >= aim);
  }
};

struct FigureReport {
  std::string schema = {};  // "crossdock.bench.symm/1"
  // Facts about the run, in order: {"world", "2"}.
  std::vector<std::pair<std::string, std::string>> facts = {};
  std::vector<Figure> figures = {};
};

// The GPUs, the driver and its CUDA version; nothing but a line when there is none.
void add_gpu_facts(FigureReport& report, const cuda::Driver* driver);

// Where a report goes: a table or JSON to standard output, and JSON to a file too when it has a
// name.
struct FigureOutput {
  bool json = false;
  std::string file = {};
};
// `--json` and `--output FILE`.
void add_figure_output(CLI::App& app, FigureOutput& output);
// One result a line in JSON. Fails when the file cannot be written.
Result<> print_figures(const FigureReport& report, const FigureOutput& output);

}  // namespace crossdock::tools::bench
