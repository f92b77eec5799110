// The subcommands info, topo, doctor, trace, jit, and bench in the twin, through the built program.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <crossdock/core/version.hpp>

#include "base/config.hpp"
#include "base/socket.hpp"
#include "base/trace.hpp"
#include "support/fibers.hpp"
#include "support/run_command.hpp"
#include "support/running_command.hpp"
#include "support/temp_dir.hpp"
#include "unit/jit/jit_fixture.hpp"

namespace crossdock {
namespace {

using nlohmann::json;
using support::CommandResult;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

std::string g_program;  // NOLINT: set once by main() before any test runs

CommandResult crossdock_command(std::vector<std::string> arguments,
                                std::vector<std::string> environment = {}) {
  arguments.insert(arguments.begin(), g_program);
  return support::run_command(std::move(arguments), std::move(environment));
}

TEST(Command, VersionAndHelp) {
  const auto version = crossdock_command({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.output, "crossdock " + std::string(kVersion) + "\n");
  const auto help = crossdock_command({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const auto* name : {"info", "topo", "doctor", "trace"})
    EXPECT_THAT(help.output, HasSubstr(name));
}

TEST(Command, MistakesEndWithTwoAndASentence) {
  const auto nothing = crossdock_command({});
  EXPECT_EQ(nothing.exit_code, 2);
  const auto typo = crossdock_command({"inof"});
  EXPECT_EQ(typo.exit_code, 2);
  EXPECT_THAT(typo.errors, HasSubstr("no subcommand 'inof' (did you mean 'info'?)"));
  EXPECT_EQ(crossdock_command({"info", "--no-such-flag"}).exit_code, 2);
  const auto setting = crossdock_command({"info"}, {"CROSSDOCK_TRANSFER_TIMEOUT=soon"});
  EXPECT_EQ(setting.exit_code, 2);
  EXPECT_THAT(setting.errors, HasSubstr("environment CROSSDOCK_TRANSFER_TIMEOUT"));
}

TEST(Info, ConfigShowsEverySettingWithItsSource) {
  const auto shown = crossdock_command(
      {"info", "--config", "--json"},
      {"CROSSDOCK_TRANSFER_SLICE_BYTES=128KiB", "CROSSDOCK_CONTROL_SECRET=hunter2"});
  ASSERT_EQ(shown.exit_code, 0) << shown.errors;
  EXPECT_THAT(shown.output, testing::Not(HasSubstr("hunter2")));
  const json info = json::parse(shown.output);
  EXPECT_EQ(info.at("version"), kVersion);
  std::set<std::string> names;
  for (const auto& setting : info.at("settings")) {
    names.insert(setting.at("name"));
    if (setting.at("name") != "transfer.slice_bytes") continue;
    EXPECT_EQ(setting.at("value"), "128KiB");
    EXPECT_EQ(setting.at("source"), "environment CROSSDOCK_TRANSFER_SLICE_BYTES");
  }
  EXPECT_EQ(names.size(), base::settings().size());
  const auto text = crossdock_command({"info", "--config"});
  EXPECT_THAT(text.output, HasSubstr("transfer.slice_bytes = 64KiB\n"));
}

TEST(Info, WarnsOfUnknownVariables) {
  const auto shown = crossdock_command({"info"}, {"CROSSDOCK_LGO_LEVEL=debug"});
  EXPECT_EQ(shown.exit_code, 0);
  EXPECT_THAT(shown.errors, HasSubstr("did you mean 'CROSSDOCK_LOG_LEVEL'?"));
}

TEST(Topo, ReadsTheGivenRoot) {
  const support::TempDir root;
  root.write("sys/devices/system/node/node0/cpulist", "0-3\n");
  root.write("sys/class/net/lo/operstate", "unknown\n");
  root.write("sys/class/net/lo/type", "772\n");
  const auto shown = crossdock_command({"topo", "--json", "--root", root.path()});
  ASSERT_EQ(shown.exit_code, 0) << shown.errors;
  const json topo = json::parse(shown.output);
  EXPECT_EQ(topo.at("nodes").at(0).at("cpus"), json::parse("[0,1,2,3]"));
  EXPECT_EQ(topo.at("nics").at(0).at("kind"), "loopback");
  const auto text = crossdock_command({"topo", "--root", root.path()});
  EXPECT_THAT(text.output, HasSubstr("node 0  4 CPUs (0-3)"));
  const auto missing = crossdock_command({"topo", "--root", root.path() + "/none"});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_THAT(missing.errors, HasSubstr("mount sysfs"));
}

TEST(Doctor, NamesHealthCauseAndFix) {
  const auto shown = crossdock_command({"doctor", "--json"});
  const json findings = json::parse(shown.output);
  std::set<std::string> names;
  bool broken = false;
  for (const auto& finding : findings) {
    names.insert(finding.at("name"));
    const std::string health = finding.at("health");
    broken |= health == "broken";
    if (health == "poor" || health == "broken") {
      EXPECT_NE(finding.at("cause"), "") << finding;
      EXPECT_NE(finding.at("fix"), "") << finding;
    }
  }
  EXPECT_EQ(shown.exit_code, broken ? 1 : 0);
  for (const auto* name :
       {"open files", "process_vm calls", "CUDA driver", "kernel compiler", "/dev/shm"})
    EXPECT_TRUE(names.contains(name)) << name;
}

TEST(Doctor, SpeaksOfWhatIsThere) {
  const auto shown = crossdock_command({"doctor"});
  for (const auto* absent : {"RDMA", "rdma", "verbs", "peermem"})
    EXPECT_THAT(shown.output, Not(HasSubstr(absent)));
  EXPECT_THAT(shown.output, Not(ContainsRegex("[0-9]{5,}KiB")));
}

json finding_below(const std::string& root, const std::string& name) {
  const json findings = json::parse(crossdock_command({"doctor", "--json", "--root", root}).output);
  for (const json& finding : findings)
    if (finding.at("name") == name) return finding;
  return {};
}

// Bit 19 is CAP_SYS_PTRACE; this test runs as root or not.
TEST(Doctor, PtraceIsAMatterOfTheCapability) {
  const std::string with = "Uid:\t0\t0\t0\t0\nCapEff:\t00000000000a0000\n";
  const std::string without = "Uid:\t0\t0\t0\t0\nCapEff:\t00000000a80425fb\n";
  for (const auto& [scope, status, health] :
       {std::tuple{"0", without, "good"}, std::tuple{"1", without, "poor"},
        std::tuple{"1", with, "good"}, std::tuple{"2", with, "good"},
        std::tuple{"3", with, "poor"}}) {
    const support::TempDir root;
    root.write("proc/sys/kernel/yama/ptrace_scope", std::string(scope) + "\n");
    root.write("proc/self/status", status);
    EXPECT_EQ(finding_below(root.path(), "ptrace scope").at("health"), health) << scope << status;
  }
}

TEST(Doctor, BrokenSettingsAreBroken) {
  const auto shown = crossdock_command({"doctor"}, {"CROSSDOCK_TRANSFER_MERGE=perhaps"});
  EXPECT_EQ(shown.exit_code, 1);
  EXPECT_THAT(shown.output, HasSubstr("broken  settings"));
}

TEST(Store, SaysWhatEnginesTakeAndEndsBySignal) {
  support::RunningCommand first({g_program, "store", "--listen", "127.0.0.3:0"});
  const std::string serving = first.line(Deadline::in(std::chrono::seconds(20)));
  ASSERT_THAT(serving, testing::StartsWith("serving tcp://127.0.0.3:"));
  EXPECT_EQ(first.line(Deadline::in(std::chrono::seconds(20))),
            "for engines and ranks here: store=" + serving.substr(8));
  const auto second = crossdock_command({"store", "--listen", serving.substr(14)});
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.errors, HasSubstr("name another port with --listen"));
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(Deadline::in(std::chrono::seconds(20))).exit_code, 0);
}

// A whole range of loopback addresses is there; the port is that of the help.
TEST(Store, WithoutAPortTakesTheDefault) {
  if (!base::listen_tcp(base::HostPort{"127.0.0.4", 7070}, Deadline::in(std::chrono::seconds(5))))
    GTEST_SKIP() << "another program listens on 127.0.0.4:7070";
  support::RunningCommand store({g_program, "store", "--http", "--listen", "127.0.0.4"});
  EXPECT_EQ(store.line(Deadline::in(std::chrono::seconds(20))),
            "serving http://127.0.0.4:7070/metadata");
}

std::string make_trace(const support::TempDir& dir, const std::string& name) {
  base::Tracer tracer({.file = dir.path() + "/" + name, .process_name = name});
  tracer.instant("mark");
  EXPECT_TRUE(tracer.flush().ok());
  return tracer.file();
}

// Whole layers in the twin, compared with fp64: weights in e2m1, and scales of one byte.
TEST(BenchMoe, ChainsOfEveryFormat) {
  CROSSDOCK_SKIP_WITHOUT_FIBERS();
  for (const auto* scales : {"f32", "ue8m0"}) {
    const auto done =
        crossdock_command({"bench", "moe", "--backend", "twin", "--chain", "--tokens", "5",
                           "--format", "fp4", "fp8", "--scales", scales, "--json"});
    ASSERT_EQ(done.exit_code, 0) << done.errors;
    EXPECT_THAT(done.output, HasSubstr("chain_fp4"));
    EXPECT_THAT(done.output, HasSubstr("chain_fp8"));
  }
}

TEST(TraceMerge, KeepsAllEventsAndTellsProcessesApart) {
  const support::TempDir dir;
  const auto a = make_trace(dir, "a");
  const auto b = make_trace(dir, "b");  // the same process id, as from another host
  const auto merged = crossdock_command({"trace", "merge", a, b, "-o", dir.path() + "/m"});
  ASSERT_EQ(merged.exit_code, 0) << merged.errors;
  const json trace = json::parse(std::ifstream(dir.path() + "/m"));
  std::set<std::int64_t> processes;
  std::set<std::string> names;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("name") == "mark") processes.insert(event.at("pid").get<std::int64_t>());
    if (event.at("name") == "process_name") names.insert(event.at("args").at("name"));
  }
  EXPECT_EQ(processes.size(), 2u);
  EXPECT_THAT(names, testing::ElementsAre("a", "b"));
}

TEST(TraceMerge, ShiftsTracesOfOtherHosts) {
  const support::TempDir dir;
  const auto trace = [&](const std::string& name, const std::string& ts,
                         const std::string& offset) {
    return dir.write(name, R"({"traceEvents":[{"ph":"i","name":"x","pid":1,"ts":)" + ts +
                               R"(}],"otherData":{"clock_offset_ns":)" + offset + "}}");
  };
  const auto a = trace("a", "1000", "5000000000");
  const auto b = trace("b", "2000", "9000000000");
  ASSERT_EQ(crossdock_command({"trace", "merge", a, b, "-o", dir.path() + "/m"}).exit_code, 0);
  const json merged = json::parse(std::ifstream(dir.path() + "/m"));
  EXPECT_EQ(merged["traceEvents"][0]["ts"], 1000.0);
  EXPECT_EQ(merged["traceEvents"][1]["ts"], 4002000.0);
}

TEST(TraceMerge, RefusesWhatIsNoTrace) {
  const support::TempDir dir;
  const auto bad = dir.write("bad", "{\"a\": 1");
  const auto merged = crossdock_command({"trace", "merge", bad, "-o", dir.path() + "/m"});
  EXPECT_EQ(merged.exit_code, 2);
  EXPECT_THAT(merged.errors, HasSubstr("bad is no trace"));
  EXPECT_EQ(crossdock_command({"trace", "merge", dir.path() + "/none", "-o", "m"}).exit_code, 1);
}

// ---- jit ---------------------------------------------------------------------------------------

// A compiler that is called as nvcc is, and "compiles" everything to one image; and a cache.
class JitCommand : public testing::Test {
 protected:
  JitCommand() {
    const auto image = jit::make_cubin({"code"});
    folder_.write("image", {reinterpret_cast<const char*>(image.data()), image.size()});
    compiler_ = folder_.write("nvcc", R"(#!/bin/sh
[ "$1" = --version ] && { echo "Cuda compilation tools, release 1.2, V1.2.3"; exit 0; }
while [ "$1" != -o ]; do shift; done
cp "${0%/*}/image" "$2"
echo "ptxas info    : Used 40 registers"
)");
    std::filesystem::permissions(compiler_, std::filesystem::perms::owner_all);
  }
  [[nodiscard]] CommandResult jit(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "jit");
    return crossdock_command(std::move(arguments),
                             {"CROSSDOCK_JIT_NVRTC=none", "CROSSDOCK_JIT_NVCC=" + compiler_,
                              "CROSSDOCK_JIT_CACHE_DIR=" + cache_});
  }
  [[nodiscard]] CommandResult warm() const {
    return jit({"warm", "--kernel", "fill", "--sm", "90"});
  }
  [[nodiscard]] std::vector<std::filesystem::path> kernels() const {
    std::vector<std::filesystem::path> files;
    for (const auto& file : std::filesystem::directory_iterator(cache_))
      if (file.path().extension() == ".kernel") files.push_back(file.path());
    return files;
  }
  support::TempDir folder_;
  std::string cache_ = folder_.path() + "/cache";
  std::string compiler_;
};

TEST_F(JitCommand, DoctorFindsTheCompilerOfTheSettings) {
  const auto shown = crossdock_command(
      {"doctor", "--json"}, {"CROSSDOCK_JIT_NVRTC=none", "CROSSDOCK_JIT_NVCC=" + compiler_});
  const json findings = json::parse(shown.output);
  const auto found = std::ranges::find_if(
      findings, [](const json& finding) { return finding.at("name") == "kernel compiler"; });
  ASSERT_NE(found, findings.end());
  EXPECT_EQ(found->at("health"), "good") << *found;
  EXPECT_THAT(found->at("found").get<std::string>(), HasSubstr(compiler_));
}

TEST_F(JitCommand, WarmCompilesOnceAndListNamesTheKernels) {
  EXPECT_THAT(jit({"list"}).output, HasSubstr("0 kernels, 0 bytes in " + cache_));
  const auto warmed = warm();
  ASSERT_EQ(warmed.exit_code, 0) << warmed.output << warmed.errors;
  EXPECT_THAT(warmed.output, HasSubstr("ready   fill{.threads = 256} for sm_90a\n"));
  EXPECT_THAT(warmed.output, HasSubstr("2 compiled, 0 were there, 0 failed, in " + cache_));
  EXPECT_THAT(warm().output, HasSubstr("0 compiled, 2 were there, 0 failed"));
  const auto listed = jit({"list"});
  ASSERT_EQ(listed.exit_code, 0) << listed.errors;
  for (const auto* kernel : {"fill{.threads = 256} for sm_90a", "fill{.threads = 1024} for sm_90a"})
    EXPECT_THAT(listed.output, HasSubstr(std::string(kernel) + ", 40 registers, 0 bytes spilled"));
  EXPECT_THAT(listed.output, HasSubstr("nvcc 1.2.3"));
  EXPECT_THAT(listed.output, HasSubstr("\n2 kernels, "));
}

TEST_F(JitCommand, VerifyFailsOnADamagedFileWhichIsCompiledAgain) {
  ASSERT_EQ(warm().exit_code, 0);
  const auto good = jit({"verify"});
  EXPECT_EQ(good.exit_code, 0);
  EXPECT_THAT(good.output, HasSubstr("2 kernels, 0 damaged"));
  const auto damaged = kernels().at(0);
  std::fstream file(damaged, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('x');
  file.close();
  const auto bad = jit({"verify"});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_THAT(bad.output, HasSubstr(damaged.filename().string() + ": "));
  EXPECT_THAT(bad.output, HasSubstr("2 kernels, 1 damaged"));
  const auto listed = jit({"list"});
  EXPECT_EQ(listed.exit_code, 0);
  EXPECT_THAT(listed.output, HasSubstr(damaged.filename().string() + "\n    unreadable: "));
  EXPECT_THAT(warm().output, HasSubstr("1 compiled, 1 were there, 0 failed"));
  EXPECT_EQ(jit({"verify"}).exit_code, 0);
}

TEST_F(JitCommand, PruneEmptiesTheCache) {
  ASSERT_EQ(warm().exit_code, 0);
  EXPECT_THAT(jit({"prune", "--max-age", "1h"}).output, HasSubstr("removed 0 kernels"));
  EXPECT_EQ(kernels().size(), 2u);
  const auto pruned = jit({"prune"});
  EXPECT_EQ(pruned.exit_code, 0) << pruned.errors;
  EXPECT_THAT(pruned.output, HasSubstr("removed 2 kernels, "));
  EXPECT_THAT(pruned.output, HasSubstr("; 0 bytes stay in " + cache_));
  EXPECT_TRUE(kernels().empty());
  EXPECT_THAT(jit({"list"}).output, HasSubstr("0 kernels, 0 bytes"));
}

TEST_F(JitCommand, WarmFailsWhereNothingCompiles) {
  folder_.write("image", "no machine code");
  const auto failed = warm();
  EXPECT_EQ(failed.exit_code, 1);
  EXPECT_THAT(failed.output, HasSubstr("failed  fill{.threads = 256} for sm_90a: "));
  EXPECT_THAT(failed.output, HasSubstr("0 compiled, 0 were there, 2 failed"));
  compiler_ = "none";
  const auto none = warm();
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_THAT(none.errors, HasSubstr("no CUDA compiler for the kernels"));
  EXPECT_EQ(jit({"warm", "--kernel", "no_such"}).exit_code, 2);
  EXPECT_THAT(jit({"warm", "--dry-run"}).output, HasSubstr("fill{.threads = 256} for sm_100a\n"));
}

}  // namespace
}  // namespace crossdock

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  if (argc != 2) {
    std::fprintf(stderr, "usage: tools_command PATH-OF-CROSSDOCK\n");
    return 1;
  }
  crossdock::g_program = argv[1];
  return RUN_ALL_TESTS();
}
