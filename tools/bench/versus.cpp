// `--vs mooncake`: the same work by Mooncake's transfer engine, in the same run. Its published
// wheel goes into a Python environment of its own below .cache/; nothing of it touches this
// process.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/transfer.hpp"

namespace crossdock::tools::bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

const std::string kSource = CROSSDOCK_SOURCE_DIR;
const std::string kPackage = "mooncake-transfer-engine-non-cuda";

// The interpreter that has the wheel; installs it at first.
Result<std::string> interpreter() {
  const std::string home = kSource + "/.cache/mooncake";
  const std::string python = home + "/bin/python3";
  const std::string probe = fmt::format("'{}' -c 'import mooncake.engine' >/dev/null 2>&1", python);
  if (fs::exists(python) && std::system(probe.c_str()) == 0) return python;
  std::fprintf(stderr, "installing %s into %s\n", kPackage.c_str(), home.c_str());
  const std::string install =
      fmt::format("python3 -m venv '{0}' && '{0}/bin/pip' install --quiet {1} >&2", home, kPackage);
  if (std::system(install.c_str()) != 0)
    return make_error(Code::kUnsupported,
                      fmt::format("cannot install {} with python3 -m venv and pip", kPackage));
  if (std::system(probe.c_str()) != 0)
    return make_error(Code::kUnsupported,
                      "Mooncake's wheel does not load here; it needs the packages libibverbs1, "
                      "libnuma1 and libcurl4");
  return python;
}

std::string cases_json(const std::vector<Case>& cases) {
  Json list = Json::array();
  for (const auto& shape : cases)
    list.push_back({{"name", shape.name}, {"block", shape.block_bytes}, {"count", shape.count}});
  return list.dump();
}

Measurement measurement_of(const Json& line, const std::string& mode) {
  Measurement m{.name = fmt::format("mooncake {}: {}", mode, line.value("name", ""))};
  m.gb_per_s = line.value("gb_per_s", 0.0);
  m.cpu_s_per_gb = line.value("cpu_s_per_gb", 0.0);
  if (line.contains("error")) m.refused = line.value("error", "");
  return m;
}

Result<> run_mode(const std::string& python, const std::string& mode, const TransferBench& options,
                  const std::string& cases, std::vector<Measurement>& results) {
  const std::string command = fmt::format(
      "{} '{}' '{}/tools/bench/peer_mooncake.py' --bytes {} --repeat {} --cases '{}' 2>/dev/null",
      mode == "pooled" ? "MC_TCP_ENABLE_CONNECTION_POOL=1" : "", python, kSource, options.bytes,
      options.repeat, cases);
  FILE* output = ::popen(command.c_str(), "r");
  if (output == nullptr) return errno_error(errno, "start python3");
  char line[4096];
  while (std::fgets(line, sizeof line, output) != nullptr) {
    const std::string text = line;
    if (!text.starts_with("RESULT ")) continue;
    const Json parsed = Json::parse(text.substr(7), nullptr, false);
    if (!parsed.is_discarded()) results.push_back(measurement_of(parsed, mode));
  }
  ::pclose(output);
  return {};
}

}  // namespace

Result<> measure_mooncake(const TransferBench& options, const std::vector<Case>& cases,
                          std::vector<Measurement>& results) {
  CROSSDOCK_TRY(python, interpreter());
  const std::string list = cases_json(cases);
  for (const std::string mode : {"tcp", "pooled"})
    CROSSDOCK_CHECK_OK(run_mode(python, mode, options, list, results));
  return {};
}

}  // namespace crossdock::tools::bench
