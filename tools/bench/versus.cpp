// `--vs mooncake`: the same work by Mooncake's transfer engine, in the same run. Its published
// wheel goes into a Python environment of its own below .cache/; nothing of it touches this
// process.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>

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

struct Mode {
  const char* name;
  const char* environment;
};

// Runs one case in a fresh pair of processes; nothing when the driver printed no result.
Result<std::optional<Json>> run_case(const std::string& python, const Mode& mode,
                                     const TransferBench& options, const Case& shape,
                                     std::uint64_t batch) {
  const Json what = {{"name", shape.name}, {"block", shape.block_bytes}, {"count", shape.count}};
  const std::string command = fmt::format(
      "{} timeout 60 '{}' '{}/tools/bench/peer_mooncake.py' --bytes {} --repeat {} --batch {} "
      "--case '{}' 2>/dev/null",
      mode.environment, python, kSource, options.bytes, options.repeat, batch, what.dump());
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
  ::pclose(output);
  return result;
}

// As one batch, like ours; what it refuses, in batches small enough for it.
Result<> compare_case(const std::string& python, const Mode& mode, const TransferBench& options,
                      const Case& shape, std::vector<Measurement>& results) {
  for (const std::uint64_t batch : {std::uint64_t{0}, std::uint64_t{64}}) {
    CROSSDOCK_TRY(line, run_case(python, mode, options, shape, batch));
    Measurement m{.name = fmt::format("mooncake {}: {}{}", mode.name, shape.name,
                                      batch == 0 ? "" : fmt::format(", {} a batch", batch))};
    m.refused = line ? line->value("error", "") : "no result within 60 s";
    if (line) {
      m.gb_per_s = line->value("gb_per_s", 0.0);
      m.cpu_s_per_gb = line->value("cpu_s_per_gb", 0.0);
    }
    const bool refused = !m.refused.empty();
    results.push_back(std::move(m));
    if (!refused) return {};
  }
  return {};
}

}  // namespace

Result<> measure_mooncake(const TransferBench& options, const std::vector<Case>& cases,
                          std::vector<Measurement>& results) {
  CROSSDOCK_TRY(python, interpreter());
  for (const Mode& mode : {Mode{"tcp", ""}, Mode{"pooled", "MC_TCP_ENABLE_CONNECTION_POOL=1"}})
    for (const Case& shape : cases)
      CROSSDOCK_CHECK_OK(compare_case(python, mode, options, shape, results));
  return {};
}

}  // namespace crossdock::tools::bench
