// `--vs mooncake`: the same work by Mooncake's transfer engine, in the same run. Its published
// wheel goes into a Python environment of its own below .cache/; nothing of it touches this
// process.
// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <sys/wait.h>

#include "base/strings.hpp"
#include "bench/transfer.hpp"

namespace crossdock::tools::bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

const std::string kSource = CROSSDOCK_SOURCE_DIR;
const std::string kPackage = "mooncake-transfer-engine-non-cuda";

// A shell command with a limit: neither an index that does not answer nor an engine that hangs may
// hold up the bench.
std::string limited(const TransferBench& options, const std::string& command) {
  return fmt::format("timeout -k 5 {:.3f} {}",
                     std::chrono::duration<double>(options.versus_timeout).count(), command);
}

// The interpreter that has the wheel; installs it at first.
Result<std::string> interpreter(const TransferBench& options) {
  const std::string home =
      options.versus_home.empty() ? kSource + "/.cache/mooncake" : options.versus_home;
  const std::string python = home + "/bin/python3";
  const std::string probe =
      limited(options, fmt::format("'{}' -c 'import mooncake.engine' >/dev/null 2>&1", python));
  if (fs::exists(python) && std::system(probe.c_str()) == 0) return python;
  std::fprintf(stderr, "installing %s into %s\n", kPackage.c_str(), home.c_str());
  const std::string install =
      fmt::format("{} >&2 && {} >&2", limited(options, fmt::format("python3 -m venv '{}'", home)),
                  limited(options, fmt::format("'{}/bin/pip' install --quiet {}", home, kPackage)));
  const int status = std::system(install.c_str());
  if (WIFEXITED(status) && (WEXITSTATUS(status) == 124 || WEXITSTATUS(status) == 128 + 9))
    return make_error(Code::kDeadline,
                      fmt::format("python3 -m venv and pip did not install {} in {}; --vs-timeout "
                                  "is the limit",
                                  kPackage, base::format_duration(options.versus_timeout)));
  if (status != 0)
    return make_error(Code::kUnsupported,
                      fmt::format("cannot install {} with python3 -m venv and pip", kPackage));
  if (std::system(probe.c_str()) != 0)
    return make_error(Code::kUnsupported,
                      "Mooncake's wheel does not load here; it needs the packages libibverbs1, "
                      "libnuma1 and libcurl4");
  return python;
}

struct Mode {
  const char* name;
  const char* environment;
};

// Why a driver that ended with this status of waitpid() printed no result.
std::string without_result(int status, const TransferBench& options) {
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (code == 124 || code == 128 + 9)
    return "no result within " + base::format_duration(options.versus_timeout);
  return fmt::format("its process ended with {} and without a result", code);
}

// Runs one case in a fresh pair of processes: the driver's result, or an "error" of our own.
Result<Json> run_case(const std::string& python, const Mode& mode, const TransferBench& options,
                      const Case& shape, std::uint64_t batch) {
  // Numbers alone: the driver needs no name, and that of a case may hold quotes.
  const Json what = {{"block", shape.block_bytes}, {"count", shape.count}};
  const std::string command = fmt::format(
      "{} {} --bytes {} --repeat {} --batch {} --case '{}' 2>/dev/null", mode.environment,
      limited(options, fmt::format("'{}' '{}/tools/bench/peer_mooncake.py'", python, kSource)),
      options.bytes, options.repeat, batch, what.dump());
  FILE* output = ::popen(command.c_str(), "r");
  if (output == nullptr) return errno_error(errno, "start python3");
  std::optional<Json> result;
  char line[4096];
  while (std::fgets(line, sizeof line, output) != nullptr) {
    const std::string text = line;
    if (!text.starts_with("RESULT ")) continue;
    Json parsed = Json::parse(text.substr(7), nullptr, false);
    if (!parsed.is_discarded()) result = std::move(parsed);
  }
  const int status = ::pclose(output);
  if (result) return *std::move(result);
  return Json{{"error", without_result(status, options)}};
}

// As one batch, like ours; what it refuses, in batches small enough for it.
Result<> compare_case(const std::string& python, const Mode& mode, const TransferBench& options,
                      const Case& shape, std::vector<Measurement>& results) {
  for (const std::uint64_t batch : {std::uint64_t{0}, std::uint64_t{64}}) {
    CROSSDOCK_TRY(line, run_case(python, mode, options, shape, batch));
    Measurement m{.name = fmt::format("mooncake {}: {}{}", mode.name, shape.name,
                                      batch == 0 ? "" : fmt::format(", {} a batch", batch))};
    m.refused = line.value("error", "");
    m.gb_per_s = line.value("gb_per_s", 0.0);
    m.cpu_s_per_gb = line.value("cpu_s_per_gb", 0.0);
    const bool refused = !m.refused.empty();
    results.push_back(std::move(m));
    if (!refused) return {};
  }
  return {};
}

}  // namespace

Result<> measure_mooncake(const TransferBench& options, const std::vector<Case>& cases,
                          std::vector<Measurement>& results) {
  CROSSDOCK_TRY(python, interpreter(options));
  for (const Mode& mode : {Mode{"tcp", ""}, Mode{"pooled", "MC_TCP_ENABLE_CONNECTION_POOL=1"}})
    for (const Case& shape : cases)
      CROSSDOCK_CHECK_OK(compare_case(python, mode, options, shape, results));
  return {};
}

}  // namespace crossdock::tools::bench
