// `crossdock bench` in the twin, through the built program: it ends well, and its JSON has what
// scripts read. There are no times to look at.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include <crossdock/core/version.hpp>

#include "support/fibers.hpp"
#include "support/run_command.hpp"

namespace crossdock {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::string g_program;  // NOLINT: set once by main() before any test runs

support::CommandResult run(std::vector<std::string> arguments,
                           std::vector<std::string> environment = {}) {
  arguments.insert(arguments.begin(), {g_program, "bench"});
  return support::run_command(std::move(arguments), std::move(environment));
}
// With --json; null after a failure.
json report_of(std::vector<std::string> arguments, std::vector<std::string> environment = {}) {
  arguments.insert(arguments.end(), {"--backend", "twin", "--json"});
  const auto done = run(std::move(arguments), std::move(environment));
  EXPECT_EQ(done.exit_code, 0) << done.errors;
  const json report = json::parse(done.output, nullptr, false);
  EXPECT_TRUE(report.is_object()) << done.output;
  if (!report.is_object()) return nullptr;
  EXPECT_EQ(report.value("version", ""), kVersion);
  EXPECT_EQ(report.value("backend", ""), "twin");
  EXPECT_TRUE(report.contains("results"));
  return report;
}
std::set<std::string> names_of(const json& report) {
  std::set<std::string> names;
  for (const json& result : report.at("results")) {
    names.insert(result.at("name"));
    EXPECT_TRUE(result.at("value").is_number());
    EXPECT_TRUE(result.at("unit").is_string());
  }
  return names;
}

TEST(BenchSymm, SaysOfEveryKernelThatItIsRight) {
  const json report = report_of({"symm", "--world", "2", "--repeat", "1"});
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report.at("schema"), "crossdock.bench.symm/1");
  EXPECT_EQ(report.at("world"), "2");
  EXPECT_THAT(report.dump(), HasSubstr(R"(:"right")"));
}

TEST(BenchEp, ComparesEveryPath) {
  CROSSDOCK_SKIP_WITHOUT_FIBERS();
  const json report = report_of({"ep", "--world", "2", "--compressed", "--masks", "--expanded"});
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report.at("schema"), "crossdock.bench.ep/1");
  EXPECT_EQ(report.at("world"), "2");
  EXPECT_EQ(report.at("data"), "right");
  EXPECT_EQ(report.at("shapes"), "6");
}

// Only the process of rank 0 reports, and options come before the environment.
TEST(BenchEp, TakesTheWorldOfALauncher) {
  CROSSDOCK_SKIP_WITHOUT_FIBERS();
  const json report = report_of({"ep"}, {"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0"});
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report.at("world"), "2");
  const auto other = run({"ep", "--backend", "twin", "--json"}, {"RANK=1", "WORLD_SIZE=2"});
  EXPECT_EQ(other.exit_code, 0) << other.errors;
  EXPECT_EQ(other.output, "");
  const json told = report_of({"ep", "--world", "3"}, {"RANK=1", "WORLD_SIZE=2"});
  ASSERT_TRUE(told.is_object());
  EXPECT_EQ(told.at("world"), "3");
  const auto wrong = run({"ep", "--backend", "twin"}, {"RANK=one", "WORLD_SIZE=2"});
  EXPECT_NE(wrong.exit_code, 0);
  EXPECT_THAT(wrong.errors, HasSubstr("RANK=one"));
}

TEST(BenchMoe, ComparesProducts) {
  const json report = report_of({"moe", "--world", "1", "--rows", "5", "--format", "fp8", "bf16"});
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report.at("schema"), "crossdock.bench.moe/1");
  EXPECT_EQ(report.at("data"), "right");
  EXPECT_TRUE(names_of(report).contains("small_l1_fp8_5_error"));
  EXPECT_TRUE(names_of(report).contains("small_l2_bf16_5_error"));
}

TEST(BenchMoe, ComparesLayersWithSharedExpertsAndWithout) {
  CROSSDOCK_SKIP_WITHOUT_FIBERS();
  for (const bool shared : {false, true}) {
    std::vector<std::string> arguments = {"moe",       "--chain", "--world",  "1",
                                          "--tokens",  "5",       "--format", "bf16",
                                          "--routing", "even",    "gate-zipf"};
    if (shared) arguments.emplace_back("--shared");
    const json report = report_of(arguments);
    ASSERT_TRUE(report.is_object());
    const std::string end = shared ? "_shared_error" : "_error";
    EXPECT_TRUE(names_of(report).contains("small_chain_bf16_5" + end));
    EXPECT_TRUE(names_of(report).contains("small_chain_bf16_5_gate-zipf" + end));
  }
}

TEST(Bench, MistakesAreNamed) {
  const auto rows = run({"moe", "--backend", "nowhere"});
  EXPECT_NE(rows.exit_code, 0);
  EXPECT_THAT(rows.errors, HasSubstr("--backend"));
}

}  // namespace
}  // namespace crossdock

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  if (argc != 2) {
    std::fprintf(stderr, "usage: tools_bench PATH-OF-CROSSDOCK\n");
    return 1;
  }
  crossdock::g_program = argv[1];
  return RUN_ALL_TESTS();
}
