// The reader of request traces: what it takes, and that every other line is refused with its
// number.
// SPDX-License-Identifier: Apache-2.0
#include "demo/trace_file.hpp"

#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temp_dir.hpp"

namespace crossdock::tools::pd {
namespace {

TEST(TraceFile, ReadsLengthAndHashesAndIgnoresTheRest) {
  const auto job = parse_trace_line(
      R"({"timestamp": 27, "input_length": 1025, "who": "a,}b", "more": [1, 2], "hash_ids": [46, 47, 9]})");
  ASSERT_TRUE(job.ok()) << job.error().describe();
  EXPECT_EQ(job->num_tokens, 1025u);
  EXPECT_THAT(job->hashes, testing::ElementsAre(46, 47, 9));
  EXPECT_EQ(job->num_pages(16), 65u);
}

TEST(TraceFile, RefusesEverythingElse) {
  const char* const bad[] = {
      "",
      "{",
      "[]",
      "{}",
      R"({"input_length": 5})",
      R"({"hash_ids": [1]})",
      R"({"input_length": 0, "hash_ids": []})",
      R"({"input_length": -1, "hash_ids": [1]})",
      R"({"input_length": 99999999999, "hash_ids": [1]})",
      R"({"input_length": 99999999999999999999999, "hash_ids": [1]})",
      R"({"input_length": 600, "hash_ids": [1]})",
      R"({"input_length": 5, "hash_ids": [1)",
      R"({"input_length": 5, "hash_ids": ["x"]})",
      R"({"input_length": "5", "hash_ids": [1]})",
      R"({"input_length 5})",
  };
  for (const char* line : bad)
    EXPECT_EQ(parse_trace_line(line).code(), Code::kInvalidArgument) << line;
}

TEST(TraceFile, ErrorsNameFileAndLine) {
  const support::TempDir dir;
  const std::string path = dir.path() + "/trace.jsonl";
  std::ofstream(path) << "{\"input_length\": 5, \"hash_ids\": [1]}\n\nrubbish\n";
  const auto jobs = read_trace(path);
  ASSERT_EQ(jobs.code(), Code::kInvalidArgument);
  EXPECT_THAT(jobs.error().message, testing::HasSubstr("trace.jsonl:3:"));
  EXPECT_EQ(read_trace(dir.path() + "/none").code(), Code::kNotFound);
}

TEST(TraceFile, TheShippedExcerptIsWhole) {
  const auto path = find_excerpt();
  ASSERT_TRUE(path.ok()) << path.error().describe();
  const auto jobs = read_trace(*path);
  ASSERT_TRUE(jobs.ok()) << jobs.error().describe();
  EXPECT_EQ(jobs->size(), 200u);
}

}  // namespace
}  // namespace crossdock::tools::pd
