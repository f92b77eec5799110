// `bench moe --vs torch`: the same products by torch, mostly cuBLASLt, on the same GPU in the same
// run, with the python3 on the PATH. Its figures become references of ours. See peer_torch.py.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/wait.h>

#include "bench/moe.hpp"

namespace crossdock::tools::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Answer {
  std::vector<Json> results = {};  // one of each kind
  int code = 0;                    // of python3
};

std::string command_of(const MoeCase& c, const MoeBench& options) {
  const auto ms = [](std::chrono::nanoseconds t) { return static_cast<double>(t.count()) / 1e6; };
  return fmt::format(
      "timeout 120 python3 '{}/tools/bench/peer_torch.py' --experts {} --rows {} --n {} --k {} "
      "--format {} --repeat {} --idle-ms {} --warm-up-ms {} 2>/dev/null",
      CROSSDOCK_SOURCE_DIR, c.product.experts, c.rows, c.product.n, c.product.k,
      c.fp8() ? "fp8" : "bf16", options.repeat, ms(options.idle), ms(options.warm_up));
}

Result<Answer> ask(const std::string& command) {
  FILE* output = ::popen(command.c_str(), "r");
  if (output == nullptr) return errno_error(errno, "start python3");
  Answer answer;
  char line[4096];
  while (std::fgets(line, sizeof line, output) != nullptr) {
    const std::string text = line;
    if (!text.starts_with("RESULT ")) continue;
    Json parsed = Json::parse(text.substr(7), nullptr, false);
    if (parsed.is_object()) answer.results.push_back(std::move(parsed));
  }
  const int status = ::pclose(output);
  answer.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return answer;
}

void add_fact(FigureReport& report, const std::string& name, const std::string& value) {
  const auto same = [&](const auto& fact) { return fact.first == name; };
  if (std::none_of(report.facts.begin(), report.facts.end(), same))
    report.facts.emplace_back(name, value);
}

void add_reference(FigureReport& report, const std::string& figure, Reference reference) {
  for (Figure& f : report.figures)
    if (f.name == figure) f.references.push_back(reference);
}

}  // namespace

Result<> compare_with_torch(const MoeCase& c, const MoeBench& options, FigureReport& report) {
  if (c.swiglu || c.layout != "contiguous") return {};  // torch has no such product
  CROSSDOCK_TRY(answer, ask(command_of(c, options)));
  for (const Json& result : answer.results) {
    if (result.contains("torch")) add_fact(report, "torch", result.value("torch", ""));
    if (!result.contains("kind")) continue;
    const std::string name = "torch " + result.value("kind", "");
    if (result.contains("error")) {
      add_fact(report, fmt::format("{}, {}", c.name(), name), result.value("error", ""));
      continue;
    }
    for (const char* regime : {"burst", "sustained"}) {
      const double us = result.value(fmt::format("{}_us", regime), 0.0);
      if (us > 0)
        add_reference(report, fmt::format("{}_{}", c.name(), regime),
                      {name, c.operations() / us / 1e6});
    }
  }
  if (answer.results.empty())
    add_fact(
        report, "torch",
        fmt::format("no result: python3 ended with {}; it needs torch and a GPU", answer.code));
  return {};
}

}  // namespace crossdock::tools::bench
