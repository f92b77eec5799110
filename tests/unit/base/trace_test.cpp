// SPDX-License-Identifier: Apache-2.0
#include "base/trace.hpp"

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "support/temp_dir.hpp"

namespace crossdock::base {
namespace {

using nlohmann::json;

json read(const std::string& path) {
  return json::parse(std::ifstream(path));
}

std::vector<json> events_named(const json& trace, const std::string& name) {
  std::vector<json> found;
  for (const auto& event : trace.at("traceEvents"))
    if (event.at("name") == name) found.push_back(event);
  return found;
}

TEST(Tracer, WritesEveryKindOfEvent) {
  const support::TempDir dir;
  Tracer tracer({.file = dir.path() + "/t.json", .process_name = "prefill \"a\""});
  ASSERT_TRUE(tracer.on());
  tracer.name_thread("main");
  const auto row = tracer.track("request 7");
  {
    TraceSpan span(tracer, "slice", {"bytes", 4096});
    tracer.flow_begin("handover", 0x2a);
  }
  tracer.span("compute", 1'234'567'890, 1'234'569'001, {}, row);
  tracer.instant("first token", {"request", 7}, row);
  tracer.counter("in flight", -3);
  tracer.flow_step("handover", 0x2a);
  tracer.flow_end("handover", 0x2a);
  tracer.instant(tracer.intern("peer \\ \n x"));
  ASSERT_TRUE(tracer.flush().ok());

  const json trace = read(tracer.file());
  const auto slice = events_named(trace, "slice").at(0);
  EXPECT_EQ(slice.at("ph"), "X");
  EXPECT_EQ(slice.at("pid"), ::getpid());
  EXPECT_EQ(slice.at("tid"), ::gettid());
  EXPECT_EQ(slice.at("args").at("bytes"), 4096);
  const auto compute = events_named(trace, "compute").at(0);
  EXPECT_DOUBLE_EQ(compute.at("ts"), 1'234'567.890);
  EXPECT_DOUBLE_EQ(compute.at("dur"), 1.111);
  const auto token = events_named(trace, "first token").at(0);
  EXPECT_EQ(token.at("tid"), compute.at("tid"));
  EXPECT_NE(token.at("tid"), ::gettid());
  EXPECT_EQ(events_named(trace, "in flight").at(0).at("args").at("value"), -3);
  const auto flow = events_named(trace, "handover");
  ASSERT_EQ(flow.size(), 3u);
  EXPECT_EQ(flow[0].at("ph"), "s");
  EXPECT_EQ(flow[1].at("ph"), "t");
  EXPECT_EQ(flow[2].at("ph"), "f");
  for (const auto& part : flow)
    EXPECT_EQ(part.at("id"), "0x2a");
  EXPECT_EQ(events_named(trace, "peer \\ \n x").size(), 1u);
  EXPECT_EQ(events_named(trace, "process_name").at(0).at("args").at("name"), "prefill \"a\"");
  std::set<std::string> rows;
  for (const auto& name : events_named(trace, "thread_name"))
    rows.insert(name["args"]["name"]);
  EXPECT_THAT(rows, testing::UnorderedElementsAre("main", "request 7"));
  EXPECT_EQ(trace.at("otherData").at("lost_events"), 0);
}

TEST(Tracer, KeepsTheNewestEventsAndCountsTheRest) {
  const support::TempDir dir;
  Tracer tracer({.file = dir.path() + "/t.json", .events_per_thread = 64});
  for (std::uint64_t i = 0; i < 1000; ++i)
    tracer.instant("tick", {"i", i});
  ASSERT_TRUE(tracer.flush().ok());
  const json trace = read(tracer.file());
  const auto ticks = events_named(trace, "tick");
  ASSERT_EQ(ticks.size(), 64u);
  EXPECT_EQ(ticks.front().at("args").at("i"), 936);
  EXPECT_EQ(ticks.back().at("args").at("i"), 999);
  EXPECT_EQ(trace.at("otherData").at("lost_events"), 936);
}

TEST(Tracer, OffMeansNoFileAndNoEvents) {
  Tracer tracer({});
  EXPECT_FALSE(tracer.on());
  {
    TraceSpan span(tracer, "x");
  }
  tracer.instant("x");
  EXPECT_EQ(tracer.track("row").id, 0u);
  EXPECT_TRUE(tracer.flush().ok());
}

TEST(Tracer, DestructionWritesTheFile) {
  const support::TempDir dir;
  std::string file;
  {
    Tracer tracer({.file = dir.path() + "/%p.json"});
    tracer.instant("x");
    file = tracer.file();
  }
  EXPECT_EQ(file, dir.path() + "/" + std::to_string(::getpid()) + ".json");
  EXPECT_EQ(events_named(read(file), "x").size(), 1u);
}

TEST(Tracer, UnwritableFileIsAnErrorThatNamesIt) {
  Tracer tracer({.file = "/nonexistent-folder/t.json"});
  tracer.instant("x");
  const auto flushed = tracer.flush();
  ASSERT_EQ(flushed.code(), Code::kNotFound);
  EXPECT_THAT(flushed.error().message, testing::HasSubstr("/nonexistent-folder/t.json"));
}

TEST(Tracer, TwoTracersInOneThreadKeepApart) {
  const support::TempDir dir;
  Tracer a({.file = dir.path() + "/a.json"});
  Tracer b({.file = dir.path() + "/b.json"});
  for (int i = 0; i < 3; ++i) {
    a.instant("a");
    b.instant("b");
  }
  ASSERT_TRUE(a.flush().ok() && b.flush().ok());
  EXPECT_EQ(events_named(read(a.file()), "a").size(), 3u);
  EXPECT_TRUE(events_named(read(a.file()), "b").empty());
  EXPECT_EQ(events_named(read(b.file()), "b").size(), 3u);
}

TEST(Tracer, OverlappingSpansArePairsWithIdsOfTheirOwn) {
  const support::TempDir dir;
  Tracer tracer({.file = dir.path() + "/t.json"});
  tracer.overlapping("transfer", 1'000, 10'000, {"bytes", 1});
  tracer.overlapping("transfer", 2'500, 15'000, {"bytes", 2});
  ASSERT_TRUE(tracer.flush().ok());
  const auto events = events_named(read(tracer.file()), "transfer");
  ASSERT_EQ(events.size(), 4u);
  for (std::size_t i = 0; i < 4; i += 2) {
    EXPECT_EQ(events[i].at("ph"), "b");
    EXPECT_EQ(events[i].at("args").at("bytes"), i / 2 + 1);
    EXPECT_EQ(events[i + 1].at("ph"), "e");
    EXPECT_EQ(events[i].at("id2"), events[i + 1].at("id2"));
    EXPECT_EQ(events[i].at("cat"), events[i + 1].at("cat"));
  }
  EXPECT_NE(events[0].at("id2").at("local"), events[2].at("id2").at("local"));
  EXPECT_DOUBLE_EQ(events[2].at("ts"), 2.5);
  EXPECT_DOUBLE_EQ(events[3].at("ts"), 15.0);
}

TEST(Tracer, OneOfTheProcessForAFile) {
  const support::TempDir dir;
  const std::string file = dir.path() + "/%p.json";
  const auto first = Tracer::of_process({.file = file});
  EXPECT_EQ(Tracer::of_process({.file = first->file()}), first);
  EXPECT_NE(Tracer::of_process({.file = dir.path() + "/other.json"}), first);
  EXPECT_FALSE(Tracer::of_process({})->on());
}

TEST(Tracer, OneOfTheProcessForAFileWhoeverIsFirst) {
  const support::TempDir dir;
  for (int round = 0; round < 50; ++round) {
    const std::string file = dir.path() + "/" + std::to_string(round) + ".json";
    std::array<std::shared_ptr<Tracer>, 4> got;
    std::vector<std::thread> threads;
    for (auto& of_thread : got)
      threads.emplace_back([&] { of_thread = Tracer::of_process({.file = file}); });
    for (auto& thread : threads)
      thread.join();
    for (const auto& tracer : got)
      ASSERT_EQ(tracer, got[0]);
    EXPECT_TRUE(got[0]->on());
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}
// A child that is forked while another thread asks for tracers asks for one, too.
TEST(Tracer, AForkedChildGetsOneOfItsOwn) {
  const support::TempDir dir;
  std::atomic<bool> stop{false};
  std::thread asks([&] {
    for (int i = 0; !stop.load(std::memory_order_relaxed); ++i)
      (void)Tracer::of_process({.file = dir.path() + "/" + std::to_string(i % 64) + ".json"});
  });
  const auto mine = Tracer::of_process({.file = dir.path() + "/mine.json"});
  for (int i = 0; i < 100; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(20);  // ends a child that waits for ever
      ::_exit(Tracer::of_process({.file = mine->file()}) != mine ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (status != 0) {
      ADD_FAILURE() << "child " << i << " ended with status " << status;
      break;
    }
  }
  stop.store(true, std::memory_order_relaxed);
  asks.join();
}

TEST(Tracer, CheckingTheFileLeavesNothing) {
  const support::TempDir dir;
  const Tracer tracer({.file = dir.path() + "/t.json"});
  EXPECT_TRUE(tracer.check_writable().ok());
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  EXPECT_EQ(Tracer({.file = "/nonexistent-folder/t.json"}).check_writable().code(),
            Code::kNotFound);
}

// Writers overrun small rings while another thread flushes: every event that is written must be one
// that was made, never half of two.
TEST(Tracer, FlushBesideWritersSeesWholeEvents) {
  const support::TempDir dir;
  Tracer tracer({.file = dir.path() + "/t.json", .events_per_thread = 64});
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int t = 0; t < 2; ++t)
    writers.emplace_back([&] {
      for (std::uint64_t i = 1; !stop.load(std::memory_order_relaxed); ++i)
        tracer.span("w", i * 1000, i * 2000, {"i", i});
    });
  std::size_t seen = 0;
  for (int round = 0; round < 50; ++round) {
    ASSERT_TRUE(tracer.flush().ok());
    for (const auto& event : events_named(read(tracer.file()), "w")) {
      const auto i = event.at("args").at("i").get<double>();
      EXPECT_DOUBLE_EQ(event.at("ts"), i);
      EXPECT_DOUBLE_EQ(event.at("dur"), i);
      ++seen;
    }
  }
  stop.store(true, std::memory_order_relaxed);
  for (auto& writer : writers)
    writer.join();
  ASSERT_TRUE(tracer.flush().ok());
  EXPECT_EQ(events_named(read(tracer.file()), "w").size(), 128u);
  (void)seen;
}

}  // namespace
}  // namespace crossdock::base
