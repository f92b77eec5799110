// The timeline that engines write: of all engines of the process that name one file, with transfers
// that overlap, and a word where it cannot be written.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "support/engines.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::testing {
namespace {

using nlohmann::json;

EngineOptions traced(const std::string& file) {
  return {.config = {{"trace.file", file}}};
}

json events_in(const std::string& file) {
  return json::parse(std::ifstream(file)).at("traceEvents");
}

// Begins of transfers that are there, whichever way they are written.
std::vector<json> transfers_in(const std::string& file) {
  std::vector<json> found;
  const json events = events_in(file);
  for (const json& event : events)
    if (event.at("name") == "transfer" && event.at("ph") != "e") found.push_back(event);
  return found;
}

std::size_t count_of(const std::vector<json>& events, std::uint64_t bytes) {
  return static_cast<std::size_t>(std::ranges::count_if(
      events, [&](const json& event) { return event.at("args").at("bytes") == bytes; }));
}

TEST(EngineTrace, EnginesOfAProcessShareAFile) {
  const support::TempDir folder;
  const auto file = folder.path() + "/t-%p.json";
  const auto written = folder.path() + "/t-" + std::to_string(::getpid()) + ".json";
  {
    Pair pair("tcp", 1 << 16, false, traced(file), traced(file));
    ASSERT_TRUE(pair.run({pair.write(0, 4096)}).ok());
    const auto back = pair.target.open(pair.source.name(), soon()).value();
    const Request request{.op = Op::kWrite,
                          .local = bytes_of(pair.remote),
                          .remote = address_of(pair.local),
                          .length = 8192};
    ASSERT_TRUE(pair.target.transfer(back, {&request, 1}, {.deadline = soon()}).ok());
    ASSERT_TRUE(pair.source.close(soon()).ok());
    ASSERT_TRUE(pair.target.close(soon()).ok());
  }
  auto transfers = transfers_in(written);
  EXPECT_EQ(count_of(transfers, 4096), 1u);
  EXPECT_EQ(count_of(transfers, 8192), 1u);
  // One that is created after the others have been closed, and moves nothing.
  ASSERT_TRUE(make_engine("tcp", traced(file)).close(soon()).ok());
  transfers = transfers_in(written);
  EXPECT_EQ(count_of(transfers, 4096) + count_of(transfers, 8192), 2u);
}

// A viewer drops events "X" of one row that overlap and do not nest.
TEST(EngineTrace, OverlappingTransfersAreShown) {
  constexpr std::size_t kTransfers = 8;
  const support::TempDir folder;
  const auto file = folder.path() + "/t.json";
  Pair pair("tcp", kTransfers << 20, false, traced(file));
  std::vector<Transfer> running;
  for (std::size_t i = 0; i < kTransfers; ++i)
    running.push_back(
        pair.source
            .submit(pair.peer, std::vector{pair.write(i << 20, 1 << 20)}, {.deadline = soon()})
            .value());
  for (auto& transfer : running)
    ASSERT_TRUE(transfer.wait(soon()).ok());
  ASSERT_TRUE(pair.source.close(soon()).ok());

  std::map<std::string, std::vector<json>> pairs;
  const json all = events_in(file);
  for (const json& event : all) {
    if (event.at("name") != "transfer") continue;
    EXPECT_NE(event.at("ph"), "X") << event;
    if (event.contains("id2")) pairs[event.at("id2").at("local")].push_back(event);
  }
  EXPECT_EQ(pairs.size(), kTransfers);
  for (const auto& [id, events] : pairs) {
    ASSERT_EQ(events.size(), 2u) << id;
    EXPECT_EQ(events[0].at("ph"), "b");
    EXPECT_EQ(events[1].at("ph"), "e");
    EXPECT_LE(events[0].at("ts").get<double>(), events[1].at("ts").get<double>());
  }
}

TEST(EngineTrace, AFileThatCannotBeWrittenIsTold) {
  ::testing::internal::CaptureStderr();
  auto engine = make_engine("tcp", traced("/nonexistent-folder/t.json"));
  const std::string at_once = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(at_once, ::testing::HasSubstr("/nonexistent-folder/t.json"));
  EXPECT_THAT(at_once, ::testing::HasSubstr("CROSSDOCK_TRACE"));
  EXPECT_TRUE(engine.close(soon()).ok());
}

}  // namespace
}  // namespace crossdock::testing
