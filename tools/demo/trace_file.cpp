// A small reader for the flat objects of the trace: numbers and one list of numbers. Strict about
// what it uses, indifferent to other keys.
// SPDX-License-Identifier: Apache-2.0
#include "demo/trace_file.hpp"

#include <charconv>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <optional>

namespace crossdock::tools::pd {
namespace {

// The longest prompt that is believed; far above any model's context.
constexpr std::uint64_t kMostTokens = 16'777'216;

class LineReader {
 public:
  explicit LineReader(std::string_view rest) : rest_(rest) {}

  bool take(char c) {
    skip_space();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }
  std::optional<std::string_view> key() {
    if (!take('"')) return std::nullopt;
    const auto end = rest_.find('"');
    if (end == std::string_view::npos) return std::nullopt;
    const auto name = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    if (!take(':')) return std::nullopt;
    return name;
  }
  std::optional<std::uint64_t> number() {
    skip_space();
    std::uint64_t value = 0;
    const auto [end, problem] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (problem != std::errc{}) return std::nullopt;
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return value;
  }
  std::optional<std::vector<std::uint64_t>> numbers() {
    std::vector<std::uint64_t> out;
    if (!take('[')) return std::nullopt;
    if (take(']')) return out;
    do {
      const auto value = number();
      if (!value) return std::nullopt;
      out.push_back(*value);
    } while (take(','));
    if (!take(']')) return std::nullopt;
    return out;
  }
  // A value of a key that is not used: a number, a list, or a plain string.
  bool skip_value() {
    skip_space();
    if (rest_.starts_with('[')) return numbers().has_value();
    if (take('"')) {
      const auto end = rest_.find('"');
      if (end == std::string_view::npos) return false;
      rest_.remove_prefix(end + 1);
      return true;
    }
    const auto end = rest_.find_first_of(",}");
    if (end == std::string_view::npos || end == 0) return false;
    rest_.remove_prefix(end);
    return true;
  }

 private:
  void skip_space() {
    while (!rest_.empty() && (rest_.front() == ' ' || rest_.front() == '\t'))
      rest_.remove_prefix(1);
  }
  std::string_view rest_;
};

struct Fields {
  std::optional<std::uint64_t> input_length;
  std::optional<std::vector<std::uint64_t>> hash_ids;
};

bool read_fields(LineReader& reader, Fields& fields) {
  if (!reader.take('{')) return false;
  do {
    const auto key = reader.key();
    if (!key) return false;
    if (*key == "input_length") {
      fields.input_length = reader.number();
      if (!fields.input_length) return false;
    } else if (*key == "hash_ids") {
      fields.hash_ids = reader.numbers();
      if (!fields.hash_ids) return false;
    } else if (!reader.skip_value()) {
      return false;
    }
  } while (reader.take(','));
  return reader.take('}');
}

}  // namespace

Result<Job> parse_trace_line(std::string_view line) {
  LineReader reader(line);
  Fields fields;
  if (!read_fields(reader, fields))
    return invalid_argument("not a flat JSON object of numbers and lists of numbers");
  if (!fields.input_length || !fields.hash_ids)
    return invalid_argument("it must have input_length and hash_ids");
  if (*fields.input_length == 0 || *fields.input_length > kMostTokens)
    return invalid_argument(fmt::format("input_length = {} must be between 1 and {}",
                                        *fields.input_length, kMostTokens));
  Job job;
  job.num_tokens = static_cast<std::uint32_t>(*fields.input_length);
  job.hashes = std::move(*fields.hash_ids);
  const std::size_t blocks = (job.num_tokens + kHashTokens - 1) / kHashTokens;
  if (job.hashes.size() != blocks)
    return invalid_argument(fmt::format("{} hash_ids for {} blocks of {} tokens", job.hashes.size(),
                                        blocks, kHashTokens));
  return job;
}

Result<std::vector<Job>> read_trace(const std::string& path) {
  std::ifstream file(path);
  if (!file) return make_error(Code::kNotFound, fmt::format("cannot open the trace {}", path));
  std::vector<Job> jobs;
  std::string line;
  for (std::uint64_t number = 1; std::getline(file, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    auto job = parse_trace_line(line);
    if (!job.ok())
      return invalid_argument(fmt::format("{}:{}: {}", path, number, job.error().message));
    job->id = number;
    jobs.push_back(std::move(*job));
  }
  if (jobs.empty()) return invalid_argument(fmt::format("the trace {} has no requests", path));
  return jobs;
}

Result<std::string> find_excerpt() {
  namespace fs = std::filesystem;
  std::error_code problem;
  const fs::path self = fs::read_symlink("/proc/self/exe", problem);
  const fs::path file = "conversation_excerpt.jsonl";
  std::vector<fs::path> candidates = {self.parent_path() / "../share/crossdock" / file};
  // In a build tree the executable lies some folders below the root of the sources.
  for (fs::path up = self.parent_path(); up.has_relative_path(); up = up.parent_path())
    candidates.push_back(up / "examples/data" / file);
  for (const fs::path& candidate : candidates)
    if (fs::is_regular_file(candidate, problem)) return candidate.lexically_normal().string();
  return make_error(Code::kNotFound,
                    fmt::format("{} is neither installed nor in a source tree above {}; give "
                                "--trace FILE or --tokens N",
                                file.string(), self.string()));
}

}  // namespace crossdock::tools::pd
