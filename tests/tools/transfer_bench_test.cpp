// `crossdock bench transfer` as two processes, as on two hosts, and beside a peer: what scripts
// read of its JSON, and that whatever goes wrong ends soon, with a sentence and without a hang.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include <crossdock/core/version.hpp>

#include "base/clock.hpp"
#include "base/socket.hpp"
#include "support/running_command.hpp"
#include "support/temp_dir.hpp"

namespace crossdock {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using support::CommandResult;
using support::RunningCommand;
using testing::HasSubstr;

std::string g_program;  // NOLINT: set once by main() before any test runs

// With little memory, unless they say how much.
std::vector<std::string> bench(std::vector<std::string> arguments) {
  if (std::ranges::find(arguments, "--bytes") == arguments.end())
    arguments.insert(arguments.end(), {"--bytes", "4194304"});
  arguments.insert(arguments.begin(), {g_program, "bench", "transfer"});
  return arguments;
}
CommandResult run(std::vector<std::string> arguments, std::vector<std::string> environment = {}) {
  return RunningCommand(bench(std::move(arguments)), std::move(environment))
      .wait(Deadline::in(200s));
}

// A target of its own, as on another host; `name` is what it prints.
struct Target {
  explicit Target(const std::string& transport, std::vector<std::string> more = {})
      : process(bench(joined({"--role", "target", "--transport", transport}, std::move(more)))),
        name(process.line(Deadline::in(60s))) {}
  static std::vector<std::string> joined(std::vector<std::string> first,
                                         std::vector<std::string> more) {
    first.insert(first.end(), more.begin(), more.end());
    return first;
  }
  RunningCommand process;
  std::string name;
};

std::vector<std::string> initiator(const std::string& transport, const std::string& peer,
                                   std::vector<std::string> more = {}) {
  return Target::joined(
      {"--role", "initiator", "--transport", transport, "--peer", peer, "--json", "--op", "both"},
      std::move(more));
}

std::map<std::string, json> results_of(const std::string& output) {
  std::map<std::string, json> by_name;
  const json report = json::parse(output, nullptr, false);
  EXPECT_TRUE(report.is_object()) << output;
  if (!report.is_object()) return by_name;
  EXPECT_EQ(report.value("schema", ""), "crossdock.bench.transfer/1");
  EXPECT_EQ(report.value("version", ""), kVersion);
  EXPECT_EQ(report.value("bytes", 0), 4194304);
  EXPECT_EQ(report.value("repeat", 0), 2);
  for (const auto* fact : {"cpu", "cores", "kernel", "load_1min"})
    EXPECT_TRUE(report.at("machine").contains(fact)) << fact;
  for (const json& result : report.at("results")) {
    const std::string name = result.at("name");
    EXPECT_TRUE(by_name.emplace(name, result).second) << name << " is there twice";
  }
  return by_name;
}

// A number above 0 and below what no machine reaches in these units.
void expect_between(const json& result, const char* field, double least, double most) {
  ASSERT_TRUE(result.contains(field)) << field << " is missing: " << result;
  EXPECT_GT(result.at(field).get<double>(), least) << result;
  EXPECT_LT(result.at(field).get<double>(), most) << result;
}

class TwoProcesses : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Over, TwoProcesses, testing::Values("shm", "tcp"),
                         [](const auto& over) { return std::string(over.param); });

TEST_P(TwoProcesses, MeasureAndEnd) {
  const std::string transport = GetParam();
  Target target(transport);
  ASSERT_THAT(target.name, testing::StartsWith("127.0.0.1:"));
  const auto done =
      run(initiator(transport, target.name, {"--block", "64KiB", "1MiB", "--repeat", "2"}));
  ASSERT_EQ(done.exit_code, 0) << done.errors;
  const auto results = results_of(done.output);
  for (const auto* op : {"write", "read"})
    for (const auto* block : {"64KiB", "1MiB"}) {
      const auto found = results.find(transport + " " + op + " " + block);
      ASSERT_NE(found, results.end()) << op << block << done.output;
      expect_between(found->second, "gb_per_s", 0, 10'000);
      expect_between(found->second, "cpu_s_per_gb", 0, 1'000);
      expect_between(found->second, "ratio", 0, 1'000);
      EXPECT_TRUE(results.contains(found->second.value("ceiling", ""))) << found->second;
    }
  for (const auto* block : {"64 B", "4 KiB"}) {
    const auto found = results.find(transport + " write " + block + ", one at a time");
    ASSERT_NE(found, results.end()) << block << done.output;
    expect_between(found->second, "p50_us", 0, 1e6);
    EXPECT_GE(found->second.value("p99_us", 0.0), found->second.value("p50_us", 1e9));
  }
  target.process.end_input();
  const auto ended = target.process.wait(Deadline::in(20s));
  EXPECT_EQ(ended.exit_code, 0) << ended.errors;
  EXPECT_EQ(ended.output, "") << "the name and nothing else";
}

TEST(TwoProcessesOnce, TheTargetListensWhereItIsTold) {
  Target target("tcp", {"--listen", "127.0.0.2:0"});
  EXPECT_THAT(target.name, testing::StartsWith("127.0.0.2:"));
  const auto nowhere =
      run({"--role", "target", "--transport", "tcp", "--listen", "192.0.2.1:7000"});
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_THAT(nowhere.errors, HasSubstr("192.0.2.1:7000"));
  EXPECT_EQ(nowhere.output, "");
}

// What it measured before is told all the same, here the ceilings.
TEST_P(TwoProcesses, ATargetThatIsNotThereIsNamed) {
  std::string gone;
  {
    const auto listener =
        base::listen_tcp(base::HostPort{"127.0.0.1", 0}, Deadline::in(5s)).value();
    gone = listener.address.to_string();
  }
  const auto done = run(initiator(GetParam(), gone, {"--block", "1MiB", "--repeat", "2"}),
                        {"CROSSDOCK_CONTROL_CONNECT_TIMEOUT=3s"});
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.errors, HasSubstr(gone));
  EXPECT_THAT(done.errors, HasSubstr("unreachable"));
  EXPECT_TRUE(results_of(done.output).contains("memcpy, one thread"));
}

// Whether somebody is connected to that port of this host.
bool is_connected_to(const std::string& name) {
  const unsigned port = base::parse_host_port(name).value().port;
  std::ifstream table("/proc/net/tcp");
  std::string line;
  while (std::getline(table, line)) {
    unsigned remote = 0, state = 0;
    if (std::sscanf(line.c_str(), " %*d: %*x:%*x %*x:%x %x", &remote, &state) == 2 &&
        remote == port && state == 1)
      return true;
  }
  return false;
}

// It would measure for minutes. What it does after it has connected is moving blocks; 0.3 s of the
// CPU are some hundred of them.
TEST_P(TwoProcesses, AKilledTargetEndsTheInitiator) {
  Target target(GetParam());
  RunningCommand busy(bench(initiator(GetParam(), target.name, {"--repeat", "1000"})));
  const auto patience = Deadline::in(150s);
  while (!is_connected_to(target.name) && !patience.passed())
    std::this_thread::yield();
  const auto used = base::process_cpu_ns(busy.pid());
  while (base::process_cpu_ns(busy.pid()) < used + 300'000'000 && !patience.passed())
    std::this_thread::yield();
  ASSERT_FALSE(patience.passed());
  target.process.signal(SIGKILL);
  const auto done = busy.wait(Deadline::in(20s));
  EXPECT_EQ(done.exit_code, 1) << done.errors;
  EXPECT_THAT(done.errors, HasSubstr(target.name));
  EXPECT_THAT(done.errors, HasSubstr("peer lost"));
}

// Nothing moves, so the limit of a stall counts and not the two minutes of a transfer.
TEST(TwoProcessesOnce, AStoppedTargetEndsTheInitiator) {
  Target target("tcp");
  target.process.signal(SIGSTOP);
  const auto done = run(initiator("tcp", target.name, {"--block", "1MiB", "--repeat", "2"}),
                        {"CROSSDOCK_CONTROL_CONNECT_TIMEOUT=1s"});
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.errors, HasSubstr(target.name));
}

// The orderly end of both processes, which is when engines write.
TEST_P(TwoProcesses, BothWriteTheirTraces) {
  const support::TempDir folder;
  const auto done = run({"--transport", GetParam(), "--block", "1MiB", "--repeat", "2", "--json"},
                        {"CROSSDOCK_TRACE=" + folder.path() + "/t-%p.json"});
  ASSERT_EQ(done.exit_code, 0) << done.errors;
  EXPECT_EQ(results_of(done.output).count("process_vm_writev"), 0u) << "it is no ceiling here";
  std::size_t files = 0, with_transfers = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    ++files;
    const json trace = json::parse(std::ifstream(entry.path()), nullptr, false);
    ASSERT_TRUE(trace.is_object()) << entry.path();
    for (const json& event : trace.at("traceEvents"))
      if (event.at("name") == "transfer") {
        ++with_transfers;
        break;
      }
  }
  EXPECT_EQ(files, 2u);
  EXPECT_EQ(with_transfers, 1u) << "the target only serves";
}

TEST(TransferBench, MistakesAreNamedBeforeAnythingIsMeasured) {
  const auto says = [](const std::vector<std::string>& arguments, const std::string& text) {
    const auto done = run(arguments);
    EXPECT_EQ(done.exit_code, 2) << done.errors;
    EXPECT_THAT(done.errors, HasSubstr(text));
    EXPECT_EQ(done.output, "");
  };
  says({"--role", "spectator"}, "{target,initiator}");
  says({"--role", "initiator"}, "--role initiator needs --peer");
  says({"--transport", "pigeon"}, "{shm,tcp,loopback}");
  says({"--block", "8MiB"}, "--block 8MiB must be between 1 byte and --bytes (4194304)");
  says({"--block", "0"}, "--block 0 must be");
  says({"--block", "much"}, "much");
  says({"--bytes", "1KiB", "--block", "64"}, "--bytes 1024 must be at least 4096");
  says({"--vs", "nixl", "--transport", "tcp"}, "{mooncake}");
  says({"--vs", "mooncake", "--transport", "shm"}, "add --transport tcp");
  says({"--vs", "mooncake", "--transport", "tcp", "--op", "read"}, "compares writes over tcp");
}

// --- beside a peer, whose Python environment cannot be made ---

class Versus : public testing::Test {
 protected:
  // A python3 that does this, first on the PATH.
  void python(const std::string& script) const {
    const auto file = folder_.write("bin/python3", "#!/bin/sh\n" + script + "\n");
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
  }
  [[nodiscard]] CommandResult compare(const std::string& timeout = "1min",
                                      std::vector<std::string> more = {}) const {
    return run(Target::joined({"--transport", "tcp", "--block", "1MiB", "--repeat", "2", "--json",
                               "--vs", "mooncake", "--vs-home", home(), "--vs-timeout", timeout},
                              std::move(more)),
               {"PATH=" + folder_.path() + "/bin:" + std::getenv("PATH")});
  }
  // A peer that is installed, and does this.
  void peer(const std::string& script) const {
    python(script);
    folder_.write("peer/bin/python3", "");
    std::filesystem::copy_file(folder_.path() + "/bin/python3", home() + "/bin/python3",
                               std::filesystem::copy_options::overwrite_existing);
  }
  [[nodiscard]] std::string home() const { return folder_.path() + "/peer"; }
  static void expect_own_figures(const CommandResult& done) {
    const auto results = results_of(done.output);
    ASSERT_TRUE(results.contains("tcp write 1MiB")) << done.output;
    expect_between(results.at("tcp write 1MiB"), "gb_per_s", 0, 10'000);
  }
  const support::TempDir folder_;
};

TEST_F(Versus, ABrokenPythonIsAnErrorAfterOurOwnFigures) {
  python("echo 'no module named venv' >&2; exit 1");
  const auto done = compare();
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.errors, HasSubstr("cannot install mooncake-transfer-engine-non-cuda"));
  expect_own_figures(done);
}

// An environment without a wheel: pip finds no index, as without a network.
constexpr const char* kMakesEnvironment = R"(
mkdir -p "$3/bin"
cp "$0" "$3/bin/python3"
printf '#!/bin/sh\necho no index >&2\nexit 1\n' > "$3/bin/pip"
chmod +x "$3/bin/pip"
)";

TEST_F(Versus, WithoutANetworkTheErrorNamesThePackage) {
  python(std::string(R"(case "$2" in import*) exit 1;; esac)") + kMakesEnvironment);
  const auto done = compare();
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.errors, HasSubstr("no index"));
  EXPECT_THAT(done.errors, HasSubstr("cannot install mooncake-transfer-engine-non-cuda"));
  expect_own_figures(done);
}

TEST_F(Versus, AnInstallationThatHangsEndsAtItsLimit) {
  python("exec sleep 600");
  const auto begin = std::chrono::steady_clock::now();
  const auto done = compare("300ms");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.errors, HasSubstr("--vs-timeout"));
  expect_own_figures(done);
}

// The peer's own answers become results: a figure, a refusal, and what gives no answer in time.
TEST_F(Versus, WhatThePeerSaysIsReported) {
  peer(R"(case "$*" in
*import*) exit 0;;
*"--batch 0"*) echo 'RESULT {"error": "too many"}';;
*) echo noise; echo 'RESULT {"gb_per_s": 1.5, "cpu_s_per_gb": 0.25}';;
esac)");
  const auto done = compare();
  ASSERT_EQ(done.exit_code, 0) << done.errors;
  const auto results = results_of(done.output);
  for (const std::string mode : {"tcp", "pooled"}) {
    const std::string name = "mooncake " + mode + ": tcp write 1MiB";
    ASSERT_TRUE(results.contains(name)) << done.output;
    EXPECT_EQ(results.at(name).value("refused", ""), "too many");
    EXPECT_FALSE(results.at(name).contains("gb_per_s"));
    ASSERT_TRUE(results.contains(name + ", 64 a batch")) << done.output;
    EXPECT_EQ(results.at(name + ", 64 a batch").value("gb_per_s", 0.0), 1.5);
    EXPECT_EQ(results.at(name + ", 64 a batch").value("cpu_s_per_gb", 0.0), 0.25);
  }
}

// The names of these cases have an apostrophe, which ends a word of the shell.
TEST_F(Versus, MemoryOfTheCallerIsComparedToo) {
  peer(R"(case "$*" in
*import*) exit 0;;
*) echo 'RESULT {"gb_per_s": 1.5, "cpu_s_per_gb": 0.25}';;
esac)");
  const auto done = compare("1min", {"--user-memory"});
  ASSERT_EQ(done.exit_code, 0) << done.errors;
  const auto results = results_of(done.output);
  const std::string name = "mooncake tcp: tcp write 1MiB, caller's memory";
  ASSERT_TRUE(results.contains(name)) << done.output;
  EXPECT_EQ(results.at(name).value("gb_per_s", 0.0), 1.5) << results.at(name);
}

TEST_F(Versus, APeerThatBreaksIsNotSaidToBeSlow) {
  peer(R"(case "$*" in *import*) exit 0;; esac; exit 3)");
  const auto done = compare();
  ASSERT_EQ(done.exit_code, 0) << done.errors;
  const auto results = results_of(done.output);
  ASSERT_TRUE(results.contains("mooncake tcp: tcp write 1MiB")) << done.output;
  EXPECT_EQ(results.at("mooncake tcp: tcp write 1MiB").value("refused", ""),
            "its process ended with 3 and without a result");
}

}  // namespace
}  // namespace crossdock

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  if (argc != 2) {
    std::fprintf(stderr, "usage: tools_transfer_bench PATH-OF-CROSSDOCK\n");
    return 1;
  }
  crossdock::g_program = argv[1];
  return RUN_ALL_TESTS();
}
