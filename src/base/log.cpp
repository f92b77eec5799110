// Level specs, the default sink, and first-time keys of Logger. Runs on the thread that logs; the
// lock is held only around the key table, never while a sink runs.
// SPDX-License-Identifier: Apache-2.0
#include "base/log.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <fcntl.h>
#include <fmt/format.h>
#include <iterator>
#include <mutex>
#include <optional>
#include <poll.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "base/strings.hpp"

namespace crossdock::base {
namespace {

constexpr std::array<std::string_view, 6> kLevelNames = {"trace", "debug", "info",
                                                         "warn",  "error", "off"};
// Beyond this the key table starts afresh: repeats may then show again, but memory stays bounded.
constexpr std::size_t kMaxKeys = 4096;

Result<LogLevel> parse_level(std::string_view text) {
  const auto it = std::find(kLevelNames.begin(), kLevelNames.end(), text);
  if (it != kLevelNames.end()) return static_cast<LogLevel>(it - kLevelNames.begin());
  return invalid_argument(fmt::format("'{}' is no log level; use {}{}", text,
                                      fmt::join(kLevelNames, ", "),
                                      did_you_mean(text, kLevelNames)));
}

struct Rule {
  std::string prefix;  // component, or "" for the default
  LogLevel level = LogLevel::kInfo;
};

Result<std::vector<Rule>> parse_spec(std::string_view spec) {
  std::vector<Rule> rules = {{"", LogLevel::kInfo}};
  for (const auto part : split(spec, ',')) {
    if (part.empty()) continue;
    const auto equals = part.find('=');
    if (equals == std::string_view::npos) {
      CROSSDOCK_TRY(level, parse_level(part));
      rules.front().level = level;
      continue;
    }
    CROSSDOCK_TRY(level, parse_level(trim(part.substr(equals + 1))));
    const auto name = trim(part.substr(0, equals));
    if (name.empty())
      return invalid_argument(fmt::format(
          "'{}' names no component; write component=level, as in transport.tcp=debug", part));
    rules.push_back({std::string(name), level});
  }
  return rules;
}

// "transport" governs "transport" and "transport.tcp", not "transporter".
bool governs(const Rule& rule, std::string_view component) {
  if (rule.prefix.empty()) return true;
  if (!component.starts_with(rule.prefix)) return false;
  return component.size() == rule.prefix.size() || component[rule.prefix.size()] == '.';
}

LogLevel level_for(const std::vector<Rule>& rules, std::string_view component) {
  const Rule* best = &rules.front();
  for (const Rule& rule : rules)
    if (governs(rule, component) && rule.prefix.size() >= best->prefix.size()) best = &rule;
  return best->level;
}

bool is_file(int fd) {
  struct stat info{};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

// A terminal knows no RWF_NOWAIT, and poll() promises one byte: so it is written through an open
// file of its own, which does not wait and leaves the host's flags as they are. Where there is none
// to be had it is written as it is: the line matters more.
ssize_t write_terminal(int fd, const iovec& piece) {
  const std::string path = fmt::format("/proc/self/fd/{}", fd);
  const UniqueFd own(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  return ::writev(own ? own.get() : fd, &piece, 1);
}

// As much as `fd` takes without waiting for a reader; 0 when that is nothing.
std::size_t write_now(int fd, std::string_view bytes) {
  pollfd item{.fd = fd, .events = POLLOUT, .revents = 0};
  if (::poll(&item, 1, 0) != 1 || (item.revents & POLLOUT) == 0) return 0;
  if ((item.revents & POLLERR) != 0) return 0;  // no reader any more: a signal to the host
  // So much a pipe takes in one piece, when poll() says that it takes something.
  iovec piece{const_cast<char*>(bytes.data()), std::min<std::size_t>(bytes.size(), PIPE_BUF)};
  // Another writer may have been faster. Not every kind of file knows the flag, a terminal does
  // not; and for files on disk it also means not to wait for memory, which is not meant.
  ssize_t n = ::pwritev2(fd, &piece, 1, -1, RWF_NOWAIT);
  if (n < 0 && (errno != EAGAIN || is_file(fd)))
    n = ::isatty(fd) != 0 ? write_terminal(fd, piece) : ::writev(fd, &piece, 1);
  return n > 0 ? static_cast<std::size_t>(n) : 0;
}

// Whole or in part; a line that is begun and not ended is better than none.
bool write_line(const LogRecord& record) {
  const std::string line = format_log_line(record) + "\n";
  std::size_t done = 0;
  for (std::size_t n = 1; n != 0 && done < line.size(); done += n)
    n = write_now(STDERR_FILENO, std::string_view(line).substr(done));
  return done == line.size();
}

// Waits for nobody: threads that keep peers alive log too, and the host may read its stderr late.
class StderrSink {
 public:
  void operator()(const LogRecord& record) const {
    const std::uint64_t lost = lost_->exchange(0, std::memory_order_relaxed);
    if (lost != 0 && !tell_lost(record, lost))
      lost_->fetch_add(lost + 1, std::memory_order_relaxed);
    else if (!write_line(record))
      lost_->fetch_add(1, std::memory_order_relaxed);
  }

 private:
  static bool tell_lost(LogRecord record, std::uint64_t lost) {
    const std::string text = fmt::format("{} lines are lost here: stderr was full", lost);
    record.level = LogLevel::kWarn;
    record.component = "crossdock";
    record.message = text;
    return write_line(record);
  }

  std::shared_ptr<std::atomic<std::uint64_t>> lost_ =
      std::make_shared<std::atomic<std::uint64_t>>(0);
};

void append_escaped(std::string& out, std::string_view text) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f)
      out += c;
    else
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", byte);
  }
}

}  // namespace

struct Logger::Core {
  std::vector<Rule> rules;
  LogSink sink;
  std::mutex mutex;
  std::unordered_map<std::string, std::uint64_t> last_shown_ns;
};

std::string_view to_string(LogLevel level) noexcept {
  return kLevelNames[static_cast<std::size_t>(level)];
}

std::string format_log_line(const LogRecord& record) {
  const auto seconds = static_cast<time_t>(record.wall_ns / 1'000'000'000u);
  tm utc{};
  ::gmtime_r(&seconds, &utc);
  std::string line =
      fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:06}Z {} ", utc.tm_year + 1900,
                  utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                  record.wall_ns / 1000 % 1'000'000, to_string(record.level));
  append_escaped(line, record.component);
  fmt::format_to(std::back_inserter(line), " [{}] ", record.thread_id);
  append_escaped(line, record.message);
  return line;
}

Result<Logger> Logger::create(std::string_view spec, LogSink sink) {
  CROSSDOCK_TRY(rules, parse_spec(spec));
  Logger logger;
  logger.core_ = std::make_shared<Core>();
  logger.core_->rules = std::move(rules);
  logger.core_->sink = sink ? std::move(sink) : LogSink(StderrSink());
  return logger.component("crossdock");
}

Logger Logger::component(std::string_view name) const {
  Logger other = *this;
  if (core_ == nullptr) return other;
  other.component_ = std::make_shared<const std::string>(name);
  other.level_ = level_for(core_->rules, name);
  return other;
}

void Logger::write(LogLevel level, std::string_view message) const noexcept {
  if (core_ == nullptr || level == LogLevel::kOff || !enabled(level)) return;
  const LogRecord record{.level = level,
                         .component = *component_,
                         .message = message,
                         .wall_ns = wall_ns(),
                         .thread_id = ::gettid()};
  try {
    core_->sink(record);
  } catch (...) {  // NOLINT(bugprone-empty-catch): a broken sink must not end the data plane
  }
}

bool Logger::first(std::string_view key, std::chrono::nanoseconds interval) const {
  if (core_ == nullptr) return false;
  const std::uint64_t now = now_ns();
  const std::lock_guard lock(core_->mutex);
  auto& shown = core_->last_shown_ns;
  if (shown.size() >= kMaxKeys) shown.clear();
  const auto [it, is_new] = shown.try_emplace(std::string(key), now);
  if (is_new) return true;
  if (now - it->second < static_cast<std::uint64_t>(interval.count())) return false;
  it->second = now;
  return true;
}

}  // namespace crossdock::base
