// Logger: a small shared handle for log lines. There is no global logger; an engine is given one
// and hands `logger.component("transport.tcp")` to its parts. Thread-safe. Disabled lines cost one
// comparison. The header names no formatting library: callers format, best through CROSSDOCK_LOG.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <crossdock/core/result.hpp>

namespace crossdock::base {

enum class LogLevel : std::uint8_t { kTrace = 0, kDebug, kInfo, kWarn, kError, kOff };
std::string_view to_string(LogLevel level) noexcept;  // "info"

struct LogRecord {
  LogLevel level = LogLevel::kInfo;
  std::string_view component;
  std::string_view message;
  std::uint64_t wall_ns = 0;   // since 1970
  std::int64_t thread_id = 0;  // gettid()
};

// Called on whichever thread logs, possibly on several at once. An exception it throws is
// swallowed.
using LogSink = std::function<void(const LogRecord&)>;

// "2026-01-31T12:00:00.123456Z info transport.tcp [4711] message" with control characters escaped,
// so that a peer's text cannot forge lines.
std::string format_log_line(const LogRecord& record);

class Logger {
 public:
  // Writes nothing.
  Logger() = default;
  // `spec`: a level, or levels by component with the longest matching prefix winning:
  // "info,transport.tcp=debug,wire=off". Without a sink, stderr gets what it takes at once.
  static Result<Logger> create(std::string_view spec, LogSink sink = {});

  // The same log under another component name.
  [[nodiscard]] Logger component(std::string_view name) const;

  [[nodiscard]] bool enabled(LogLevel level) const noexcept { return level >= level_; }
  void write(LogLevel level, std::string_view message) const noexcept;

  // True the first time for `key` and again each time `interval` has gone by since the last true:
  // for faults that would repeat with every slice. Keys are shared by all components of one log.
  [[nodiscard]] bool first(std::string_view key,
                           std::chrono::nanoseconds interval = std::chrono::hours(24 * 365)) const;

 private:
  struct Core;
  std::shared_ptr<Core> core_;
  std::shared_ptr<const std::string> component_;
  LogLevel level_ = LogLevel::kOff;
};

}  // namespace crossdock::base

// CROSSDOCK_LOG(log, kWarn, "peer {} left: {}", name, why); the .cpp includes <fmt/format.h>.
// Arguments are not evaluated when the level is off.
#define CROSSDOCK_LOG(logger, level, ...)                                             \
  do {                                                                                \
    if ((logger).enabled(::crossdock::base::LogLevel::level))                         \
      (logger).write(::crossdock::base::LogLevel::level, ::fmt::format(__VA_ARGS__)); \
  } while (0)
// The same, once per key (and again after a minute of repeats).
#define CROSSDOCK_LOG_ONCE(logger, level, key, ...)                                   \
  do {                                                                                \
    if ((logger).enabled(::crossdock::base::LogLevel::level) &&                       \
        (logger).first((key), ::std::chrono::minutes(1)))                             \
      (logger).write(::crossdock::base::LogLevel::level, ::fmt::format(__VA_ARGS__)); \
  } while (0)
