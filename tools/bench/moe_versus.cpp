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

constexpr int kTimedOut = 124;       // exit codes of timeout(1): the limit has passed,
constexpr int kKilled = 128 + 9;     // and python3 had to be killed
constexpr double kLeastSeconds = 5;  // torch alone takes some seconds to load
constexpr const char* kNone = "no torch";

struct Answer {
  std::vector<Json> results = {};  // one of each kind
  int code = 0;                    // of python3
};

// `seconds`: the limit. A process that does not end when it is asked to is killed.
std::string command_of(const MoeCase& c, const MoeBench& options, double seconds) {
  const auto ms = [](std::chrono::nanoseconds t) { return static_cast<double>(t.count()) / 1e6; };
  return fmt::format(
      "timeout -k 5 {:.1f} python3 '{}/tools/bench/peer_torch.py' --experts {} --rows {} --n {} "
      "--k {} "
      "--format {} --repeat {} --idle-ms {} --warm-up-ms {} 2>/dev/null",
      seconds, CROSSDOCK_SOURCE_DIR, c.product.experts, c.rows, c.product.n, c.product.k,
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

bool has_fact(const FigureReport& report, const std::string& name) {
  const auto same = [&](const auto& fact) { return fact.first == name; };
  return std::any_of(report.facts.begin(), report.facts.end(), same);
}
void add_fact(FigureReport& report, const std::string& name, const std::string& value) {
  if (!has_fact(report, name)) report.facts.emplace_back(name, value);
}

void add_reference(FigureReport& report, const std::string& figure, Reference reference) {
  for (Figure& f : report.figures)
    if (f.name == figure) f.references.push_back(reference);
}

}  // namespace

Result<> compare_with_torch(const MoeCase& c, const MoeBench& options, Deadline deadline,
                            FigureReport& report) {
  if (c.swiglu || c.fp4() || c.layout != "contiguous") return {};  // torch has no such product
  if (has_fact(report, kNone)) return {};
  const double limit =
      std::chrono::duration<double>(
          std::min<std::chrono::nanoseconds>(options.versus_timeout, deadline.remaining()))
          .count();
  if (limit < kLeastSeconds) {
    add_fact(report, fmt::format("{}, torch", c.name()),
             fmt::format("not asked: {:.1f} s of --timeout were left", limit));
    return {};
  }
  std::fprintf(stderr, "%s: waiting for torch, at most %.0f s\n", c.name().c_str(), limit);
  CROSSDOCK_TRY(answer, ask(command_of(c, options, limit)));
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
  if (answer.code == kTimedOut || answer.code == kKilled) {
    add_fact(report, fmt::format("{}, torch", c.name()),
             fmt::format("not done in {:.1f} s; --vs-timeout is the limit", limit));
  } else if (answer.results.empty()) {
    add_fact(
        report, kNone,
        fmt::format("no result: python3 ended with {}; it needs torch and a GPU", answer.code));
  }
  return {};
}

}  // namespace crossdock::tools::bench
