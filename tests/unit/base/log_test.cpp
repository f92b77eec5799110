// SPDX-License-Identifier: Apache-2.0
#include "base/log.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/fd.hpp"
#include "support/alarm.hpp"
#include "support/temp_dir.hpp"

namespace crossdock::base {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::MatchesRegex;

struct Captured {
  std::mutex mutex;
  std::vector<std::string> lines;
  LogSink sink() {
    return [this](const LogRecord& r) {
      const std::lock_guard lock(mutex);
      lines.push_back(fmt::format("{} {} {}", to_string(r.level), r.component, r.message));
    };
  }
};

TEST(Logger, LevelsByComponentLongestPrefixWins) {
  Captured captured;
  const Logger root =
      *Logger::create("warn,transport=info,transport.tcp=debug,wire=off", captured.sink());
  EXPECT_FALSE(root.enabled(LogLevel::kInfo));
  EXPECT_TRUE(root.enabled(LogLevel::kWarn));
  EXPECT_TRUE(root.component("transport.tcp").enabled(LogLevel::kDebug));
  EXPECT_TRUE(root.component("transport.tcp.lane").enabled(LogLevel::kDebug));
  EXPECT_FALSE(root.component("transport.shm").enabled(LogLevel::kDebug));
  EXPECT_TRUE(root.component("transport.shm").enabled(LogLevel::kInfo));
  EXPECT_FALSE(root.component("transporter").enabled(LogLevel::kInfo));
  EXPECT_FALSE(root.component("wire").enabled(LogLevel::kError));
}

TEST(Logger, OnlyEnabledLinesAreFormatted) {
  Captured captured;
  const Logger log = Logger::create("info", captured.sink())->component("mem");
  int formatted = 0;
  const auto expensive = [&] { return ++formatted; };
  CROSSDOCK_LOG(log, kDebug, "n {}", expensive());
  EXPECT_EQ(formatted, 0);
  CROSSDOCK_LOG(log, kInfo, "n {}", expensive());
  EXPECT_THAT(captured.lines, ElementsAre("info mem n 1"));
}

TEST(Logger, SaysWhatIsWrongWithASpec) {
  EXPECT_THAT(Logger::create("inf").error().message, HasSubstr("did you mean 'info'?"));
  EXPECT_THAT(Logger::create("a=loud").error().message, HasSubstr("'loud' is no log level"));
  EXPECT_THAT(Logger::create("=info").error().message, HasSubstr("names no component"));
  EXPECT_TRUE(Logger::create("").ok());
  EXPECT_TRUE(Logger::create("info,, a=debug").ok());
}

TEST(Logger, DefaultConstructedIsSilent) {
  const Logger log;
  EXPECT_FALSE(log.enabled(LogLevel::kError));
  log.write(LogLevel::kError, "nobody hears this");
  EXPECT_FALSE(log.first("key"));
  EXPECT_FALSE(log.component("x").enabled(LogLevel::kError));
}

TEST(Logger, AThrowingSinkIsContained) {
  const Logger log =
      *Logger::create("info", [](const LogRecord&) { throw std::runtime_error("x"); });
  log.write(LogLevel::kError, "still here");
}

TEST(Logger, FirstIsOncePerKeyAndInterval) {
  const Logger log = *Logger::create("info", [](const LogRecord&) {});
  EXPECT_TRUE(log.first("a"));
  EXPECT_FALSE(log.first("a"));
  EXPECT_TRUE(log.first("b"));
  EXPECT_FALSE(log.component("other").first("b")) << "keys belong to the whole log";
  EXPECT_TRUE(log.first("b", std::chrono::nanoseconds(0)));
}

TEST(Logger, LogOnceWritesOnce) {
  Captured captured;
  const Logger log = *Logger::create("info", captured.sink());
  for (int i = 0; i < 100; ++i)
    CROSSDOCK_LOG_ONCE(log, kWarn, "rail 0", "rail 0 lost, {}", i);
  EXPECT_THAT(captured.lines, ElementsAre("warn crossdock rail 0 lost, 0"));
}

TEST(Logger, ManyThreadsShareOneLog) {
  Captured captured;
  const Logger log = *Logger::create("info", captured.sink());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&log, t] {
      const Logger mine = log.component("t" + std::to_string(t));
      for (int i = 0; i < 100; ++i)
        CROSSDOCK_LOG(mine, kInfo, "{}", i);
    });
  for (auto& thread : threads)
    thread.join();
  EXPECT_EQ(captured.lines.size(), 400u);
}

TEST(LogLine, HasTimeLevelComponentThread) {
  const LogRecord record{.level = LogLevel::kWarn,
                         .component = "wire",
                         .message = "bad",
                         .wall_ns = 1'700'000'000'123'456'789u,
                         .thread_id = 42};
  EXPECT_EQ(format_log_line(record), "2023-11-14T22:13:20.123456Z warn wire [42] bad");
}

TEST(LogLine, ForeignTextCannotForgeLines) {
  const LogRecord record{.component = "c", .message = "a\nb\x1b[31m", .wall_ns = 0};
  EXPECT_THAT(format_log_line(record), HasSubstr("a\\x0ab\\x1b[31m"));
}

TEST(LogStderr, DefaultSinkWritesOneLine) {
  testing::internal::CaptureStderr();
  const Logger log = *Logger::create("info");
  CROSSDOCK_LOG(log, kInfo, "hello {}", 7);
  CROSSDOCK_LOG(log, kDebug, "not this");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              MatchesRegex("[0-9T:.-]+Z info crossdock \\[[0-9]+\\] hello 7\n"));
}

// stderr as a pipe, which nobody reads unless the test does.
class PipedStderr {
 public:
  PipedStderr() : before_(::dup(STDERR_FILENO)) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[1]);
    out_.reset(ends[0]);
  }
  ~PipedStderr() { ::dup2(before_.get(), STDERR_FILENO); }
  [[nodiscard]] std::string read() const {
    std::string all;
    char chunk[4096];
    for (ssize_t n = 0; (n = ::read(out_.get(), chunk, sizeof chunk)) > 0;)
      all.append(chunk, static_cast<std::size_t>(n));
    return all;
  }

 private:
  UniqueFd before_, out_;
};

// A host that reads the output of this process late, or only at its end.
TEST(LogStderr, NobodyWaitsForTheReaderOfAFullPipe) {
  const support::Alarm alarm(std::chrono::seconds(30));  // ends the test where it waits
  const PipedStderr piped;
  const Logger log = *Logger::create("info");
  const std::string text(1000, 'x');
  for (int i = 0; i < 200; ++i)  // more than a pipe holds
    CROSSDOCK_LOG(log, kInfo, "{}", text);
  const std::string some = piped.read();
  EXPECT_TRUE(some.ends_with(text + "\n")) << "whole lines";
  CROSSDOCK_LOG(log, kInfo, "go on");
  const auto lost = 200 - std::count(some.begin(), some.end(), '\n');
  ASSERT_GT(lost, 0);
  EXPECT_THAT(piped.read(),
              MatchesRegex(fmt::format("[^ ]+ warn crossdock [^ ]+ {} lines are lost here: stderr "
                                       "was full\n[^ ]+ info crossdock [^ ]+ go on\n",
                                       lost)));
  const std::string longer(60'000, 'y');
  for (int i = 0; i < 4; ++i)
    CROSSDOCK_LOG(log, kInfo, "{}", longer);
}

// A terminal that was stopped, or whose connection hangs.
TEST(LogStderr, NobodyWaitsForATerminalThatDoesNotRead) {
  const UniqueFd screen(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK));
  if (!screen || ::grantpt(screen.get()) != 0 || ::unlockpt(screen.get()) != 0)
    GTEST_SKIP() << "no terminals here: " << std::strerror(errno);
  const UniqueFd terminal(::open(::ptsname(screen.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal);
  const UniqueFd before(::dup(STDERR_FILENO));
  const support::Alarm alarm(std::chrono::seconds(30));  // ends the test where it waits
  ::dup2(terminal.get(), STDERR_FILENO);
  const Logger log = *Logger::create("info");
  for (int i = 0; i < 2000; ++i)
    CROSSDOCK_LOG(log, kInfo, "{}", std::string(150, 'x'));
  ::dup2(before.get(), STDERR_FILENO);
  std::array<char, 4096> some{};
  EXPECT_GT(::read(screen.get(), some.data(), some.size()), 150);
  EXPECT_EQ(::fcntl(terminal.get(), F_GETFL) & O_NONBLOCK, 0) << "the host's flags";
}

TEST(LogStderr, FilesGetEveryLine) {
  const support::TempDir dir;
  const UniqueFd before(::dup(STDERR_FILENO));
  const std::string path = dir.write("log", "");
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  ASSERT_TRUE(file);
  ::dup2(file.get(), STDERR_FILENO);
  const Logger log = *Logger::create("info");
  const std::string text(10'000, 'x');
  for (int i = 0; i < 500; ++i)
    CROSSDOCK_LOG(log, kInfo, "{}", text);
  ::dup2(before.get(), STDERR_FILENO);
  std::ifstream lines(path);
  int n = 0;
  for (std::string line; std::getline(lines, line); ++n)
    EXPECT_TRUE(line.ends_with(" " + text));
  EXPECT_EQ(n, 500);
}

}  // namespace
}  // namespace crossdock::base
