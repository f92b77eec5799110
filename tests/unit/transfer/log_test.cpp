// The log of an engine in the hands of its host.
// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <gmock/gmock.h>
#include <mutex>
#include <stdexcept>

#include "support/engines.hpp"

namespace crossdock::testing {
namespace {

using transfer::LogLine;

// Of which an engine warns when it is created.
class UnknownVariable {
 public:
  UnknownVariable() { ::setenv("CROSSDOCK_NO_SUCH_SETTING", "1", 1); }
  ~UnknownVariable() { ::unsetenv("CROSSDOCK_NO_SUCH_SETTING"); }
};

TEST(EngineLog, LinesGoToTheHostInPlaceOfStderr) {
  const UnknownVariable unknown;
  std::mutex mutex;
  std::vector<std::string> lines;
  ::testing::internal::CaptureStderr();
  {
    const auto engine =
        make_engine("tcp", {.on_log = [&](const LogLine& line) {
                      const std::lock_guard lock(mutex);
                      lines.push_back(std::string(line.level) + " " + std::string(line.component) +
                                      ": " + std::string(line.message));
                    }});
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_THAT(lines, ::testing::Contains(
                         ::testing::AllOf(::testing::StartsWith("warn transfer: "),
                                          ::testing::HasSubstr("CROSSDOCK_NO_SUCH_SETTING"))));
}

TEST(EngineLog, AHostThatThrowsEndsNothing) {
  const UnknownVariable unknown;
  auto engine = Engine::create({.config = {{"transport.enabled", "tcp"}},
                                .on_log = [](const LogLine&) { throw std::runtime_error("x"); }});
  ASSERT_TRUE(engine.ok()) << engine.error().describe();
  EXPECT_TRUE(engine->close(soon()).ok());
}

}  // namespace
}  // namespace crossdock::testing
